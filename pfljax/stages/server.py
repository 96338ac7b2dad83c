"""Server options for any method: client sampling and aggregation."""

from __future__ import annotations

from pfljax.contract.fields import knob, settings
from pfljax.contract.types import Algorithm
from pfljax.local.problem import Problem
from pfljax.stages.robust import Aggregator, with_aggregator
from pfljax.stages.sampling import Sampler, with_sampler


@settings
class Server:
    """How a server draws cohorts and aggregates models.

    Attributes:
        sampler: How a round's clients are sampled: "uniform", "weighted" (in proportion to n_k) or "power_of_choice"
            (largest losses among candidates drawn that way).
        candidates: d, number of clients whose losses power of choice compares; 0: twice the number that take part.
        aggregator: How the server combines the clients' models.
        trim: Share of clients that robust aggregators assume to be attackers: a trimmed mean drops that share of values
            on each side, and Krum trusts the rest.
    """

    sampler: Sampler = knob("uniform", flag="sampler")
    candidates: int = knob(0, at_least=0, read_with=("sampler", "power_of_choice"), flag="sampler_candidates")
    aggregator: Aggregator = knob("mean", flag="aggregator")
    trim: float = knob(
        0.2, at_least=0, below=0.5, read_with={"aggregator": ("trimmed_mean", "krum")}, flag="aggregator_trim"
    )

    def of(self, problem: Problem, algorithm: Algorithm) -> Algorithm:
        """The algorithm with these server options.

        Raises:
            ArgumentError: if the algorithm does not support them.
        """
        sampled = with_sampler(problem, algorithm, self.sampler, self.candidates)
        return with_aggregator(problem, sampled, self.aggregator, self.trim)
