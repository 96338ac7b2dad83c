"""Experiment trackers: `run.train(100, tracker=pfl.trackers.TensorBoard("logs"))`.

A tracker of your own is a function that takes an `Evaluation`.
"""

from pfljax.training.tracking import Evaluation, MLflow, TensorBoard, Tracker, WandB

__all__ = ["Evaluation", "MLflow", "TensorBoard", "Tracker", "WandB"]


def __dir__() -> list[str]:
    return __all__
