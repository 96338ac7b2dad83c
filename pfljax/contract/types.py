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
from pfljax.contract.fields import knob, settings

Array = jax.Array | np.ndarray
Key = jax.Array
Params = Any
Examples = Any  # an array, `Pooled` examples or a view of either, read by indexing; or for x a tree of them
PyTree = Any
Metrics = dict[str, Any]
Topology = Literal["own", "shared", "peers", "push"]
Task = Literal["classification", "regression", "multilabel"]


class Training(NamedTuple):
    """Training mode of a forward pass over a mini-batch; a key alone stands for a mini-batch without padding.

    Attributes:
        key: For dropout and other random numbers.
        mask: (B,) bool, which examples are real. Batch statistics are those of these examples.
    """

    key: Key
    mask: Array


Mode = Key | Training | None  # of a forward pass; None: inference mode


class Split(NamedTuple):
    """One part (train, validation or test) of a client's data, or of all clients' data, stacked.

    Rows at and beyond `size` are padding (zeros) and must not influence any result.
    """

    # (n_max, *features) float32, or integers such as tokens and pixels, or a tree of such arrays; stacked
    # (K, n_max, *features).
    x: Examples
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


class Start(NamedTuple):
    """What the server begins with.

    Attributes:
        server: The server's own state, replicated.
        models: The models that clients can download, leaves (N, ...); () where these are the clients' own.
        optimizer: The models' optimizer state, leaves (N, ...).
    """

    server: PyTree = ()
    models: Params = ()
    optimizer: PyTree = ()


class First(NamedTuple):
    """What a client begins with.

    Attributes:
        row: What it keeps.
        model: Its own model, which others may download; () under "shared".
        optimizer: That model's optimizer state, where the model's owner takes the steps.
    """

    row: PyTree = ()
    model: Params = ()
    optimizer: PyTree = ()


class ClientContext(NamedTuple):
    """A client's view of the round, besides its models, its row and its data.

    Attributes:
        key: The client's key for this round.
        round: () int32, number of the round, from 0.
        step: () int32, number of the exchange within the round (0 unless `Algorithm.exchanges` is more than 1).
        index: (J,) int32, indices of the models that the client received.
        server: `State.server`. Whatever a client reads from it counts as downloaded, except scalars.
        client: () int32, the client's number.
        later: Whether it is known to be a later exchange of the round, so that `step` is not 0.
    """

    key: Key
    round: Array
    step: Array
    index: Array
    server: PyTree = ()
    client: Array = np.zeros((), np.int32)
    later: bool = False


class Mixture(NamedTuple):
    """Whose models a client predicts with, and their weights.

    Attributes:
        index: (J,) int32: clients' numbers, or under "shared" indices into the N models.
        weights: (J,), on the simplex.
    """

    index: Array
    weights: Array


class Prediction(NamedTuple):
    """What a client predicts with: p(y | x) = sum_j weights[j] p(y | x, models[j]), or `Algorithm.apply`.

    Attributes:
        models: Models of its own, leaves (J, ...); (): the models that it received.
        weights: (J,), on the simplex; None: those of `Algorithm.whom`, or equal weights for models of its own.
        index: (J,) int32, places of the models that it uses among those received; None: all of them, in order.
        inputs: Further inputs of `Algorithm.apply`.
    """

    models: Params = ()
    weights: Array | None = None
    index: Array | None = None
    inputs: PyTree = ()

    @classmethod
    def one(cls, model: Params, inputs: PyTree = ()) -> Prediction:
        """A prediction with one model (...) of the client's own."""
        return cls(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], model), inputs=inputs)


class Factors(NamedTuple):
    """What LoRA adds to a weight, as matrices: the products a b of L stacked layers, L = 1 for a single one.

    Attributes:
        a: (L, inputs, r).
        b: (L, r, outputs).
    """

    a: Array
    b: Array


class ClientOutput(NamedTuple):
    """One client's results of a round.

    Attributes:
        client: The client's next row.
        upload: Leaves (J, ...): a contribution to each received model, summed over clients at the model's owner; or
            leaves (J', ...), for only the first J' models. Under "own", the next model; under "push", leaves (...), one
            upload for all receivers. () if nothing comes back. In a dict, other entries are sums by "weight" (J,);
            those beside "model" are sums by "count" (J, ...), if there is one, such as examples of a class.
        report: What the server sees of this client, by name; "loss" () is required. Scalars are free; everything else
            counts as uploaded. "square" is the update's squared norm. Attackers change it, and arrays of floats.
            "absent" () bool: the client did nothing, so its loss does not count; "away" () bool: it has not even
            received anything; "dropped" () bool: its results were not finite, and "broken" () bool: on purpose.
            "seconds" (): its simulated time.
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


@settings
class Ledger:
    """What a round reveals about a client's examples, for differential-privacy accounting.

    Attributes:
        gradients: Gradients computed per mini-batch, personal models included; 0 if the examples themselves are sent,
            which leaves epsilon unbounded. Tables then count 1.
        passes: Mini-batches used in a round, as a multiple of the solver's steps; `Problem.passes` converts a number of
            epochs. Two phases of one epoch each are 2 passes of 1 gradient.
        unaccounted: What else others can learn about a client's data, in words; epsilon does not cover it.
    """

    gradients: int = knob(at_least=0)
    passes: float = knob(1, at_least=0)
    unaccounted: str = ""

    def beside(self, text: str) -> Ledger:
        """The ledger with one more entry in `unaccounted`."""
        known = self.unaccounted.split("; ") if self.unaccounted else []
        return self if text in known else dataclasses.replace(self, unaccounted="; ".join([*known, text]))


@dataclasses.dataclass(frozen=True)
class Report:
    """Extra entries for the plan, summary and pages.

    Attributes:
        scored: The model that the evaluation scores, in words; "": by topology.
        facts: Further entries, by name.
        collaboration: (context, row) -> a client's arrays for collaboration.npz: "index" and "weights" (J,), instead of
            those of its prediction, if it uses other clients' models elsewhere; "affinity" (K,); and any others that
            the method defines. None: the prediction's index and weights.
        topology: Topology of what `collaboration` returns; None: the prediction's.
    """

    scored: str = ""
    facts: tuple[tuple[str, str | float], ...] = ()
    collaboration: Callable[[ClientContext, PyTree], Mapping[str, Array]] | None = None
    topology: Topology | None = None


class Traffic(NamedTuple):
    """Bytes of one exchange, per model or per client, as counted by the engine; a method may state fewer.

    Attributes:
        model: Bytes of one downloaded model.
        upload: Bytes of one contribution.
        report: Bytes of one client's report, without scalars.
        server: Bytes that one client reads from `State.server`, without scalars.
        shapes: Shapes and types of one downloaded model and of one contribution.
    """

    model: float
    upload: float
    report: float
    server: float
    shapes: tuple[PyTree, PyTree] = ((), ())


SCORED = {
    "own": "each client's own model",
    "shared": "the global model",
    "peers": "each client's mixture of models",
    "push": "each client's mixture of its own models",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A method: pure functions of one client or of the server. The engine maps them over clients.

    Attributes:
        start: (key, clients) -> Start: what the server begins with. `clients` is the stacked ClientData of all K
            clients, of which a server may know sizes; default: nothing.
        first_row: (key, client, start) -> First: what a client begins with. It depends on nothing else, so that a row
            is made when a client first takes part. `client` () int32 is its number, and the key is the same for all;
            None: nothing.
        download: (context, row, cohort) -> (J,) int32: the models that a client receives in a round; the first one is
            its own if it has one. Client ids if N = K, otherwise indices into the N models. None: its own model
            under "own", all N models under "shared"; required under "peers" and "push".
        client_update: (context, models, row, data) -> ClientOutput: a client's work on its J received models. Arrays
            in the data are read by indexing (`y[...]` reads everything); x may be a tree, see `views.read`.
        server_update: (key, state, aggregate) -> (State, Metrics): updates the owners and the server.
        whom: (context, row, size) -> Mixture: whose models a client predicts with; `size` is n_k. None: its own model,
            or under "shared" all N models, equally.
        predict: (context, models, row, data) -> Prediction: what a client makes of these models (J, ...) before it
            predicts; may train, but never changes the row. None: it mixes their predictions with the weights of `whom`.
        apply: (models (J, ...), inputs, x (B, *features)) -> logits (B, C), or values (B,), for predictions that are no
            mixture of the models' predictions, with the `inputs` of a Prediction; None: the mixture.
        adapt: (context, models, data) -> Prediction of a client unseen in training. `models` are all N models, or ()
            under "own"; an index refers to them. None, under "shared": `whom` and `predict`, with an
            empty row. Otherwise, unseen clients require it. Under "peers", clients that were never in a cohort use it,
            too, with a few clients' models; see `stages.latecomers`.
        topology: "own": N = K, a model never leaves its client (J = 1); "shared": N models on a server, which all
            clients may receive; "peers": N = K, clients receive each other's models; "push": N = K, each client sends
            one upload to all clients in its index and receives only what others send.
        ledger: What local training reveals about a client's examples; required, since a private run's epsilon depends
            on it.
        sample: (key, state, clients) -> (S,) int32, the ids of the round's cohort, ascending and distinct; None:
            uniform without replacement.
        takes_part: (a client's key for a round) -> () bool: whether it takes part, whatever the others do (Poisson
            sampling). A cohort holds those who do, as far as it has places; in the others are clients whose report has
            "away". None: all of the cohort do.
        tune: (context, prediction, data) -> Prediction: applied to what `predict` or `adapt` returned, with its models
            and weights filled in; None: nothing.
        fine_tuned: Number of epochs, at least 1 -> the algorithm whose `predict` and `adapt` fine-tune for that long
            in a way specific to the method; None: the general fine-tuning, which trains whatever a client predicts
            with.
        exchanges: Number of times that a round repeats exchange and server update on the same download.
        root: (key, state) -> what the server makes of examples of its own, by part, leaves (N, ...); None: it has
            none. Set by a stage, see `stages.combining`.
        report: Extra entries for the plan, summary and pages.
        measures: Further metrics of what a client predicts, by name: (x (B, *features) -> predictions (B, ...), its
            examples) -> (), NaN if there is nothing to measure.
        via_server: Whether peers' models are stored on a server, so that uploading a client's own model is traffic.
        averages: Whether the server averages updates, which are uploaded as {"model": weight x (theta_k - theta),
            "weight": weight} next to other entries. Another aggregator can then replace the mean. Subtract before you
            weight: weight x theta_k - weight x theta is not exactly 0 where theta_k = theta.
        changes: Entries of the upload, beside "model", that a server adds up over rounds: changes of what clients keep.
        sends: What uploads hold, besides the weighted updates of `averages`: "updates", of which compression may leave
            parts out; "sums" of models or features; "models" that replace earlier ones; "products" that travel as
            factors.
        traffic: Traffic counted by the engine -> traffic actually sent (compression); None: as counted.
        stale: Whether the N models of a server are its last ones, newest first, so that an index is a number of steps
            late, which a clock can determine.
        any_age: With `stale`, whether updates count however late they are. On a clock, the N models are then those that
            someone trains from, and the server begins with one; it puts a new model first and drops the last.
        matmul_precision: What a float32 product means in its programs; set by the run, see `LocalTraining`.
    """

    client_update: Callable[[ClientContext, Params, PyTree, ClientData], ClientOutput]
    server_update: Callable[[Key, State, Aggregate], tuple[State, Metrics]]
    topology: Topology
    ledger: Ledger
    start: Callable[[Key, ClientData], Start] = lambda key, clients: Start()
    first_row: Callable[[Key, Array, Start], First] = lambda key, client, start: First()
    download: Callable[[ClientContext, PyTree, Cohort], Array] | None = None
    whom: Callable[[ClientContext, PyTree, Array], Mixture] | None = None
    predict: Callable[[ClientContext, Params, PyTree, ClientData], Prediction] | None = None
    apply: Callable[[Params, PyTree, Array], Array] | None = None
    adapt: Callable[[ClientContext, Params, ClientData], Prediction] | None = None
    sample: Callable[[Key, State, ClientData], Array] | None = None
    takes_part: Callable[[Key], Array] | None = None
    tune: Callable[[ClientContext, Prediction, ClientData], Prediction] | None = None
    fine_tuned: Callable[[int], Algorithm] | None = None
    exchanges: int = 1
    root: Callable[[Key, State], dict[str, PyTree]] | None = None
    report: Report = Report()
    measures: Mapping[str, Callable[[Callable[[Array], Array], Split], Array]] = dataclasses.field(default_factory=dict)
    via_server: bool = False
    averages: bool = False
    changes: tuple[str, ...] = ()
    sends: Literal["updates", "sums", "models", "products"] = "updates"
    traffic: Callable[[Traffic], Traffic] | None = None
    stale: bool = False
    any_age: bool = False
    matmul_precision: str | None = None

    def __post_init__(self):
        if self.topology not in SCORED:
            raise ArgumentError("topology", f"accepted: {', '.join(SCORED)}", self.topology)
        if self.download is None and self.topology in ("peers", "push"):
            text = f"required with topology={self.topology!r}; it says who receives whose model"
            raise ArgumentError("download", text)
        if not isinstance(self.averages, bool):
            text = "accepted: True or False, whether uploads hold weight x (theta_k - theta)"
            raise ArgumentError("averages", text, type(self.averages).__name__)
        if not isinstance(self.ledger, Ledger):
            text = "accepted: a Ledger, which says how many gradients are computed per mini-batch"
            raise ArgumentError("ledger", text, self.ledger)
        if not self.report.scored:
            tuned = self.topology == "shared" and self.predict is not None  # such as a copy that the client trains
            report = dataclasses.replace(self.report, scored=SCORED["own" if tuned else self.topology])
            object.__setattr__(self, "report", report)
