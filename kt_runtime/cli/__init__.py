"""The commands, one file or folder each. A command imports its dependencies when it runs, so that `--help` is fast."""
