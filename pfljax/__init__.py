"""Personalized federated learning in JAX and Flax."""

from pfljax import algorithms, data, models
from pfljax.algorithms import *  # noqa: F403
from pfljax.api import Collaboration, Result, Run, Simulation, Table, Tuning, compare, load, train_replicates, tune
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.contract.method import METHODS, knob, method
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    ClientContext,
    ClientData,
    ClientOutput,
    Cohort,
    First,
    Ledger,
    Mixture,
    Prediction,
    Report,
    Start,
    State,
    Traffic,
)
from pfljax.data import Federation, partitions
from pfljax.exchange import cores
from pfljax.local.privacy import Privacy
from pfljax.local.problem import OwnModel, Problem
from pfljax.local.solver import Solver
from pfljax.local.training import LocalTraining
from pfljax.models import Model
from pfljax.stages.attacks import Attack
from pfljax.stages.server import Server
from pfljax.stores.experiment import Execution
from pfljax.training.stopping import patience
from pfljax.training.tracking import Evaluation, TensorBoard

__version__ = "0.2.0"

cores.use()  # on a CPU, clients are spread over devices

__all__ = [
    "METHODS",
    "Aggregate",
    "Algorithm",
    "ArgumentError",
    "Attack",
    "ClientContext",
    "ClientData",
    "ClientOutput",
    "Cohort",
    "Collaboration",
    "Evaluation",
    "Execution",
    "Federation",
    "First",
    "Ledger",
    "LocalTraining",
    "Mixture",
    "Model",
    "OwnModel",
    "Prediction",
    "Privacy",
    "Problem",
    "Report",
    "Result",
    "Run",
    "RunError",
    "Server",
    "Simulation",
    "Solver",
    "Start",
    "State",
    "Table",
    "TensorBoard",
    "Traffic",
    "Tuning",
    "compare",
    "data",
    "knob",
    "load",
    "method",
    "models",
    "partitions",
    "patience",
    "train_replicates",
    "tree",
    "tune",
]
__all__ += algorithms.__all__
