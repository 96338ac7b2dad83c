"""Networks that are rewritten when they are traced, so that they are lowered well on each kind of device.

`rewritten` is the entry: a network's function -> the same function, in forms that are fast where it is compiled.
"""

from pfljax.models.rewriting.rewriting import bound, equations, evaluate, rewritten, slow_layers

__all__ = ["bound", "equations", "evaluate", "rewritten", "slow_layers"]
