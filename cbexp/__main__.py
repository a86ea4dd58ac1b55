"""`python -m cbexp`: see `cbexp.cli.command_line`."""

import sys

if __name__ == "__main__":
    try:
        from cbexp.cli.command_line import main

        main()
    except KeyboardInterrupt:
        sys.stderr.write("INTERRUPTED: stopped by Ctrl-C before a job had started\n")
        sys.exit(130)
