"""All methods, by class: `pfl.methods.FedAvg()`. `METHODS` maps each registered name to its class."""

from pfljax import algorithms
from pfljax.algorithms import *  # noqa: F403
from pfljax.settings.method import METHODS

__all__ = ["METHODS"]
__all__ += algorithms.__all__


def __dir__() -> list[str]:
    return __all__
