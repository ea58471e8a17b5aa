"""`python -m kt_runtime`: the command line."""

import sys

from kt_runtime.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
