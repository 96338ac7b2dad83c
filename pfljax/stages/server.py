"""The server's part in any method: client sampling, aggregation, and what colluding attackers make of it."""

from __future__ import annotations

from pfljax.contract.errors import ArgumentError
from pfljax.contract.fields import knob, settings
from pfljax.contract.types import Algorithm
from pfljax.local.problem import Problem
from pfljax.stages import messages
from pfljax.stages.attacks import Attack
from pfljax.stages.collusion import colluded
from pfljax.stages.robust import TRIMMING, Aggregator, check_number, combine
from pfljax.stages.roots import with_root
from pfljax.stages.sampling import Sampler, with_sampler


@settings
class Server:
    """How a server draws cohorts and aggregates models.

    Attributes:
        sampler: How a round's clients are sampled: "uniform", "weighted" (in proportion to n_k) or "power_of_choice"
            (largest losses among candidates drawn that way).
        candidates: d, number of clients whose losses power of choice compares; 0: twice the number that take part.
        aggregator: How the server combines the clients' updates.
        trim: Share of clients that robust aggregators assume to be attackers: a trimmed mean drops that share of values
            on each side, and Krum trusts the rest.
        root_examples: Number of examples, drawn from all clients' training data, that the server trains on to know whom
            to trust; all that there are, if these are fewer.
    """

    sampler: Sampler = knob("uniform", flag="sampler")
    candidates: int = knob(0, at_least=0, read_with=("sampler", "power_of_choice"), flag="sampler_candidates")
    aggregator: Aggregator = knob("mean", flag="aggregator")
    trim: float = knob(0.2, at_least=0, below=0.5, read_with={"aggregator": TRIMMING}, flag="aggregator_trim")
    root_examples: int = knob(100, at_least=1, read_with=("aggregator", "fltrust"), flag="root_examples")

    def described(self, num: int) -> str:
        """The aggregator in words, for n clients in a round."""
        if self.aggregator == "fltrust":
            return f"fltrust, {self.root_examples} examples on the server"
        if self.aggregator not in TRIMMING:
            return self.aggregator
        assumed = check_number(self.aggregator, self.trim, num)
        return f"{self.aggregator}, {assumed or 'none'} of {num} clients assumed to attack"

    def with_root(self, problem: Problem, algorithm: Algorithm) -> Algorithm:
        """The algorithm, before other stages, whose server has examples of its own, if its aggregator needs them.

        Raises:
            ArgumentError: if the algorithm does not support it.
        """
        return with_root(problem, algorithm, self.root_examples) if self.aggregator == "fltrust" else algorithm

    def of(self, problem: Problem, algorithm: Algorithm, attack: Attack | None = None) -> Algorithm:
        """The algorithm with these server options, and with attackers that collude, if there are any.

        Raises:
            ArgumentError: if the algorithm does not support them.
        """
        algorithm = with_sampler(problem, algorithm, self.sampler, self.candidates)
        kind = attack.collusion if attack else None
        if self.aggregator == "mean" and not kind:
            return algorithm
        if algorithm.averages is None:
            name, value, left = ("attack", kind, "none, or one without collusion") if kind else ("aggregator", None, "")
            text = f"accepted for this method: {left or 'mean'}; no server averages models or updates"
            raise ArgumentError(name, text, value or self.aggregator)
        check_number(self.aggregator, self.trim, problem.cohort_size)

        def together(key, updates, weight, attackers, root):
            if kind and attack:
                updates = colluded(kind, attack.strength, updates, weight > 0, attackers)
            return combine(self.aggregator, updates, weight, self.trim, root)

        return messages.combined(problem, algorithm, together)
