"""What the author of a method needs: the decorator, hyperparameters, the contract's types and functions of trees."""

# Registers the methods first: a new one cannot take one of their names.
import pfljax.algorithms  # noqa: F401
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Cohort,
    First,
    Ledger,
    MethodReport,
    Mixture,
    Prediction,
    Start,
    State,
    Topology,
    Traffic,
    Trained,
    Upload,
)
from pfljax.local.problem import Pair, Personal, Problem
from pfljax.local.solver import Slope, Solver
from pfljax.settings.method import hyperparameter, method

__all__ = [
    "Aggregate",
    "Algorithm",
    "ClientContext",
    "ClientData",
    "ClientOutput",
    "ClientReport",
    "Cohort",
    "First",
    "Ledger",
    "MethodReport",
    "Mixture",
    "Pair",
    "Personal",
    "Prediction",
    "Problem",
    "Slope",
    "Solver",
    "Start",
    "State",
    "Topology",
    "Traffic",
    "Trained",
    "Upload",
    "hyperparameter",
    "method",
    "tree",
]


def __dir__() -> list[str]:
    return __all__
