"""Personalized federated learning in JAX and Flax."""

from pfljax import algorithms, data, models
from pfljax.algorithms import *  # noqa: F403
from pfljax.api import (
    Attack,
    ClientPrivacy,
    Clock,
    Collaboration,
    Compression,
    Evaluation,
    Execution,
    Faults,
    LocalTraining,
    MLflow,
    Privacy,
    Result,
    Run,
    Server,
    Simulation,
    Table,
    TensorBoard,
    Tuning,
    WandB,
    compare,
    estimate,
    load,
    patience,
    train_replicates,
    tune,
)
from pfljax.contract import cores, tree
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
from pfljax.evaluation.measures import metric
from pfljax.local.problem import OwnModel, Problem
from pfljax.local.solver import Solver
from pfljax.models import Model, Networks, adapters, weights

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
    "ClientPrivacy",
    "Clock",
    "Cohort",
    "Collaboration",
    "Compression",
    "Evaluation",
    "Execution",
    "Faults",
    "Federation",
    "First",
    "Ledger",
    "LocalTraining",
    "MLflow",
    "Mixture",
    "Model",
    "Networks",
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
    "WandB",
    "adapters",
    "compare",
    "data",
    "estimate",
    "knob",
    "load",
    "method",
    "metric",
    "models",
    "partitions",
    "patience",
    "train_replicates",
    "tree",
    "tune",
    "weights",
]
__all__ += algorithms.__all__
