"""What a user holds: runs, results and comparisons."""

from pfljax.api.comparison import Table, compare
from pfljax.api.result import Collaboration, Result
from pfljax.api.run import Run, train_replicates

__all__ = ["Collaboration", "Result", "Run", "Table", "compare", "train_replicates"]
