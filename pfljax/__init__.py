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
    Told,
    Topology,
    Traffic,
    Trained,
    Upload,
)
from pfljax.data import Federation, partitions
from pfljax.evaluation.measures import metric
from pfljax.local.problem import Pair, Personal, Problem
from pfljax.local.solver import Slope, Solver
from pfljax.models import Model, Networks, adapters, weights
from pfljax.settings.fields import knob as knob  # former name
from pfljax.settings.method import METHODS, hyperparameter, method

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
    "Pair",
    "Personal",
    "Prediction",
    "Privacy",
    "Problem",
    "Report",
    "Result",
    "Run",
    "RunError",
    "Server",
    "Simulation",
    "Slope",
    "Solver",
    "Start",
    "State",
    "Table",
    "TensorBoard",
    "Told",
    "Topology",
    "Traffic",
    "Trained",
    "Tuning",
    "Upload",
    "WandB",
    "adapters",
    "compare",
    "data",
    "estimate",
    "hyperparameter",
    "knob",  # former name
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
