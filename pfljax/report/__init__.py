"""Figures and the page of a run, and figures of comparisons."""

from pfljax.report.figures import (
    benchmark_figure,
    branch_weights,
    comparison_figure,
    save,
    scaling_figure,
    slope,
    sweep_figure,
)
from pfljax.report.page import write

__all__ = [
    "benchmark_figure",
    "branch_weights",
    "comparison_figure",
    "save",
    "scaling_figure",
    "slope",
    "sweep_figure",
    "write",
]
