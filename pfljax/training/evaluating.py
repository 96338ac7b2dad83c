"""When a run is evaluated: after a number of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from pfljax.run.experiment import Experiment
from pfljax.settings.fields import hyperparameter
from pfljax.stores.serving import scored_ids
from pfljax.training.saving import AUTO

USUAL = 10  # rounds between evaluations, unless they would take too much of the time
LARGEST_SHARE = 0.1  # of the time that evaluations take by default
LITTLE = (
    2 * 10**9
)  # products of examples and parameters; an evaluation of no more takes little time
PASSES = 3  # of an example in training, forward and backward, for each in an evaluation
ROUNDS = r"[1-9][0-9]*"

EvalEvery = Annotated[
    int | str,
    hyperparameter(
        at_least=1,
        accepted=f"a number of rounds, 1 or more; or {AUTO}",
        pattern=f"{AUTO}|{ROUNDS}",
        help="number of rounds between evaluations",
    ),
]


def interval(every: int | str, experiments: Sequence[Experiment]) -> int:
    """Returns the number of rounds between evaluations: as requested, or the largest that one of the runs needs."""
    if str(every) != AUTO:
        return int(every)
    return max(usual_interval(experiment) for experiment in experiments)


def usual_interval(experiment: Experiment) -> int:
    """Returns the number of rounds between evaluations by default.

    It follows from numbers of examples and parameters, not from a clock, and neither from the method nor from the
    number of rounds: all methods of a comparison and a run that goes on are evaluated after the same rounds.
    """
    evaluated = examples_evaluated(experiment)
    trained = examples_trained(experiment)
    sizes = [model.num_parameters for model in experiment.problem.models]
    if evaluated * max(sizes) <= LITTLE or not trained:
        return USUAL
    needed = evaluated * (1 - LARGEST_SHARE) / (LARGEST_SHARE * PASSES * trained)
    chosen = USUAL
    while True:
        for factor in (1, 2, 5):
            if chosen * factor >= needed:
                return chosen * factor
        chosen *= 10


def examples_evaluated(experiment: Experiment) -> int:
    """Returns the number of examples in an evaluation."""
    federation = experiment.federation
    ids = scored_ids(experiment)
    splits = (federation.train, federation.validation, federation.test)
    return sum(int(np.asarray(split.size)[ids].sum(dtype=np.int64)) for split in splits)


def examples_trained(experiment: Experiment) -> float:
    """Returns the mean number of examples of the mini-batches in a round."""
    problem = experiment.problem
    train = experiment.federation.train
    batch = problem.solver.batch(train.y.shape[1])
    per_client = experiment.steps * np.minimum(np.asarray(train.size), batch)
    clients_a_round = (problem.clock.turns if problem.clock else 0) or problem.expected_clients
    return int(per_client.sum(dtype=np.int64)) * clients_a_round / problem.num_clients
