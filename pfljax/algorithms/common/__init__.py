"""What several methods share, and what a method of one's own starts from.

`averaging` is one model that a server averages, `sharing_layers` a model of which a part stays with its client,
`surrogates` models that minimize a surrogate, `gradients` rounds that send gradients.
"""

from pfljax.algorithms.common.aggregation import average, weighted
from pfljax.algorithms.common.averaging import Phase, averaging, sharing_layers

__all__ = ["Phase", "average", "averaging", "sharing_layers", "weighted"]
