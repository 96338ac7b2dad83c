"""The server's part in any method: client sampling, aggregation, and what colluding attackers make of it."""

from __future__ import annotations

import dataclasses

import jax

from pfljax.contract.errors import ArgumentError
from pfljax.contract.fields import knob, settings
from pfljax.contract.types import Algorithm
from pfljax.local.problem import Problem
from pfljax.stages import messages
from pfljax.stages.attacks import Attack
from pfljax.stages.collusion import colluded
from pfljax.stages.combining import combined
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
        secure_aggregation: Whether the server sees nothing but the sum of what clients send (Bonawitz et al., CCS
            2017). Nothing is encrypted; what needs single messages is refused.
    """

    sampler: Sampler = "uniform"
    candidates: int = knob(0, at_least=0, read_with=("sampler", "power_of_choice"))
    aggregator: Aggregator = "mean"
    trim: float = knob(0.2, at_least=0, below=0.5, read_with={"aggregator": TRIMMING})
    root_examples: int = knob(100, at_least=1, read_with=("aggregator", "fltrust"))
    secure_aggregation: bool = False

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

    def of(
        self, problem: Problem, algorithm: Algorithm, attack: Attack | None = None, noised: bool = False
    ) -> Algorithm:
        """The algorithm with these server options, and with attackers that collude, if there are any.

        Args:
            problem: The problem of the algorithm.
            algorithm: Any algorithm.
            attack: What attackers do.
            noised: Whether the server gets a noised sum (`ClientPrivacy`).

        Raises:
            ArgumentError: if the algorithm does not support them.
        """
        kind = attack.collusion if attack else None
        if noised or self.secure_aggregation:
            self._check_sums("client_privacy" if noised else "secure_aggregation", noised, kind)
        if self.secure_aggregation:
            algorithm = summed(problem, algorithm)
        algorithm = with_sampler(problem, algorithm, self.sampler, self.candidates)
        if self.aggregator == "mean" and not kind:
            return algorithm
        if not algorithm.averages:
            name, value, left = ("attack", kind, "none, or one without collusion") if kind else ("aggregator", None, "")
            text = f"accepted for this method: {left or 'mean'}; no server averages models or updates"
            raise ArgumentError(name, text, value or self.aggregator)
        check_number(self.aggregator, self.trim, problem.cohort_size)

        def together(updates, weight, attackers, root):
            if kind and attack:
                updates = colluded(kind, attack.factor, updates, weight > 0, attackers)
            return combine(self.aggregator, updates, weight, self.trim, root)

        return combined(problem, algorithm, together)

    def _check_sums(self, cause: str, noised: bool, collusion: str | None) -> None:
        """Raises `ArgumentError` for what needs more than sums; noise covers uniformly drawn clients' own updates."""
        if self.aggregator != "mean":
            raise ArgumentError("aggregator", f"accepted with {cause}: mean; it needs single updates", self.aggregator)
        if self.sampler == "power_of_choice" or (noised and self.sampler != "uniform"):
            needs = "single losses" if self.sampler == "power_of_choice" else "weights"
            raise ArgumentError("sampler", f"accepted with {cause}: uniform; this one needs {needs}", self.sampler)
        if collusion:
            text = f"accepted with {cause}: one without collusion; colluders know what others send"
            raise ArgumentError("attack", text, collusion)


def summed(problem: Problem, algorithm: Algorithm) -> Algorithm:
    """The algorithm, which must need nothing but sums of what clients send.

    A client's loss is the simulator's own, and its update's squared norm ("square") is added up, too.

    Raises:
        ArgumentError: if it needs more, or if there is no server; the former when a round is traced.
    """
    name, refused = "secure_aggregation", "accepted for this method: False; "
    if algorithm.topology != "shared" or algorithm.sends == "models":
        raise ArgumentError(name, f"{refused}no server adds what clients send", True)

    def start(key, clients):
        begun = algorithm.start(key, clients)
        each = any(leaf.shape[0] == problem.num_clients > 1 for leaf in jax.tree.leaves(begun.models))
        if each and not algorithm.stale:
            raise ArgumentError(
                name, f"{refused}its server has a model for each client, to which only that one adds", True
            )
        return begun

    def client_update(context, models, row, data):
        out = algorithm.client_update(context, models, row, data)
        if single := [part for part in messages.reported(out.report) if part != "square"]:
            raise ArgumentError(name, f"{refused}its server reads each client's {', '.join(single)}", True)
        return out

    return dataclasses.replace(algorithm, start=start, client_update=client_update)
