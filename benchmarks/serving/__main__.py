"""`python -m benchmarks.serving`."""

import sys

from benchmarks.serving.load import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
