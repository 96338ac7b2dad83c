"""Client-level differential privacy: what a server learns hardly depends on whether a client takes part at all.

- "gaussian", DP-FedAvg: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models"
  (ICLR 2018), Algorithm 1. Each client takes part with probability q, independently (Poisson sampling), and
  theta <- theta + (sum_k clip_S(theta_k - theta) + N(0, (z S)^2)) / (q K): equal weights, and a fixed denominator.
- An adaptive norm: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with adaptive clipping"
  (NeurIPS 2021), Algorithm 1. S <- S exp(-eta (b - gamma)), where b is the share of updates within S with noise
  sigma_b on its sum. The updates' noise is z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), so that both cost z.
- "tree", DP-FTRL: Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep) learning without
  sampling or shuffling" (ICML 2021), Algorithm 1. Sums over all rounds so far have the noise of a binary tree. Cohorts
  are the usual ones, of one size, and public; it is exact how often each client was in them.

Clients clip last, after attacks and compression, what is finite of what they send; so the bound holds whatever happened
before. A method's own server step (momentum, Adam) follows on the noised mean.

Departures from the papers: S bounds the whole update, not each layer. Cohorts under Poisson sampling have at most as
many places as are exceeded with a probability below `OVERFLOW`, which is taken from delta. The tree has no restarts and
sums the complete nodes without Honaker's estimate; "taking part" is the adjacency that replaces an update by zeros.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import optional, tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientData,
    ClientOutput,
    Key,
    Metrics,
    Participation,
    PyTree,
    Start,
    State,
    Upload,
)
from pfljax.exchange import traffic
from pfljax.exchange.rounds import cohort_of
from pfljax.local.privacy import BY_LOSS, BY_SEED, accountant, finite
from pfljax.local.problem import Problem
from pfljax.settings.fields import hyperparameter, settings
from pfljax.stages.messages import LocalWork, either
from pfljax.stages.stage import Stage, StageState

if TYPE_CHECKING:
    from pfljax.stages.pipeline import Pipeline

COIN = 0xC014  # folded into a client's key for a round to draw whether it takes part
NOISE = 0x9015E  # folded into the server's key for a round to draw the noise
OVERFLOW = (
    1e-10  # largest probability that more clients want to take part in a round than have a place
)
LEVELS = 16  # of the tree, which covers fewer than 2^LEVELS rounds
LOGGED = "losses, scores, counts and numbers of clients, traffic and simulated seconds, which only the simulator logs"
NOISY = {"noise_multiplier": ()}
ADAPTIVE = {"adaptive_quantile": ()}


@settings
class ClientPrivacy:
    """Clipping and noise for clients' whole updates; needs jax-privacy, of pip install 'pfljax[privacy]'.

    Attributes:
        noise_multiplier: z, the standard deviation of the noise on the sum of updates, divided by the clipping norm.
        clip_norm: S, the largest norm of a client's update (L2, over all parameters), at first if it is adaptive; inf
            disables clipping and needs zero noise.
        mechanism: Noise that is independent in every round, and clients who each take part with probability
            `participation` ("gaussian"); or the noise of a tree over rounds, for any cohorts ("tree").
        adaptive_quantile: gamma, the share of updates that the norm moves towards leaving unclipped; 0: a fixed norm.
        clip_rate: eta, the rate at which the norm moves.
        count_noise: sigma_b, the noise on the number of unclipped updates; 0: a twentieth of the expected clients.
        delta: The delta at which epsilon is reported.
        noise_seed: For tests only: a seed for the noise and for who takes part; see `Privacy`.

    Examples:
        >>> import pfljax as pfl
        >>> privacy = pfl.ClientPrivacy(noise_multiplier=1.0, clip_norm=0.5)
        >>> privacy.described
        'gaussian, noise multiplier 1, updates clipped to 0.5'
    """

    noise_multiplier: float = hyperparameter(0.0, at_least=0)
    clip_norm: float = hyperparameter(math.inf, above=0, infinite=True)
    mechanism: Literal["gaussian", "tree"] = hyperparameter("gaussian", read_with=NOISY)
    adaptive_quantile: float = hyperparameter(0.0, at_least=0, below=1)
    clip_rate: float = hyperparameter(0.2, above=0, read_with=ADAPTIVE)
    count_noise: float = hyperparameter(0.0, at_least=0, read_with=ADAPTIVE)
    delta: float = hyperparameter(1e-5, above=0, below=1, read_with=NOISY)
    noise_seed: int | None = hyperparameter(None, at_least=0, read_with=NOISY)

    def __post_init__(self):
        if not math.isfinite(self.clip_norm):
            for name in ("noise_multiplier", "adaptive_quantile"):
                if value := getattr(self, name):
                    raise ArgumentError(name, "needs a finite clip_norm, such as 1", value)
        if self.mechanism == "tree" and self.adaptive_quantile:
            raise ArgumentError(
                "adaptive_quantile", "accepted with mechanism=tree: 0", self.adaptive_quantile
            )
        if self.active:
            optional.load("jax_privacy", "privacy")

    @property
    def active(self) -> bool:
        """Whether updates are clipped."""
        return math.isfinite(self.clip_norm)

    @property
    def described(self) -> str:
        """Noise and norm, in words."""
        norm = f"{self.clip_norm:g}" + f", then at quantile {self.adaptive_quantile:g}" * bool(
            self.adaptive_quantile
        )
        return f"{self.mechanism}, noise multiplier {self.noise_multiplier:g}, updates clipped to {norm}"

    def seated(self, problem: Problem, share: float) -> Problem:
        """The problem with Poisson cohorts: a static number of places for clients who take part with this chance."""
        if not self.active or self.mechanism == "tree" or share == 1:
            return problem
        return problem._replace(cohort_size=num_slots(problem.num_clients, share), chance=share)

    def check_rounds(self, rounds: int) -> None:
        """Raises `ArgumentError` if the tree does not cover so many rounds."""
        if self.active and self.mechanism == "tree" and rounds >= 2**LEVELS:
            raise ArgumentError(
                "mechanism", f"accepted for {2**LEVELS} rounds or more: gaussian", self.mechanism
            )

    def stage(self, problem: Problem, pipeline: Pipeline) -> Private | None:
        """The stage that clips updates and adds noise, if updates are clipped.

        Raises:
            ArgumentError: if the method's server does more than to add updates of one model.
        """
        if not self.active:
            return None
        self._check(problem, pipeline)
        library: Any = optional.load("jax_privacy", "privacy")
        matrices = library.matrix_factorization.streaming_matrix
        is_tree = self.mechanism == "tree"
        matrix = noise_tree(matrices) if is_tree else matrices.identity()
        return Private(self, problem, pipeline.method, library, matrix)

    def noise_of_updates(self, expected: float) -> tuple[float, float]:
        """The noise multiplier of the updates, and the noise on the number of unclipped ones, for m expected clients.

        Raises:
            ArgumentError: if the number needs more noise.
        """
        if not self.adaptive_quantile or not self.noise_multiplier:
            return self.noise_multiplier, 0.0
        deviation = self.count_noise or expected / 20
        left = self.noise_multiplier**-2 - (2 * deviation) ** -2
        if left <= 0:
            text = f"accepted: above {self.noise_multiplier / 2:g}, half the noise multiplier"
            raise ArgumentError("count_noise", text, deviation)
        return left**-0.5, deviation

    def ledger(self, problem: Problem, key: Key, rounds: int, omitted: Sequence[str] = ()) -> dict:
        """The ledger after R rounds; `omitted` is what else others learn of clients. See `epsilons`."""
        epsilon_of = epsilons(self, problem, key, rounds)
        omissions = [*omitted, LOGGED] + [BY_SEED] * (self.noise_seed is not None)
        return {
            **{
                name: getattr(self, name)
                for name in ("mechanism", "noise_multiplier", "clip_norm", "delta")
            },
            "participation": problem.chance,
            "epsilon": finite(epsilon_of.max()),
            "unaccounted": "; ".join(omissions),
            "epsilon_per_client": [finite(value) for value in epsilon_of],
        }

    def _check(self, problem: Problem, pipeline: Pipeline) -> None:
        algorithm = pipeline.method
        has_server = algorithm.topology.on_server
        refusals = {
            "no server adds updates of one model": not has_server or not algorithm.averages,
            "its server adds updates of several models": algorithm.stale,
            f"it sends {algorithm.sends}, not updates": algorithm.sends != "updates",
            "its clients share examples": algorithm.ledger.gradients == 0,
            "its server reads clients' losses": BY_LOSS in algorithm.ledger.unaccounted,
            "its clients send several updates in a round": algorithm.exchanges > 1,
            "its server chooses who takes part": pipeline.chooses,
            "a model with batch statistics sends these, too": problem.solver.statistics is not None,
        }
        for why, holds in refusals.items():
            if holds:
                raise ArgumentError("client_privacy", f"accepted for this method: none; {why}")
        self.noise_of_updates(problem.expected_clients)


class ServerNote(NamedTuple):
    """What the server keeps beside the method's state.

    Attributes:
        norm: () S.
        noise: State of the noise; for a tree, the last node of every level, which must stay as
            secret as the noise.
    """

    norm: Array
    noise: PyTree


@dataclasses.dataclass(frozen=True)
class Private(Stage):
    """Clients clip their updates; the server adds noise to their sum and divides by a constant."""

    name = "privacy"
    privacy: ClientPrivacy
    problem: Problem
    method: Algorithm
    library: Any
    matrix: Any

    def declare(self, method: Algorithm) -> Algorithm:
        takes_part = None if self.problem.chance is None else self.takes_part
        engine = method.engine._replace(takes_part=takes_part)
        # Its sums have no weights, so that no other rule can replace the mean.
        return dataclasses.replace(method, engine=engine, averages=False)

    def takes_part(self, key: Key) -> Array:
        """() whether a client takes part in a round, given its key for it."""
        assert self.problem.chance is not None
        coin = jax.random.uniform(jax.random.fold_in(key, COIN))
        return coin < self.problem.chance

    def server_note(self, key: Key, start: Start, clients: ClientData) -> ServerNote:
        def begin(clients: ClientData, key: Key) -> Start:
            return self.method.start(key, clients)

        if traffic.bytes_read(begin, clients, key):
            why = "its server begins with what clients' data or their sizes tell"
            raise ArgumentError("client_privacy", f"accepted for this method: none; {why}")
        noise = self.matrix.init_multiply(start.models)
        return ServerNote(jnp.float32(self.privacy.clip_norm), noise)

    def before_client(self, work: LocalWork, note: StageState) -> LocalWork:
        if self.problem.chance is None:
            return work
        idle = ~self.takes_part(work.context.key)
        return work._replace(absent=either(work.absent, idle), away=either(work.away, idle))

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        check_sent(work, output)
        upload = output.upload
        norm = note.server.norm

        # Who sends something counts once, whatever its number of examples.
        assert upload.weight is not None
        sent = upload.weight > 0
        if output.sent is not None:
            sent = sent & output.sent
        if work.away is not None:
            sent = sent & ~work.away

        # clip_S(theta_k - theta)
        clipped, length = self.library.clipping.clip_pytree(upload.update, norm)
        clipped = tree.scale(clipped, sent)
        sums = {}
        if self.privacy.adaptive_quantile:
            sums["within"] = jnp.where(sent, (length <= norm) - 0.5, 0.0)
        return output._replace(upload=Upload(clipped, sums=sums), sent=sent), note.client

    def before_server(
        self, key: Key, state: State, aggregate: Aggregate, note: StageState
    ) -> tuple[Aggregate, StageState, Metrics]:
        privacy = self.privacy
        expected = self.problem.expected_clients
        deviation, count_deviation = privacy.noise_of_updates(expected)
        norm, noise = note.server
        noise_key, count_key = jax.random.split(jax.random.fold_in(key, NOISE))

        # sum_k clip_S(theta_k - theta) + N(0, (z S)^2)
        total = aggregate.upload.update
        if deviation:
            make_privatizer = self.library.noise_addition.matrix_factorization_privatizer
            privatizer = make_privatizer(self.matrix, stddev=deviation * norm, prng_key=noise_key)
            total, (_, noise) = privatizer.update(total, (noise_key, noise))
        metrics = {
            "clients_in_round": num_here(aggregate.participation, aggregate.sent.shape[0]),
            "clip_norm": norm,
        }

        # S <- S exp(-eta (b - gamma))
        if privacy.adaptive_quantile:
            count_noise = count_deviation * jax.random.normal(count_key)
            within = aggregate.upload.sums["within"][0] + count_noise
            above = within / expected + 0.5 - privacy.adaptive_quantile
            norm = norm * jnp.exp(-privacy.clip_rate * above)

        # What the method's server sees tells nothing of who took part.
        aggregate = aggregate._replace(
            upload=Upload(total, weight=jnp.full((1,), expected)),
            num_sent=jnp.full_like(aggregate.num_sent, round(expected)),
            sent=jnp.ones_like(aggregate.sent),
        )
        return aggregate, note._replace(server=ServerNote(norm, noise)), metrics


def num_here(participation: Participation, num: int) -> Array:
    """() number of a cohort's `num` clients that are there."""
    if participation.away is None:
        return jnp.full((), num)
    return (~participation.away).sum()


def check_sent(work: LocalWork, output: ClientOutput) -> None:
    """Raises `ArgumentError` unless a client sends one model with its weight and tells only its loss."""
    upload = output.upload
    report = output.report
    others = [*report.entries, *upload.sums]
    if report.square is not None:
        others.append("square")
    if upload.count is not None:
        others.append("count")
    why = ""
    if others:
        why = f"it also sends {', '.join(others)}"
    elif tree.num_rows(work.models) > 1:
        why = "it has several models"
    if why:
        raise ArgumentError("client_privacy", f"accepted for this method: none; {why}")


def noise_tree(library: Any) -> Any:
    """The noise of DP-FTRL's tree, as it is added in each round, from independent noise: C^-1 of A = B C.

    Row t of C adds up rounds t - 2^l + 1 to t, a node, where 2^l divides t. The sum of the first t rounds is that of
    one node for each bit of t; from t - 1 to t, the nodes below level l go and one at level l comes.
    """

    def init(like: Array) -> tuple[Array, Array]:
        """The nodes of all levels, which are 0 at first, and the number of the next round."""
        return jnp.zeros((LEVELS, *like.shape), like.dtype), jnp.ones((), jnp.int32)

    def following(node: Array, state: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        """What the round's new node adds to the noise of the sum."""
        nodes, number = state
        level = jax.lax.population_count((number & -number) - 1)
        below = tree.per_row(jnp.arange(LEVELS) < level, nodes)
        added = node - jnp.where(below, nodes, 0).sum(axis=0)
        return added, (jnp.where(below, 0, nodes).at[level].set(node), number + 1)

    return library.StreamingMatrix.from_array_implementation(init, following)


def tree_sensitivity(problem: Problem, key: Key, rounds: int) -> np.ndarray:
    """(K,) the norm of C u_k, where u_k (R,) is 1 in the rounds whose cohort client k is in; see `noise_tree`."""

    @jax.jit
    def draw(number: Array) -> Array:
        return cohort_of(key, number, problem.num_clients, problem.cohort_size).ids

    counts = np.zeros((LEVELS, problem.num_clients))
    squares = np.zeros(problem.num_clients)
    for number in range(1, rounds + 1):
        counts[:, np.asarray(draw(number - 1))] += 1
        level = (number & -number).bit_length() - 1
        squares += counts[level] ** 2
        counts[: level + 1] = 0
    return np.sqrt(squares)


def num_slots(num_clients: int, chance: float) -> int:
    """The fewest places that are exceeded in a round with a probability below `OVERFLOW`."""
    fits = overflow(num_clients, chance, np.arange(1, num_clients)) < OVERFLOW
    return 1 + int(np.argmax(np.append(fits, True)))


def overflow(num_clients: int, chance: float, size: Array | int) -> np.ndarray:
    """The probability that others leave no place to a client: that at least `size` of K - 1 take part."""
    from scipy import special  # slow to import

    tail = np.asarray(special.bdtrc(size - 1, num_clients - 1, chance))
    return tail * (np.asarray(size) < num_clients)


def epsilons(privacy: ClientPrivacy, problem: Problem, key: Key, rounds: int) -> np.ndarray:
    """The ledger: each client's epsilon at `privacy.delta` for what the server has learned in all rounds.

    Whether all places are taken depends on the other clients only; given that they are not, a client takes part with
    its own chance. So delta for the noise is what the probability of the opposite, in any round, leaves.

    Args:
        privacy: Noise and delta.
        problem: K, and how many clients take part in a round.
        key: Key of the rounds, from which public cohorts follow.
        rounds: R.

    Returns:
        (K,) epsilon: 0 for a client that was in no round; infinite without noise.
    """
    num = problem.num_clients
    chance = problem.chance
    noise = privacy.noise_multiplier
    if not noise or not rounds:
        return np.full(num, np.inf if rounds else 0.0)
    if privacy.mechanism == "tree":
        sensitivity = tree_sensitivity(problem, key, rounds)
        lengths, client = np.unique(sensitivity, return_inverse=True)

        def bound(length: float) -> float:
            return epsilon(noise / length, 1.0, 1, privacy.delta) if length else 0.0

        return np.array([bound(length) for length in lengths.tolist()])[client]
    full = rounds * float(overflow(num, chance, problem.cohort_size)) if chance is not None else 0.0
    return np.full(
        num, epsilon(noise, 1.0 if chance is None else chance, rounds, privacy.delta - full)
    )


def epsilon(noise: float, chance: float, rounds: int, delta: float) -> float:
    """The epsilon of Gaussian noise on Poisson samples."""
    if delta <= 0:
        return math.inf
    library: Any = optional.load("dp_accounting", "privacy")
    event = library.PoissonSampledDpEvent(chance, library.GaussianDpEvent(noise))
    with optional.quiet():
        return float(
            accountant(noise, 1e-4).create_accountant().compose(event, rounds).get_epsilon(delta)
        )
