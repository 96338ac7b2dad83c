"""Figures and report pages of runs and comparisons. matplotlib is imported on first use."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfljax.report.across import is_run, runs_below, write_comparison
    from pfljax.report.comparisons import comparison_figure, paper_figures, scaling_figure, slope
    from pfljax.report.draw import save
    from pfljax.report.page import write, write_page
    from pfljax.report.plots import Plots

_MODULES = {
    "across": ("is_run", "runs_below", "write_comparison"),
    "comparisons": ("comparison_figure", "paper_figures", "scaling_figure", "slope"),
    "draw": ("save",),
    "page": ("write", "write_page"),
    "plots": ("Plots",),
}

__all__ = [
    "Plots",
    "comparison_figure",
    "is_run",
    "paper_figures",
    "runs_below",
    "save",
    "scaling_figure",
    "slope",
    "write",
    "write_comparison",
    "write_page",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def preload() -> threading.Thread:
    """Prepares in a thread what a run's end needs, while JAX compiles and computes. Returns the thread."""

    def prepare() -> None:
        for module in ("pfljax.folder.checkpoints", f"{__name__}.page", "scipy.cluster.hierarchy"):
            importlib.import_module(module)
        importlib.import_module(f"{__name__}.markup").library()

    thread = threading.Thread(target=prepare)
    thread.start()
    return thread
