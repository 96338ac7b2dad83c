"""Lets `python -m pfljax` run the command."""

from pfljax.cli import main

if __name__ == "__main__":
    main()
