"""Server options for any method: client sampling and aggregation."""

from __future__ import annotations

import dataclasses
import typing

from pfljax.algorithms.common.robust import Aggregator, with_aggregator
from pfljax.algorithms.common.sampling import Build, Sampler, with_sampler
from pfljax.core.errors import ArgumentError
from pfljax.core.types import Algorithm
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class Server:
    """How a server draws cohorts and aggregates models.

    Attributes:
        sampler: "uniform", "weighted" (in proportion to n_k) or "power_of_choice" (largest losses among
            `candidates`).
        candidates: d, number of clients whose losses power of choice compares; 0: twice the number that take part.
        aggregator: "mean", "median", "trimmed_mean", "krum" or "geometric_median".
        trim: Share of clients that robust aggregators assume to be attackers: a trimmed mean drops that share of values
            on each side, and Krum trusts the rest.
    """

    sampler: Sampler = "uniform"
    candidates: int = 0
    aggregator: Aggregator = "mean"
    trim: float = 0.2

    def __post_init__(self):
        for name, accepted in (("sampler", typing.get_args(Sampler)), ("aggregator", typing.get_args(Aggregator))):
            if getattr(self, name) not in accepted:
                raise ArgumentError(name, f"accepted: {', '.join(accepted)}", getattr(self, name))
        if not 0 <= self.trim < 0.5:
            raise ArgumentError("aggregator_trim", "accepted: at least 0, below 0.5", self.trim)

    def of(self, problem: Problem, build: Build) -> Algorithm:
        """The algorithm from `build` (for some clients or for all) with these server options.

        Raises:
            ArgumentError: if the algorithm does not support them.
        """
        served = lambda part: with_aggregator(problem, build(part), self.aggregator, self.trim)
        return with_sampler(problem, served, self.sampler, self.candidates)
