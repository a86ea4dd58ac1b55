"""`python -m cbexp`: see `cbexp.cli`."""

from cbexp.cli import main

if __name__ == "__main__":
    main()
