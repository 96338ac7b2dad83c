"""`pfljax scaling`, as `python -m experiments.scaling`."""

from pfljax.cli import launch
from pfljax.cli.scaling import COMMAND

if __name__ == "__main__":
    launch.main(COMMAND)
