"""Commands, a file or folder each. A command imports what it needs when it runs, so that `--help` answers at once."""
