"""Building blocks that several methods share, and starting points for your own method.

`averaging`: a server averages one model. `sharing_layers`: part of the model stays with its client. `surrogates`:
models that minimize a surrogate. `gradients`: rounds that send gradients.
"""

from pfljax.algorithms.common.aggregation import average, weighted
from pfljax.algorithms.common.averaging import averaging
from pfljax.algorithms.common.layers import Phase, sharing_layers

__all__ = ["Phase", "average", "averaging", "sharing_layers", "weighted"]
