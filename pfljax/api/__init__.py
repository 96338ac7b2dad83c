"""The user's API: runs, results, comparisons and tuning."""

from pfljax.api.comparison import Table, compare
from pfljax.api.loading import load
from pfljax.api.result import Collaboration, Result
from pfljax.api.run import Run, train_replicates
from pfljax.api.simulation import Simulation
from pfljax.api.tuning import Point, Tuning, grid, search, tune

__all__ = [
    "Collaboration",
    "Point",
    "Result",
    "Run",
    "Simulation",
    "Table",
    "Tuning",
    "compare",
    "grid",
    "load",
    "search",
    "train_replicates",
    "tune",
]
