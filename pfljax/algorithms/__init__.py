"""The methods; each registers itself where it stands, in the order of these imports."""

# isort: off
from pfljax.algorithms.fedavg import FedAvg, FedAvgPlus
from pfljax.algorithms.fedavg_data import FedAvgData
from pfljax.algorithms.fedprox import FedProx
from pfljax.algorithms.lg_fedavg import LGFedAvg
from pfljax.algorithms.per_fedavg import PerFedAvg
from pfljax.algorithms.pfedme import PFedMe
from pfljax.algorithms.fedopt import FedAdam, FedAvgM
from pfljax.algorithms.scaffold import Scaffold
from pfljax.algorithms.q_ffl import QFFL
from pfljax.algorithms.afl import AFL
from pfljax.algorithms.fedper import FedPer
from pfljax.algorithms.ditto import Ditto
from pfljax.algorithms.apfl import APFL
from pfljax.algorithms.l2sgd import L2SGD

# isort: on
from pfljax.core.method import METHODS, get

__all__ = [
    "AFL",
    "APFL",
    "L2SGD",
    "METHODS",
    "QFFL",
    "Ditto",
    "FedAdam",
    "FedAvg",
    "FedAvgData",
    "FedAvgM",
    "FedAvgPlus",
    "FedPer",
    "FedProx",
    "LGFedAvg",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "get",
]
