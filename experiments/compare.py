"""`pfljax compare`, as `python -m experiments.compare`."""

from pfljax.cli import launch
from pfljax.cli.compare import COMMAND

if __name__ == "__main__":
    launch.main(COMMAND)
