"""What stands between clients and server, for every method; and what a stage of your own is made of."""

from pfljax.stages.messages import (
    LocalWork,
    dropped,
    lost,
    values_of,
    with_new_values,
    with_note,
)
from pfljax.stages.pipeline import Pipeline
from pfljax.stages.stage import Stage, StageState

__all__ = [
    "LocalWork",
    "Pipeline",
    "Stage",
    "StageState",
    "dropped",
    "lost",
    "values_of",
    "with_new_values",
    "with_note",
]
