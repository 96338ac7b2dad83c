"""Personalized federated learning in JAX and Flax.

Names are imported when they are first used, and importing the package changes no setting of JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfljax import author as author
    from pfljax import data as data
    from pfljax import flower as flower
    from pfljax import methods as methods
    from pfljax import metrics as metrics
    from pfljax import models as models
    from pfljax import trackers as trackers
    from pfljax.algorithms import APFL as APFL
    from pfljax.algorithms import IFCA as IFCA
    from pfljax.algorithms import MOON as MOON
    from pfljax.algorithms import Ditto as Ditto
    from pfljax.algorithms import FedAdam as FedAdam
    from pfljax.algorithms import FedALA as FedALA
    from pfljax.algorithms import FedAMP as FedAMP
    from pfljax.algorithms import FedAvg as FedAvg
    from pfljax.algorithms import FedBABU as FedBABU
    from pfljax.algorithms import FedBN as FedBN
    from pfljax.algorithms import FedEM as FedEM
    from pfljax.algorithms import FedeRiCo as FedeRiCo
    from pfljax.algorithms import FedeRiCoFriends as FedeRiCoFriends
    from pfljax.algorithms import FedFomo as FedFomo
    from pfljax.algorithms import FedPer as FedPer
    from pfljax.algorithms import FedProx as FedProx
    from pfljax.algorithms import FedRep as FedRep
    from pfljax.algorithms import Local as Local
    from pfljax.algorithms import PerFedAvg as PerFedAvg
    from pfljax.algorithms import PFedMe as PFedMe
    from pfljax.algorithms import Scaffold as Scaffold
    from pfljax.api import Attack as Attack
    from pfljax.api import ClientPrivacy as ClientPrivacy
    from pfljax.api import Clock as Clock
    from pfljax.api import Collaboration as Collaboration
    from pfljax.api import Compression as Compression
    from pfljax.api import Execution as Execution
    from pfljax.api import Faults as Faults
    from pfljax.api import LocalTraining as LocalTraining
    from pfljax.api import Privacy as Privacy
    from pfljax.api import Result as Result
    from pfljax.api import Run as Run
    from pfljax.api import Server as Server
    from pfljax.api import Simulation as Simulation
    from pfljax.api import Table as Table
    from pfljax.api import Tuning as Tuning
    from pfljax.api import compare as compare
    from pfljax.api import estimate as estimate
    from pfljax.api import load as load
    from pfljax.api import patience as patience
    from pfljax.api import train_replicates as train_replicates
    from pfljax.api import tune as tune
    from pfljax.contract.cores import use_cores as use_cores
    from pfljax.contract.errors import ArgumentError as ArgumentError
    from pfljax.contract.errors import RunError as RunError
    from pfljax.data import Federation as Federation
    from pfljax.data import partitions as partitions
    from pfljax.models import Model as Model
    from pfljax.models import adapters as adapters

__version__ = "0.3.0"

# The modules that define the public names; `__getattr__` imports them.
_MODULES = {
    "pfljax": ("author", "data", "flower", "methods", "metrics", "models", "trackers"),
    "pfljax.algorithms": (
        "APFL",
        "IFCA",
        "MOON",
        "Ditto",
        "FedALA",
        "FedAMP",
        "FedAdam",
        "FedAvg",
        "FedBABU",
        "FedBN",
        "FedEM",
        "FedFomo",
        "FedPer",
        "FedProx",
        "FedRep",
        "FedeRiCo",
        "FedeRiCoFriends",
        "Local",
        "PFedMe",
        "PerFedAvg",
        "Scaffold",
    ),
    "pfljax.api": (
        "Attack",
        "ClientPrivacy",
        "Clock",
        "Collaboration",
        "Compression",
        "Execution",
        "Faults",
        "LocalTraining",
        "Privacy",
        "Result",
        "Run",
        "Server",
        "Simulation",
        "Table",
        "Tuning",
        "compare",
        "estimate",
        "load",
        "patience",
        "train_replicates",
        "tune",
    ),
    "pfljax.contract.cores": ("use_cores",),
    "pfljax.contract.errors": ("ArgumentError", "RunError"),
    "pfljax.data": ("Federation", "partitions"),
    "pfljax.models": ("Model", "adapters"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

# Names that were at the top in version 0.2, and where they are now. They work until the next release.
_FORMER = {
    "Aggregate": "author.Aggregate",
    "Algorithm": "author.Algorithm",
    "ClientContext": "author.ClientContext",
    "ClientData": "author.ClientData",
    "ClientOutput": "author.ClientOutput",
    "Cohort": "author.Cohort",
    "Evaluation": "trackers.Evaluation",
    "First": "author.First",
    "Ledger": "author.Ledger",
    "METHODS": "methods.METHODS",
    "MLflow": "trackers.MLflow",
    "Mixture": "author.Mixture",
    "Networks": "models.Networks",
    "Pair": "author.Pair",
    "Personal": "author.Personal",
    "Prediction": "author.Prediction",
    "Problem": "author.Problem",
    "Report": "author.MethodReport",
    "Slope": "author.Slope",
    "Solver": "author.Solver",
    "Start": "author.Start",
    "State": "author.State",
    "TensorBoard": "trackers.TensorBoard",
    "Told": "author.ClientReport",
    "Topology": "author.Topology",
    "Traffic": "author.Traffic",
    "Trained": "author.Trained",
    "Upload": "author.Upload",
    "WandB": "trackers.WandB",
    "knob": "author.hyperparameter",
    "method": "author.method",
    "metric": "metrics.metric",
    "tree": "author.tree",
    "weights": "models.weights",
}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, or warns that it has another place."""
    if name in _MODULE_OF:
        value = _public(_MODULE_OF[name], name)
        globals()[name] = value
        return value
    former = _FORMER.get(name, "")
    if not former and not name.startswith("_"):
        methods = importlib.import_module("pfljax.methods")
        former = f"methods.{name}" if name in methods.__all__ else ""
    if not former:
        raise AttributeError(f"module 'pfljax' has no attribute '{name}'")
    warn_former = importlib.import_module("pfljax.contract.errors").warn_former
    warn_former(f"pfljax.{name}", f"pfljax.{former}")
    module, _, new_name = former.rpartition(".")
    return _public(f"pfljax.{module}", new_name)


def _public(module: str, name: str) -> Any:
    """Imports a module's attribute, or a module of this package."""
    if module == "pfljax":
        return importlib.import_module(f"pfljax.{name}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
