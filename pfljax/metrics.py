"""Metrics of a client's predictions besides accuracy and loss.

`Run(metrics=["auroc"])` takes those defined here by name. `metric` makes one of a function of your own.
"""

from pfljax.evaluation.measures import (
    METRICS,
    auroc,
    balanced_accuracy,
    calibration_error,
    f1,
    mae,
    metric,
    perplexity,
    r2,
    rmse,
)

__all__ = [
    "METRICS",
    "auroc",
    "balanced_accuracy",
    "calibration_error",
    "f1",
    "mae",
    "metric",
    "perplexity",
    "r2",
    "rmse",
]


def __dir__() -> list[str]:
    return __all__
