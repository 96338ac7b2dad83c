"""Figures and the page of a run, and figures of comparisons; matplotlib is imported with the first of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from pfljax.report.page import write
    from pfljax.report.plots import Plots

_MODULES = {
    "Plots": "plots",
    "benchmark_figure": "comparisons",
    "branch_weights": "comparisons",
    "comparison_figure": "comparisons",
    "curves_and_last": "comparisons",
    "knob_curves": "comparisons",
    "privacy_figure": "comparisons",
    "save": "canvas",
    "scaling_figure": "comparisons",
    "slope": "comparisons",
    "sweep_figure": "comparisons",
    "weights_over_rounds": "figures",
    "write": "page",
}

__all__ = [
    "Plots",
    "benchmark_figure",
    "branch_weights",
    "comparison_figure",
    "curves_and_last",
    "knob_curves",
    "privacy_figure",
    "save",
    "scaling_figure",
    "slope",
    "sweep_figure",
    "weights_over_rounds",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
