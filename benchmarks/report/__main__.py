"""`python -m benchmarks.report`."""

import sys

from benchmarks.report.page import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
