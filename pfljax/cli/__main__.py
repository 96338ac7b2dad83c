"""`python -m pfljax.cli` is `pfljax`."""

from pfljax.cli import main

if __name__ == "__main__":
    main()
