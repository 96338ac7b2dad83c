"""The server's part in any method: client sampling, aggregation, and what colluding attackers make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pfljax.contract.errors import ArgumentError
from pfljax.local.problem import Problem
from pfljax.settings.fields import hyperparameter, settings
from pfljax.stages.attacks import Attack
from pfljax.stages.combining import Combining
from pfljax.stages.robust import TRIMMING, Aggregator, check_number
from pfljax.stages.roots import Trusting
from pfljax.stages.sampling import Sampler, Weighted, sampling_stage
from pfljax.stages.secure_aggregation import Summing, summing_stage

if TYPE_CHECKING:
    from pfljax.stages.pipeline import Pipeline


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

    Examples:
        >>> import pfljax as pfl
        >>> server = pfl.Server(sampler="weighted", aggregator="trimmed_mean", trim=0.1)
        >>> server.described(20)
        'trimmed_mean, 2 of 20 clients assumed to attack'
    """

    sampler: Sampler = "uniform"
    candidates: int = hyperparameter(0, at_least=0, read_with=("sampler", "power_of_choice"))
    aggregator: Aggregator = "mean"
    trim: float = hyperparameter(0.2, at_least=0, below=0.5, read_with={"aggregator": TRIMMING})
    root_examples: int = hyperparameter(100, at_least=1, read_with=("aggregator", "fltrust"))
    secure_aggregation: bool = False

    def described(self, num: int) -> str:
        """The aggregator in words, for n clients in a round."""
        if self.aggregator == "fltrust":
            return f"fltrust, {self.root_examples} examples on the server"
        if self.aggregator not in TRIMMING:
            return self.aggregator
        assumed = check_number(self.aggregator, self.trim, num)
        return f"{self.aggregator}, {assumed or 'none'} of {num} clients assumed to attack"

    def summing(
        self, problem: Problem, pipeline: Pipeline, *, attack: Attack, noised: bool
    ) -> Summing | None:
        """The stage of secure aggregation, if the server sees nothing but sums.

        Args:
            problem: The problem of the method.
            pipeline: The method with the stages before this one.
            attack: What attackers do.
            noised: Whether the server gets a noised sum (`ClientPrivacy`).

        Raises:
            ArgumentError: if the method or another setting needs more than sums.
        """
        if noised or self.secure_aggregation:
            cause = "client_privacy" if noised else "secure_aggregation"
            self._check_sums(cause, noised, attack.collusion)
        return summing_stage(problem, pipeline) if self.secure_aggregation else None

    def sampling(self, problem: Problem, pipeline: Pipeline) -> Weighted | None:
        """The stage of the sampler, if it is not the uniform one; see `sampling_stage`."""
        return sampling_stage(self.sampler, self.candidates, problem, pipeline)

    def combining(
        self, problem: Problem, pipeline: Pipeline, *, attack: Attack
    ) -> Combining | None:
        """The stage of a rule other than the mean, or of attackers that know what others send.

        Raises:
            ArgumentError: if the method's server averages neither models nor updates.
        """
        collusion = attack.collusion
        if self.aggregator == "mean" and not collusion:
            return None
        method = pipeline.method
        if not method.averages:
            why = "no server averages models or updates"
            if collusion:
                text = f"accepted for this method: none, or one without collusion; {why}"
                raise ArgumentError("attack", text, collusion)
            text = f"accepted for this method: mean; {why}"
            raise ArgumentError("aggregator", text, self.aggregator)
        if self.aggregator == "fltrust":
            return Trusting("fltrust", self.trim, attack, problem, method, self.root_examples)
        check_number(self.aggregator, self.trim, problem.cohort_size)
        return Combining(self.aggregator, self.trim, attack, problem, method)

    def _check_sums(self, cause: str, noised: bool, collusion: str | None) -> None:
        """Raises `ArgumentError` for what needs more than sums; noise covers uniformly drawn clients' own updates."""
        if self.aggregator != "mean":
            raise ArgumentError(
                "aggregator",
                f"accepted with {cause}: mean; it needs single updates",
                self.aggregator,
            )
        if self.sampler == "power_of_choice" or (noised and self.sampler != "uniform"):
            needs = "single losses" if self.sampler == "power_of_choice" else "weights"
            raise ArgumentError(
                "sampler", f"accepted with {cause}: uniform; this one needs {needs}", self.sampler
            )
        if collusion:
            text = f"accepted with {cause}: one without collusion; colluders know what others send"
            raise ArgumentError("attack", text, collusion)
