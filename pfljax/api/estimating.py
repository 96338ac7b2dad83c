"""Estimates what a run needs on devices that are not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pfljax.api.run import Run
from pfljax.planner import targets
from pfljax.planner.planning import Estimate, estimate_for
from pfljax.settings.fields import checked, hyperparameter
from pfljax.training.loop import Rounds


@checked()
def estimate(
    run: Annotated[Run, hyperparameter(accepted="a Run")],
    target: str = "tpu:v5e:2x2",
    *,
    rounds: Rounds = 150,
    seconds: Annotated[float, hyperparameter(above=0)] = 100.0,
    say: Callable[[str], None] | None = None,
) -> Estimate:
    """Compiles a run for TPUs or GPUs that are not here, with every plan and exchange. Trains and allocates nothing.

    Args:
        run: The run.
        target: tpu:NAME:SHAPE (v5e, v5p or v6e), such as tpu:v5e:4x4, or cuda:NAME:NUMBER (a100, h100 or h200).
        rounds: Number of rounds that hours are for.
        seconds: Time after which no further program is compiled.
        say: Called with a line about each program.

    Raises:
        ArgumentError: if there is no such target, or its compiler is not installed.
    """
    return estimate_for(run.experiment.with_rounds(rounds), targets.find(target), seconds, say)
