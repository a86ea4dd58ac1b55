"""`python -m cbexp.report FOLDER...` and `python -m cbexp.report compare OLD NEW`."""

import sys

from cbexp.report.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
