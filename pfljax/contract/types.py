"""Shared types and symbols.

Symbols, the same everywhere: K clients, N models in a stack, J models that a client holds or downloads, M neighbors or
mixture components, C classes, B batch size, n_k examples of client k, R rounds, S clients in a round's cohort.
"Stacked" means a leading axis K, N or S on every leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import ArgumentError

Array = jax.Array | np.ndarray
Key = jax.Array
Params = Any
Examples = Any  # an array, `Pooled` examples or a view of either; read by indexing
PyTree = Any
Metrics = dict[str, Any]
Topology = Literal["own", "shared", "peers", "push"]
Task = Literal["classification", "regression", "multilabel"]


class Split(NamedTuple):
    """One part (train, validation or test) of a client's data, or of all clients' data, stacked.

    Rows at and beyond `size` are padding (zeros) and must not influence any result.
    """

    x: Examples  # (n_max, *features) float32, or integers such as tokens; stacked (K, n_max, *features)
    # (n_max, ...) classes, where integers outside of 0..C-1, such as 255, have nothing to predict; float32 regression
    # targets; (n_max, C) labels 0 or 1; stacked (K, n_max, ...).
    y: Examples
    size: Array  # () int32: number of real examples; stacked (K,)


class ClientData(NamedTuple):
    """All of a client's data that a method can see; contains no test data."""

    train: Split
    validation: Split
    attacker: Array | None = None  # () bool: whether it attacks; no method reads this; stacked (K,)


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
        """Positions of clients (...) in `ids`, or -1; uses bisection, so that no array has size K."""
        if self.everyone:
            return clients
        place = jnp.minimum(jnp.searchsorted(self.ids, clients), self.ids.shape[0] - 1).astype(jnp.int32)
        return jnp.where(self.ids[place] == clients, place, -1)


class State(NamedTuple):
    """Everything that a method carries from round to round; arrays only.

    In a round, a method sees the rows of its cohort: S instead of K, and instead of N if N = K.
    """

    server: PyTree  # replicated: small, or data of all clients that the server needs (FedAMP, MOCHA)
    models: Params  # models that can be downloaded: leaves (N, ...)
    optimizer: PyTree  # the owners' optimizer state: leaves (N, ...)
    clients: PyTree  # rows that never leave their client: leaves (K, ...)
    round: Array = np.zeros((), np.int32)  # () int32: number of completed rounds; the engine counts


class ClientContext(NamedTuple):
    """A client's view of the round, besides its models and data.

    Attributes:
        key: The client's key for this round.
        round: () int32, number of the round, from 0.
        step: () int32, number of the exchange within the round (0 unless `Algorithm.exchanges` is more than 1).
        index: (J,) int32, indices of the models that the client received.
        server: `State.server`. Whatever a client reads from it counts as downloaded, except scalars.
    """

    key: Key
    round: Array
    step: Array
    index: Array
    server: PyTree = ()


class ClientOutput(NamedTuple):
    """One client's results of a round.

    Attributes:
        client: The client's next row.
        upload: Leaves (J, ...): a contribution to each received model, summed over clients at the model's owner; or
            leaves (J', ...), for only the first J' models. Under "own", the next model; under "push", leaves (...), one
            upload for all receivers. () if nothing comes back. In a dict, "weight" and "count" hold the weights of its
            other entries.
        report: What the server sees of this client, by name; "loss" () is required. Scalars are free; everything else
            counts as uploaded.
        sent: (J,) or (J',) bool: which contributions are sent; None: all.
        mixing_weights: (J,), under "push": the weight that each receiver gives the upload.
    """

    client: PyTree
    upload: PyTree
    report: PyTree
    sent: Array | None = None
    mixing_weights: Array | None = None


class Aggregate(NamedTuple):
    """Everything that the owners and the server get back from one exchange."""

    upload: PyTree  # leaves (N, ...): sums of the contributions
    count: Array  # (N,) int32: number of contributions to each model
    sent: Array  # (S, J) bool: which contributions were sent
    report: PyTree  # leaves (S, ...)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Predictor:
    """The clients' predictors: p_k(y | x) = sum_j weights[k, j] p(y | x, models[index[k, j]]).

    Attributes:
        models: Leaves (N, ...).
        index: (K, J) int32 into models.
        weights: (K, J), each row on the simplex.
        topology: Relation of models and clients (see `Algorithm`); under "own" a client may have J models, N = K J,
            starting at row k J for client k.
        rows: Further inputs of each client's `apply`, leaves (K, ...).
        apply: (received models (J, ...), the client's row, x (B, *features)) -> predictions (B, C), for predictions
            that are not a mixture of the models' predictions; None: the mixture above.
    """

    models: Params
    index: Array
    weights: Array
    topology: Topology = dataclasses.field(metadata={"static": True})
    rows: PyTree = ()
    apply: Callable[[Params, PyTree, Array], Array] | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def own(cls, models: Params) -> Predictor:
        """Client k predicts with model k of a stack of K models."""
        num = jax.tree.leaves(models)[0].shape[0]
        return cls(models, jnp.arange(num, dtype=jnp.int32)[:, None], jnp.ones((num, 1)), "own")

    @classmethod
    def one(cls, models: Params, num: int) -> Predictor:
        """All `num` clients predict with the only model of a stack (1, ...)."""
        return cls(models, jnp.zeros((num, 1), jnp.int32), jnp.ones((num, 1)), "shared")


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a round reveals about a client's examples, for differential-privacy accounting.

    Attributes:
        gradients: Gradients computed per mini-batch, personal models included; 0 if the examples themselves are sent,
            which leaves epsilon unbounded.
        passes: Mini-batches used in a round, as a multiple of the solver's steps; `Problem.passes` converts a number of
            epochs. Two phases of one epoch each are 2 passes of 1 gradient.
        unaccounted: What else others can learn about a client's data, in words; epsilon does not cover it.
    """

    gradients: int
    passes: float = 1
    unaccounted: str = ""

    def beside(self, text: str) -> Ledger:
        """The ledger with one more thing that epsilon does not cover."""
        known = self.unaccounted.split("; ") if self.unaccounted else []
        return self if text in known else dataclasses.replace(self, unaccounted="; ".join([*known, text]))


@dataclasses.dataclass(frozen=True)
class Report:
    """Extra entries for the plan, summary and pages.

    Attributes:
        scored: The model that the evaluation scores, in words; "": by topology.
        facts: Further entries, by name.
        collaboration: State -> arrays for collaboration.npz: "index" and "weights" (K, J), instead of the predictor's,
            if a client uses other clients' models outside its predictions; "affinity" (K, K); and any others that the
            method defines. None: the predictor's index and weights.
        topology: Topology of what `collaboration` returns; None: the predictor's.
    """

    scored: str = ""
    facts: tuple[tuple[str, str | float], ...] = ()
    collaboration: Callable[[State], Mapping[str, Array]] | None = None
    topology: Topology | None = None


class Traffic(NamedTuple):
    """Bytes of one exchange, per model or per client, as counted by the engine; a method may state fewer.

    Attributes:
        model: Bytes of one downloaded model.
        upload: Bytes of one contribution.
        report: Bytes of one client's report, without scalars.
        server: Bytes that one client reads from `State.server`, without scalars.
    """

    model: float
    upload: float
    report: float
    server: float


BY_DEFAULT: Any = None  # replaced by `Algorithm`
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
            its data. Arrays in the data are read by indexing (`x[...]` reads everything).
        server_update: (key, state, aggregate) -> (State, Metrics): updates the owners and the server.
        predictor: (key, state, clients) -> Predictor; may train locally but never changes the state.
        topology: "own": N = K, a model never leaves its client (J = 1); "shared": N models on a server, which all
            clients may receive; "peers": N = K, clients receive each other's models; "push": N = K, each client sends
            one upload to all clients in its index and receives only what others send.
        ledger: What local training reveals about a client's examples; required, since a private run's epsilon depends
            on it.
        download: (key, state, cohort) -> (S, J) int32: the models that each client of the cohort receives; column 0 is
            the client's own model if it has one. Client ids if N = K, otherwise indices into the N models. None: the
            client's own model under "own", all N models under "shared"; required under "peers" and "push".
        adapt: (key, state, clients) -> Predictor for clients unseen in training; None: `predictor`.
        sample: (key, state, clients) -> (S,) int32, the ids of the round's cohort, ascending and distinct; None:
            uniform without replacement.
        fine_tune: (key, predictor, clients) -> Predictor: applied to the predictor before evaluation, once the models
            in its index are available; None: nothing. The general fine-tuning follows it.
        fine_tuned: Number of epochs, at least 1 -> the algorithm whose `predictor` and `adapt` fine-tune for that long
            in a way specific to the method; None: the general fine-tuning, which trains whatever a client predicts
            with.
        exchanges: Number of times that a round repeats exchange and server update on the same download.
        report: Extra entries for the plan, summary and pages.
        via_server: Whether peers' models are stored on a server, so that uploading a client's own model is traffic.
        averages: Received models -> the ones whose weighted new versions are uploaded, as {"model": weight x model,
            "weight": weight} next to other entries; another aggregator can then replace the mean. None: the server
            averages no models.
        traffic: Traffic counted by the engine -> traffic actually sent (compression); None: as counted.
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
            raise ArgumentError("topology", f"accepted: {', '.join(SCORED)}", self.topology)
        if self.download is None and self.topology in ("peers", "push"):
            text = f"required with topology={self.topology!r}; it says who receives whose model"
            raise ArgumentError("download", text)
        if not isinstance(self.ledger, Ledger):
            text = "accepted: a Ledger, which says how many gradients are computed per mini-batch"
            raise ArgumentError("ledger", text, self.ledger)
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
