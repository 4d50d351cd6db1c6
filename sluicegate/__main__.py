"""`python -m sluicegate`."""

import sys

from sluicegate.command import main

if __name__ == "__main__":
    sys.exit(main())
