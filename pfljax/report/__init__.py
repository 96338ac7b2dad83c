"""Figures and report pages of runs and comparisons. matplotlib is imported on first use."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfljax.report.across import is_run, runs_below, write_comparison
    from pfljax.report.canvas import save
    from pfljax.report.comparisons import (
        benchmark_figure,
        branch_weights,
        comparison_figure,
        curves_and_last,
        knob_curves,
        privacy_figure,
        scaling_figure,
        slope,
        sweep_figure,
    )
    from pfljax.report.figures import weights_over_rounds
    from pfljax.report.page import write, write_page
    from pfljax.report.plots import Plots

_MODULES = {
    "Plots": "plots",
    "benchmark_figure": "comparisons",
    "branch_weights": "comparisons",
    "comparison_figure": "comparisons",
    "curves_and_last": "comparisons",
    "is_run": "across",
    "knob_curves": "comparisons",
    "privacy_figure": "comparisons",
    "runs_below": "across",
    "save": "canvas",
    "scaling_figure": "comparisons",
    "slope": "comparisons",
    "sweep_figure": "comparisons",
    "weights_over_rounds": "figures",
    "write": "page",
    "write_comparison": "across",
    "write_page": "page",
}

__all__ = [
    "Plots",
    "benchmark_figure",
    "branch_weights",
    "comparison_figure",
    "curves_and_last",
    "is_run",
    "knob_curves",
    "privacy_figure",
    "runs_below",
    "save",
    "scaling_figure",
    "slope",
    "sweep_figure",
    "weights_over_rounds",
    "write",
    "write_comparison",
    "write_page",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def preload() -> threading.Thread:
    """Imports in a thread what drawing and the page need, while JAX compiles and computes. Returns the thread."""
    modules = f"{__name__}.page", "scipy.cluster.hierarchy"
    thread = threading.Thread(target=lambda: [importlib.import_module(module) for module in modules])
    thread.start()
    return thread
