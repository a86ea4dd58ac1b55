"""`python -m cbexp`: see `cbexp.cli.command_line`."""

from cbexp.cli.command_line import main

if __name__ == "__main__":
    main()
