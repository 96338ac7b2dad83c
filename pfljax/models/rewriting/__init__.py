"""Networks that are rewritten when they are traced, so that they are lowered well on each kind of device.

`rewritten` is the entry: a network's function -> the same function, in forms that are fast where it is compiled. The
modules of this package are its own; others import the names below.
"""

from pfljax.models.rewriting.rewriting import evaluate, rewritten, slow_layers, use_forms
from pfljax.models.rewriting.tracing import bound, equations

__all__ = ["bound", "equations", "evaluate", "rewritten", "slow_layers", "use_forms"]


def __dir__() -> list[str]:
    return __all__
