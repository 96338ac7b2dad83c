"""The shared types and the symbols of the field.

Symbols, the same everywhere: K clients, N models in a stack, J models that a client holds or downloads,
M neighbors or mixture components, C classes, B batch, n_k examples of client k, R rounds, S clients in a
round's cohort. "Stacked" means a leading axis K, N or S on every leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.core.errors import RunError as RunError

Array = jax.Array | np.ndarray
Key = jax.Array
Params = Any
Examples = Any  # an array, `Pooled` examples or a view of either, all read by indexing
PyTree = Any
Metrics = dict[str, Any]
Topology = Literal["own", "shared", "peers", "push"]
Task = Literal["classification", "regression"]


class Split(NamedTuple):
    """One part (train, validation or test) of a client's data, or of all clients' stacked.

    Rows at and beyond `size` are padding (zeros) and must not influence any result.
    """

    x: Examples  # (n_max, *features) float32, or (n_max, T) uint8 tokens of sequences; stacked (K, n_max, *features)
    # (n_max,) int32 classes, or float32 targets of a regression; (n_max, T) uint8 for sequences, 255 where there is
    # nothing to predict; stacked (K, n_max, ...).
    y: Examples
    size: Array  # () int32: how many examples are real; stacked (K,)


class ClientData(NamedTuple):
    """What one client knows, and all that a method ever sees of it: there is no test data in it."""

    train: Split
    validation: Split
    attacker: Array | None = None  # () bool: whether it attacks, which no method reads; stacked (K,)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cohort:
    """The S clients that take part in a round.

    Attributes:
        ids: (S,) int32, ascending client ids.
        everyone: Whether they are all K clients.
    """

    ids: Array
    everyone: bool = dataclasses.field(default=False, metadata={"static": True})

    def position(self, clients: Array) -> Array:
        """Where clients (...) stand in `ids`, or -1: found by bisection, so that nothing has the size of K."""
        if self.everyone:
            return clients
        place = jnp.minimum(jnp.searchsorted(self.ids, clients), self.ids.shape[0] - 1).astype(jnp.int32)
        return jnp.where(self.ids[place] == clients, place, -1)


class State(NamedTuple):
    """Everything that a method carries from round to round; arrays only.

    In a round a method sees the rows of its cohort (S in place of K, and of N where N = K).
    """

    server: PyTree  # replicated: small, or (FedAMP, MOCHA) what the server computes with, of all clients
    models: Params  # what can be downloaded: leaves (N, ...)
    optimizer: PyTree  # the owners' optimizer state: leaves (N, ...)
    clients: PyTree  # rows that never leave their client: leaves (K, ...)
    round: Array = np.zeros((), np.int32)  # () int32: how many rounds have been played; the engine counts


class ClientContext(NamedTuple):
    """What a client knows of the round, beside its models and its data.

    Attributes:
        key: The client's key for this round.
        round: () int32, number of the round, from 0.
        step: () int32, number of the exchange within the round (0 unless `Algorithm.exchanges` is more than 1).
        index: (J,) int32, which models the client has received.
        server: `State.server`. What a client reads of it counts as downloaded, scalars excepted.
    """

    key: Key
    round: Array
    step: Array
    index: Array
    server: PyTree = ()


class ClientOutput(NamedTuple):
    """What one client makes of a round.

    Attributes:
        client: The client's next row.
        upload: Leaves (J, ...): a contribution to each received model, summed over clients at the model's owner; or
            leaves (J', ...), for the first J' of them only. Under "own" the next model; under "push" leaves (...), one
            upload for all receivers. () where nothing comes back. Entries "weight" and "count" of a dict say how much
            its others count.
        report: What the server sees of this client, by name; "loss" () is required. Scalars are free; everything else
            counts as uploaded.
        sent: (J,) or (J',) bool, which contributions are made; None: all.
        mixing_weights: (J,) under "push": the weight with which each receiver counts the upload.
    """

    client: PyTree
    upload: PyTree
    report: PyTree
    sent: Array | None = None
    mixing_weights: Array | None = None


class Aggregate(NamedTuple):
    """What came back to the owners and the server in one exchange."""

    upload: PyTree  # leaves (N, ...): sums of the contributions
    count: Array  # (N,) int32: number of contributions to each model
    sent: Array  # (S, J) bool: which contributions were made
    report: PyTree  # leaves (S, ...)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Predictor:
    """What clients predict with: p_k(y | x) = sum_j weights[k, j] p(y | x, models[index[k, j]]).

    Attributes:
        models: Leaves (N, ...).
        index: (K, J) int32 into models.
        weights: (K, J), each row on the simplex.
        topology: How the models lie with respect to the clients (see `Algorithm`); under "own" there may be J models
            to a client, N = K J, those of client k from row k J on.
        rows: What each client's `apply` reads beside the models, leaves (K, ...).
        apply: (received models (J, ...), the client's row, x (B, *features)) -> predictions (B, C), for predictions
            that no mixture of models expresses; None: the mixture above.
    """

    models: Params
    index: Array
    weights: Array
    topology: Topology = dataclasses.field(metadata={"static": True})
    rows: PyTree = ()
    apply: Callable[[Params, PyTree, Array], Array] | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def own(cls, models: Params) -> Predictor:
        """Client k predicts with model k of a stack of K."""
        num = jax.tree.leaves(models)[0].shape[0]
        return cls(models, jnp.arange(num, dtype=jnp.int32)[:, None], jnp.ones((num, 1)), "own")

    @classmethod
    def one(cls, models: Params, num: int) -> Predictor:
        """All `num` clients predict with the one model of a stack (1, ...)."""
        return cls(models, jnp.zeros((num, 1), jnp.int32), jnp.ones((num, 1)), "shared")


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a round tells others of a client's examples, for the accounting of differential privacy.

    Attributes:
        gradients: Gradients computed per mini-batch, personal models included; 0 if the examples themselves are sent,
            so that there is no bound.
        passes: Mini-batches used in a round, as a multiple of the solver's steps; `Problem.passes` gives it for a
            number of epochs. Two phases of one epoch each are 2 passes of 1 gradient.
        unaccounted: What else others can learn of a client's data, in words: epsilon omits it.
    """

    gradients: int
    passes: float = 1
    unaccounted: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """Extra entries for plan, summary and pages.

    Attributes:
        scored: Which model the evaluation scores, in words; "": by topology.
        facts: Further entries, by name.
        collaboration: State -> arrays for collaboration.npz: "index" and "weights" (K, J) in place of the predictor's
            where a client uses others' models otherwise than in its predictions; "affinity" (K, K); and others of the
            method's own. None: the predictor's index and weights.
        topology: Of what `collaboration` returns; None: the predictor's.
    """

    scored: str = ""
    facts: tuple[tuple[str, str | float], ...] = ()
    collaboration: Callable[[State], Mapping[str, Array]] | None = None
    topology: Topology | None = None


class Traffic(NamedTuple):
    """Bytes of one exchange, per model or per client, as the engine counts them; a method may state fewer.

    Attributes:
        model: One downloaded model.
        upload: One contribution.
        report: One client's report beyond scalars.
        server: What one client reads of `State.server` beyond scalars.
    """

    model: float
    upload: float
    report: float
    server: float


BY_DEFAULT: Any = None  # which `Algorithm` replaces
SCORED = {
    "own": "each client's own model",
    "shared": "the global model",
    "peers": "each client's mixture of models",
    "push": "each client's mixture of its own models",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A method: pure functions that the engine composes into a round (download, exchange, update).

    Attributes:
        init: (key, clients) -> State, from the stacked ClientData of all K clients.
        client_update: (context, models, row, data) -> ClientOutput, for one client: its J received models, its row and
            its data. Arrays of the data are read by indexing (`x[...]` is all of it).
        server_update: (key, state, aggregate) -> (State, Metrics): owners and server take what came back.
        predictor: (key, state, clients) -> Predictor; may train locally, never changes the state.
        topology: "own": N = K, a model never leaves its client (J = 1); "shared": N models on a server, everyone may
            receive them; "peers": N = K, clients receive each other's models; "push": N = K, clients send one upload
            to all clients of their index and receive nothing but what others send.
        ledger: What local training tells of a client's examples; required, since a private run's epsilon rests on it.
        download: (key, state, cohort) -> (S, J) int32: which models each client of the cohort receives; column 0 is
            the client's own where it has one. Client ids where N = K, else indices into the N models. None: its own
            model under "own", all N models under "shared"; required under "peers" and "push".
        adapt: (key, state, clients) -> Predictor for clients that were not there in training; None: `predictor`.
        sample: (key, state, clients) -> (S,) int32, the ids of the round's cohort, ascending and distinct; None:
            uniform without replacement.
        fine_tune: (key, predictor, clients) -> Predictor: what clients do with their predictor before it is evaluated,
            when the models that it indexes are at hand; None: nothing. The general fine-tuning comes after it.
        fine_tuned: Number of epochs, 1 or more -> the algorithm whose `predictor` and `adapt` fine-tune for so long in
            the method's own way; None: the general fine-tuning, which trains whatever a client predicts with.
        exchanges: Number of times that a round repeats exchange and server update on the same download.
        report: Extra entries for plan, summary and pages.
        via_server: Whether peers' models lie on a server, so that a client's upload of its own model is traffic.
        averages: Received models -> those of which uploads bring back weighted new ones, {"model": weight x model,
            "weight": weight} beside other entries; another aggregator can then take the mean's place. None: the server
            averages no models.
        traffic: The bytes that the engine has counted -> those that are really sent (compression); None: as counted.
    """

    init: Callable[[Key, ClientData], State]
    client_update: Callable[[ClientContext, Params, PyTree, ClientData], ClientOutput]
    server_update: Callable[[Key, State, Aggregate], tuple[State, Metrics]]
    predictor: Callable[[Key, State, ClientData], Predictor]
    topology: Topology
    ledger: Ledger
    download: Callable[[Key, State, Cohort], Array] = BY_DEFAULT
    adapt: Callable[[Key, State, ClientData], Predictor] = BY_DEFAULT
    sample: Callable[[Key, State, ClientData], Array] | None = None
    fine_tune: Callable[[Key, Predictor, ClientData], Predictor] | None = None
    fine_tuned: Callable[[int], Algorithm] | None = None
    exchanges: int = 1
    report: Report = Report()
    via_server: bool = False
    averages: Callable[[Params], Params] | None = None
    traffic: Callable[[Traffic], Traffic] | None = None

    def __post_init__(self):
        if self.topology not in SCORED:
            raise ValueError(f"topology={self.topology}: accepted: {', '.join(SCORED)}")
        if self.download is None and self.topology in ("peers", "push"):
            raise ValueError(f"download: required under topology={self.topology!r}: who receives whose model")
        if not isinstance(self.ledger, Ledger):
            raise ValueError("ledger: accepted: a Ledger, which says how many gradients a mini-batch gives")
        defaults = {"download": self._download, "adapt": self.predictor}
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if not self.report.scored:
            report = dataclasses.replace(self.report, scored=SCORED[self.topology])
            object.__setattr__(self, "report", report)

    def _download(self, key: Key, state: State, cohort: Cohort) -> Array:
        if self.topology == "own":
            return cohort.ids[:, None]
        num = jax.tree.leaves(state.models)[0].shape[0]
        return jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (cohort.ids.shape[0], num))


class UsageError(ValueError):
    """A user's mistake, in one line that names the flag or file and what is accepted (exit code 2)."""
