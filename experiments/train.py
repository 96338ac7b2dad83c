"""`pfljax train`, as `python -m experiments.train`."""

from pfljax.cli import launch
from pfljax.cli.train import COMMAND

if __name__ == "__main__":
    launch.main(COMMAND)
