"""All methods, by class: `pfl.methods.FedAvg()`. `METHODS` maps each registered name to its class.

`describe` says what a method is, for programs.
"""

from pfljax import algorithms
from pfljax.algorithms import *  # noqa: F403
from pfljax.api.describing import describe
from pfljax.settings.method import METHODS

__all__ = ["METHODS", "describe"]
__all__ += algorithms.__all__


def __dir__() -> list[str]:
    return __all__
