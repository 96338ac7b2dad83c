"""Building blocks that several methods share, and starting points for your own method.

`averaging`: a server averages one model. `sharing_layers`: part of the model stays with its client.
`surrogates`: models that minimize a surrogate. `gradients`: rounds that send gradients.
"""

from pfljax.algorithms.common.aggregation import average, client_weight, mean
from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.algorithms.common.layers import Phase, sharing_layers, train_phases

__all__ = [
    "Phase",
    "Received",
    "ServerStep",
    "average",
    "averaging",
    "client_weight",
    "mean",
    "sharing_layers",
    "train_phases",
]
