"""Figures and report pages of runs and comparisons. matplotlib is imported on first use."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from pfljax.contract.errors import warn_former

if TYPE_CHECKING:
    from pfljax.report.across import write_comparison
    from pfljax.report.draw import save
    from pfljax.report.page import write, write_page
    from pfljax.report.plots import Plots
    from pfljax.report.run_folders import is_run, runs_below
    from pfljax.report.table_plots import plot_comparison, save_figures, scaling_figure, slope

_MODULES = {
    "across": ("write_comparison",),
    "draw": ("save",),
    "page": ("write", "write_page"),
    "plots": ("Plots",),
    "run_folders": ("is_run", "runs_below"),
    "table_plots": ("plot_comparison", "save_figures", "scaling_figure", "slope"),
}
_FORMER = {"comparison_figure": "plot_comparison", "paper_figures": "save_figures"}

__all__ = [
    "Plots",
    "is_run",
    "plot_comparison",
    "runs_below",
    "save",
    "save_figures",
    "scaling_figure",
    "slope",
    "write",
    "write_comparison",
    "write_page",
]


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        present = _FORMER[name]
        warn_former(f"pfljax.report.{name}", f"pfljax.report.{present}")
        return __getattr__(present)
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def preload() -> threading.Thread:
    """Prepares in a thread what a run's end needs, while JAX compiles and computes. Returns the thread."""

    def prepare() -> None:
        for module in ("pfljax.folder.checkpoints", f"{__name__}.page", "scipy.cluster.hierarchy"):
            importlib.import_module(module)
        importlib.import_module(f"{__name__}.rendering").library()

    thread = threading.Thread(target=prepare)
    thread.start()
    return thread
