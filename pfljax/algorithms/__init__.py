"""The methods; importing a method registers it, in the order of these imports."""

# isort: off
from pfljax.algorithms.local import Local
from pfljax.algorithms.fedavg import FedAvg
from pfljax.algorithms.fedavg_plus import FedAvgPlus
from pfljax.algorithms.fedavg_data import FedAvgData
from pfljax.algorithms.ccvr import CCVR
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
from pfljax.algorithms.fml import FML
from pfljax.algorithms.fedkd import FedKD
from pfljax.algorithms.perada import PerAda
from pfljax.algorithms.l2sgd import L2SGD
from pfljax.algorithms.fedamp import FedAMP
from pfljax.algorithms.pfedgraph import PFedGraph
from pfljax.algorithms.fedcac import FedCAC
from pfljax.algorithms.ifca import IFCA, HypCluster
from pfljax.algorithms.pfedmb import PFedMB
from pfljax.algorithms.floco import Floco
from pfljax.algorithms.mocha import MOCHA
from pfljax.algorithms.clustered import ClusteredFL
from pfljax.algorithms.fedfomo import FedFomo
from pfljax.algorithms.fedfomo_average import FedFomoAverage
from pfljax.algorithms.fedem import DFedEM, FedEM
from pfljax.algorithms.feddyn import FedDyn
from pfljax.algorithms.fednova import FedNova
from pfljax.algorithms.moon import MOON
from pfljax.algorithms.fedntd import FedNTD
from pfljax.algorithms.fedlc import FedLC
from pfljax.algorithms.fedsam import FedSAM, MoFedSAM
from pfljax.algorithms.fedproto import FedProto
from pfljax.algorithms.fedgh import FedGH
from pfljax.algorithms.fedexp import FedExP
from pfljax.algorithms.fedasync import FedAsync
from pfljax.algorithms.fedbuff import FedBuff
from pfljax.algorithms.fedrep import FedRep
from pfljax.algorithms.fedbabu import FedBABU
from pfljax.algorithms.fedbn import FedBN
from pfljax.algorithms.fedrod import FedRoD
from pfljax.algorithms.feddbe import FedDBE
from pfljax.algorithms.fedpac import FedPAC
from pfljax.algorithms.fedas import FedAS
from pfljax.algorithms.pfedfda import PFedFDA
from pfljax.algorithms.gpfl import GPFL
from pfljax.algorithms.fedcp import FedCP
from pfljax.algorithms.flute import FLUTE
from pfljax.algorithms.fedala import FedALA
from pfljax.algorithms.fedah import FedAH
from pfljax.algorithms.knn_per import KNNPer
from pfljax.algorithms.apple import APPLE
from pfljax.algorithms.pfedhn import PFedHN
from pfljax.algorithms.pefll import PeFLL
from pfljax.algorithms.fedtp import FedTP
from pfljax.algorithms.federico import FedeRiCo
from pfljax.algorithms.federico_centralized import FedeRiCoCentralized
from pfljax.algorithms.federico_friends import FedeRiCoFriends

from pfljax.algorithms.partial import FedAlt, FedSim
from pfljax.algorithms.fedit import FedIT
from pfljax.algorithms.ffa_lora import FFALoRA
from pfljax.algorithms.fedsa_lora import FedSALoRA
from pfljax.algorithms.flexlora import FlexLoRA
from pfljax.algorithms.feddpa import FedDPA
from pfljax.algorithms.hilora import HiLoRA

# isort: on
from pfljax.settings.method import METHODS as METHODS
from pfljax.settings.method import get as get

__all__ = [
    "AFL",
    "APFL",
    "APPLE",
    "CCVR",
    "FLUTE",
    "FML",
    "GPFL",
    "IFCA",
    "L2SGD",
    "MOCHA",
    "MOON",
    "QFFL",
    "ClusteredFL",
    "DFedEM",
    "Ditto",
    "FFALoRA",
    "FedAH",
    "FedALA",
    "FedAMP",
    "FedAS",
    "FedAdam",
    "FedAlt",
    "FedAsync",
    "FedAvg",
    "FedAvgData",
    "FedAvgM",
    "FedAvgPlus",
    "FedBABU",
    "FedBN",
    "FedBuff",
    "FedCAC",
    "FedCP",
    "FedDBE",
    "FedDPA",
    "FedDyn",
    "FedEM",
    "FedExP",
    "FedFomo",
    "FedFomoAverage",
    "FedGH",
    "FedIT",
    "FedKD",
    "FedLC",
    "FedNTD",
    "FedNova",
    "FedPAC",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSALoRA",
    "FedSAM",
    "FedSim",
    "FedTP",
    "FedeRiCo",
    "FedeRiCoCentralized",
    "FedeRiCoFriends",
    "FlexLoRA",
    "Floco",
    "HiLoRA",
    "HypCluster",
    "KNNPer",
    "LGFedAvg",
    "Local",
    "MoFedSAM",
    "PFedFDA",
    "PFedGraph",
    "PFedHN",
    "PFedMB",
    "PFedMe",
    "PeFLL",
    "PerAda",
    "PerFedAvg",
    "Scaffold",
]
