"""Estimates of the memory and time that a run needs on devices that you do not have."""

from __future__ import annotations

from typing import Annotated

from pfljax.api.run import Run
from pfljax.contract.speech import with_former_say
from pfljax.planner import targets
from pfljax.planner.planning import Estimate, estimate_for
from pfljax.settings.fields import checked, hyperparameter
from pfljax.training.loop import Rounds


@with_former_say
@checked()
def estimate(
    run: Annotated[Run, hyperparameter(accepted="a Run")],
    target: str = "tpu:v5e:2x2",
    *,
    rounds: Rounds = 150,
    seconds: Annotated[float, hyperparameter(above=0)] = 100.0,
) -> Estimate:
    """Estimates memory and time of a run on TPUs or GPUs that you do not have, for every plan and exchange.

    Compiles the run for the target. Trains and allocates nothing.

    Args:
        run: The run.
        target: tpu:NAME:SHAPE (v5e, v5p or v6e), such as tpu:v5e:4x4, or cuda:NAME:NUMBER (a100, h100 or h200).
        rounds: Number of rounds that hours are for.
        seconds: Time after which no further program is compiled.

    Returns:
        The estimate, with a row per plan and exchange.

    Raises:
        ArgumentError: if there is no such target, or its compiler is not installed.

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> run = pfl.Run(pfl.Local(), clients, pfl.models.MLP(hidden=(4,)))
        >>> estimate = pfl.estimate(run, "tpu:v5e:1x1", rounds=100)  # doctest: +SKIP
        >>> estimate.recommended  # doctest: +SKIP
        {'plan': 'vmap'}
    """
    return estimate_for(run.experiment.with_rounds(rounds), targets.find(target), seconds)
