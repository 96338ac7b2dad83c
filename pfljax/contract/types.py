"""Shared types and symbols.

Symbols, the same everywhere: K clients, N models in a stack, J models that a client holds or downloads, M neighbors or
mixture components, C classes, B batch size, n_k examples of client k, R rounds, S clients in a round's cohort.
"Stacked" means a leading axis K, N or S on every leaf.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import ArgumentError

Array = jax.Array | np.ndarray
Key = jax.Array
Params = Any
# an array, `Pooled` examples or a view of either, read by indexing; or for x a tree of them
Examples = Any
PyTree = Any
Metrics = dict[str, Any]
Task = Literal["classification", "regression", "multilabel"]

NO_TREES: dict[str, PyTree] = {}  # default of trees by name; never changed
MOST = 2**31 - 1  # integers become 32-bit on the devices


class Topology(enum.StrEnum):
    """Whose models clients receive, and where their contributions go.

    Examples:
        >>> from pfljax.author import Topology
        >>> Topology("shared").on_server
        True
        >>> Topology("peers").reads_others
        True
    """

    OWN = "own"  # a client's models never leave it
    SHARED = "shared"  # N models on a server, which all clients may receive
    PEERS = "peers"  # clients receive each other's models
    # each client sends one upload to all clients in its index, and receives only what others send
    PUSH = "push"

    @property
    def on_server(self) -> bool:
        """Whether the server holds the models; otherwise each client holds its own."""
        return self is Topology.SHARED

    @property
    def reads_others(self) -> bool:
        """Whether a client receives models that other clients hold."""
        return self is Topology.PEERS

    @property
    def moves(self) -> bool:
        """Whether a round carries anything between clients, or between clients and the server."""
        return self is not Topology.OWN

    @property
    def between_clients(self) -> bool:
        """Whether clients get something from each other, without a server."""
        return self in (Topology.PEERS, Topology.PUSH)

    @property
    def first_is_own(self) -> bool:
        """Whether the first model that a client receives is its own."""
        return self is not Topology.SHARED


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
    """All of a client's data that a method can see; contains no test data.

    Examples:
        The data of four clients, stacked, as `Algorithm.start` gets it; a client gets its own row:

        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4)
        >>> data = pfl.author.ClientData(clients.train, clients.validation)
        >>> data.train.size.tolist()
        [357, 362, 362, 357]
    """

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

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import Cohort
        >>> cohort = Cohort(jnp.array([1, 4, 6]))
        >>> cohort.position(jnp.array([4, 5])).tolist()
        [1, -1]
    """

    ids: Array
    everyone: bool = dataclasses.field(default=False, metadata={"static": True})

    def position(self, clients: Array) -> Array:
        """Positions of clients (...) in `ids`, or -1; uses bisection, so that no array has size K."""
        if self.everyone:
            return clients
        position = jnp.searchsorted(self.ids, clients)
        position = jnp.minimum(position, self.ids.shape[0] - 1).astype(jnp.int32)
        return jnp.where(self.ids[position] == clients, position, -1)


class Start(NamedTuple):
    """What the server holds: at first what `Algorithm.start` returns, then what each server update makes of it.

    Attributes:
        state: The server's own state, replicated: small, or data of all clients that the server needs (FedAMP, MOCHA).
        models: The models that clients can download, leaves (N, ...); () where these are the clients' own.
        opt_state: The models' optimizer states, leaves (N, ...).

    Examples:
        A server with one model of three parameters, whose momentum begins at zero:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from pfljax.author import Start, tree
        >>> params = {"w": jnp.ones(3)}
        >>> momentum = jax.tree.map(jnp.zeros_like, params)
        >>> start = Start(state=momentum, models=tree.stack_one(params))
        >>> start.models["w"].shape
        (1, 3)
    """

    state: PyTree = ()
    models: Params = ()
    opt_state: PyTree = ()


class First(NamedTuple):
    """What a client holds: at first what `Algorithm.first_row` returns; stacked, leaves (K, ...).

    Attributes:
        row: What never leaves the client.
        model: Its own model, which others may download; () under "shared".
        opt_state: That model's optimizer state, where the model's owner takes the steps.

    Examples:
        Client 2 begins with a control variate, and has no model of its own:

        >>> import jax.numpy as jnp
        >>> from pfljax.author import First
        >>> def first_row(key, client, start):
        ...     return First(row={"control_variate": jnp.zeros(3)})
        >>> first_row(None, 2, None).model
        ()
    """

    row: PyTree = ()
    model: Params = ()
    opt_state: PyTree = ()


class State(NamedTuple):
    """Everything that a method carries from round to round; arrays only.

    In a round, a method sees the clients of its cohort: S instead of K.

    Attributes:
        server: What the server holds, replicated.
        clients: What the clients hold, stacked: leaves (K, ...).
        round: () int32, number of completed rounds; the engine counts.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import First, Start, State
        >>> server = Start(models={"w": jnp.zeros((1, 3))})
        >>> state = State(server=server, clients=First(row=jnp.zeros(10)))
        >>> state.models_on_server
        True
        >>> state = state.with_models({"w": jnp.ones((1, 3))})
        >>> state.models["w"].tolist()
        [[1.0, 1.0, 1.0]]
    """

    server: Start = Start()
    clients: First = First()
    round: Array = np.zeros((), np.int32)

    @property
    def models_on_server(self) -> bool:
        """Whether the models that clients can download are the server's, and not the clients' own."""
        # The server's may have no leaves, where clients keep all layers to themselves.
        return not jax.tree.leaves(self.clients.model)

    @property
    def models(self) -> Params:
        """The models that clients can download, leaves (N, ...): the server's, or the clients' own."""
        return self.server.models if self.models_on_server else self.clients.model

    @property
    def opt_state(self) -> PyTree:
        """Optimizer states of `models`, leaves (N, ...)."""
        return self.server.opt_state if self.models_on_server else self.clients.opt_state

    @property
    def rows(self) -> PyTree:
        """The clients' rows, leaves (K, ...)."""
        return self.clients.row

    def with_models(self, models: Params, opt_state: PyTree | None = None) -> State:
        """The state with other `models`, and with their optimizer states if these are given."""
        opt_state = self.opt_state if opt_state is None else opt_state
        if self.models_on_server:
            return self._replace(server=self.server._replace(models=models, opt_state=opt_state))
        return self._replace(clients=self.clients._replace(model=models, opt_state=opt_state))

    def with_server(self, state: PyTree) -> State:
        """The state with another state of the server's own."""
        return self._replace(server=self.server._replace(state=state))

    def with_rows(self, rows: PyTree) -> State:
        """The state with other rows of the clients."""
        return self._replace(clients=self.clients._replace(row=rows))


class ClientContext(NamedTuple):
    """A client's view of the round, besides its models, its row and its data.

    Attributes:
        key: The client's key for this round.
        round: () int32, number of the round, from 0.
        step: () int32, number of the exchange within the round (0 unless `Algorithm.exchanges` is more than 1).
        index: (J,) int32, indices of the models that the client received.
        server: `State.server.state`. Whatever a client reads from it counts as downloaded, except scalars.
        client: () int32, the client's number.
        later: Whether it is known to be a later exchange of the round, so that `step` is not 0.
        optimizer: Optimizer states of the received models, which the engine keeps for this client from round to
            round; None: their optimizer begins anew in every round. `Problem.fit` reads it, methods do not.
        statistics: Batch statistics of the received models, leaves (J, ...), where the method gets the models without
            them; None: the models are whole. `Problem.fit` reads it, methods do not.

    Examples:
        A client reads the round's number, here for a warmup of ten rounds:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from pfljax.author import ClientContext
        >>> def warmup(context):
        ...     return jnp.minimum((context.round + 1) / 10, 1)
        >>> context = ClientContext(jax.random.key(0), round=4, step=0, index=jnp.arange(1))
        >>> float(warmup(context))
        0.5
    """

    key: Key
    round: Array
    step: Array
    index: Array
    server: PyTree = ()
    client: Array = np.zeros((), np.int32)
    later: bool = False
    optimizer: KeptOptimizer | None = None
    statistics: Params = None


class KeptOptimizer(NamedTuple):
    """A client's optimizer states of shared models, kept by the engine.

    Attributes:
        state: The states after its last round, as `Trained.opt_state`.
        started: () bool: whether the client has trained before; otherwise `state` is zeros, and means nothing.
    """

    state: PyTree
    started: Array


class Trained(NamedTuple):
    """What a client's local training in a round leaves behind.

    `Problem.fit` and its relatives fill the first four fields. A method that returns this adds the others with
    `_replace`.

    Attributes:
        models: The trained models, leaves (J, ...), or updates of them where the server expects these.
        losses: (J,) mean losses over the steps.
        opt_state: Optimizer states of these models. The engine keeps them if the run says so.
        statistics: Batch statistics of the trained models, leaves (J, ...), where `models` has none.
        row: What the client keeps.
        weight: () weight of this client in averages; None: n_k. A client with weight 0 sends nothing.
        sums: Trees that the server adds up over the round's clients, by name.
        count: Weights of `sums`, such as examples of each class, if these are not `weight`; added up, too.
        square: () weight times the squared norm of the client's update, if the server needs it.
        report: What else the server sees of this client, by name. Scalars are free, all else counts as uploaded.

    Examples:
        A method weights its clients equally:

        >>> import jax.numpy as jnp
        >>> from pfljax.author import Trained
        >>> trained = Trained(models={"w": jnp.ones((1, 3))}, losses=jnp.array([0.5]))
        >>> trained = trained._replace(weight=jnp.ones(()))
        >>> float(trained.weight)
        1.0
    """

    models: Params
    losses: Array
    opt_state: PyTree = ()
    statistics: Params = None
    row: PyTree = ()
    weight: Array | None = None
    sums: Mapping[str, PyTree] = {}
    count: Array | None = None
    square: Array | None = None
    report: Mapping[str, PyTree] = {}


class Mixture(NamedTuple):
    """Whose models a client predicts with, and their weights.

    Attributes:
        index: (J,) int32: clients' numbers, or under "shared" indices into the N models.
        weights: (J,), on the simplex.

    Examples:
        A client predicts with its own model, number 3, and with that of client 7:

        >>> import jax.numpy as jnp
        >>> from pfljax.author import Mixture
        >>> mixture = Mixture(index=jnp.array([3, 7]), weights=jnp.array([0.75, 0.25]))
        >>> mixture.index.tolist()
        [3, 7]
    """

    index: Array
    weights: Array


class Prediction(NamedTuple):
    """What a client predicts with: p(y | x) = sum_j weights[j] p(y | x, models[j]), or `Algorithm.apply`.

    Attributes:
        models: Models of its own, leaves (J, ...); (): the models that it received.
        weights: (J,), on the simplex; None: those of `Algorithm.select_models`, or equal weights for models of its own.
            Of classes, they may differ by class: (J, C), each column on the simplex; then p(c | x) is proportional to
            sum_j weights[j, c] p(c | x, models[j]).
        index: (J,) int32, places of the models that it uses among those received; None: all of them, in order.
        inputs: Further inputs of `Algorithm.apply`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import Prediction
        >>> prediction = Prediction.single({"w": jnp.zeros(3)})
        >>> prediction.models["w"].shape
        (1, 3)

        Two models, mixed:

        >>> models = {"w": jnp.zeros((2, 3))}
        >>> prediction = Prediction(models, weights=jnp.array([0.75, 0.25]))
        >>> prediction.weights.tolist()
        [0.75, 0.25]
    """

    models: Params = ()
    weights: Array | None = None
    index: Array | None = None
    inputs: PyTree = ()

    @classmethod
    def single(cls, model: Params, inputs: PyTree = ()) -> Prediction:
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


class Upload(NamedTuple):
    """What a client sends to the owners of the models that it received, who add it up over clients.

    As a method returns it, `update` has no weights; the engine adds up weight x update.

    Attributes:
        update: For each of the J received models (or only the first J' of them) what its owner adds up or averages,
            leaves (J, ...): theta_k - theta, a gradient, or under "own" the client's next models themselves. Under
            "push", leaves (...), one upload for all receivers. (): nothing. Subtract before anything is weighted:
            n theta_k - n theta is not exactly 0 in compiled code where theta_k = theta.
        weight: (J,) w_k, the update's weight; sums of it arrive beside those of w_k u_k. None: updates are added up as
            they are.
        sums: Further trees that are added up as they are, leaves (J, ...), by name. What belongs to a mean is already
            multiplied by `weight`, or by its own count.
        count: (J, ...) weights of `sums`, such as examples of each class, if these are not `weight`; added up, too.

    Examples:
        A client with 20 examples sends the update of one model:

        >>> import jax.numpy as jnp
        >>> from pfljax.author import Upload, tree
        >>> received = {"w": jnp.zeros((1, 3))}
        >>> trained = {"w": jnp.ones((1, 3))}
        >>> upload = Upload(tree.subtract(trained, received), weight=jnp.array([20.0]))
        >>> upload.update["w"].tolist()
        [[1.0, 1.0, 1.0]]
    """

    update: Params = ()
    weight: Array | None = None
    sums: dict[str, PyTree] = NO_TREES
    count: Array | None = None


class ClientReport(NamedTuple):
    """What the server sees of one client. Scalars are free; everything else counts as uploaded.

    Attributes:
        loss: () mean training loss.
        square: () weight times the squared norm of the client's update, if the server needs it. A
            stage that changes the update scales it.
        entries: What else the method tells the server, by name.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import ClientReport
        >>> report = ClientReport(loss=jnp.array(0.5), entries={"steps": jnp.array(12)})
        >>> int(report.entries["steps"])
        12
    """

    loss: Array
    square: Array | None = None
    entries: dict[str, PyTree] = NO_TREES


class Participation(NamedTuple):
    """What became of a client in a round; the stages set it, methods do not. None: known to be False.

    Attributes:
        absent: () bool: it did nothing, or nothing of it arrived, so that its loss does not count.
        away: () bool: it has not even received anything.
        dropped: () bool: its results were left out, since they were not finite.
        broken: () bool: they were made so on purpose.
        seconds: () simulated time that it took; None without a clock.
        idle: () bool: what it keeps stayed as it was, since it did not train or its results were dropped.
    """

    absent: Array | None = None
    away: Array | None = None
    dropped: Array | None = None
    broken: Array | None = None
    seconds: Array | None = None
    idle: Array | None = None


class ClientOutput(NamedTuple):
    """One client's results of a round.

    Attributes:
        row: The client's next row.
        upload: What it sends back for each received model.
        report: What the server sees of it.
        opt_state: Optimizer states of the received models that the engine keeps for this client, if the run says so;
            `Trained.opt_state`.
        sent: (J,) or (J',) bool: which contributions are sent; None: those with a positive weight, or all.
        mixing_weights: (J,), under "push": the weight that each receiver gives the upload.
        participation: What became of the client.
        notes: What the stages tell the server of this client, by the stage's name; methods leave it empty.

    Examples:
        A client keeps nothing and sends its update:

        >>> import jax.numpy as jnp
        >>> from pfljax.author import ClientOutput, ClientReport, Upload
        >>> upload = Upload({"w": jnp.ones((1, 3))}, weight=jnp.array([20.0]))
        >>> output = ClientOutput(row=(), upload=upload, report=ClientReport(jnp.array(0.5)))
        >>> float(output.report.loss)
        0.5
    """

    row: PyTree
    upload: Upload
    report: ClientReport
    opt_state: PyTree = ()
    sent: Array | None = None
    mixing_weights: Array | None = None
    participation: Participation = Participation()
    notes: dict[str, PyTree] = NO_TREES


class Aggregate(NamedTuple):
    """Everything that the owners and the server get back from one exchange.

    Attributes:
        upload: Sums over clients, leaves (N, ...): of w_k u_k as `update`, of w_k as `weight`, of `sums` and `count`.
        num_sent: (N,) int32, number of contributions to each model.
        sent: (S, J) bool, which contributions were sent.
        report: What each client told, leaves (S, ...).
        participation: What became of each client, leaves (S,).
        notes: What the stages tell of each client, leaves (S, ...), by the stage's name.

    Examples:
        The server's mean update of two clients with 10 and 30 examples:

        >>> import jax.numpy as jnp
        >>> from pfljax.author import Aggregate, ClientReport, Upload
        >>> sums = Upload(update={"w": jnp.array([[80.0]])}, weight=jnp.array([40.0]))
        >>> aggregate = Aggregate(
        ...     upload=sums,
        ...     num_sent=jnp.array([2]),
        ...     sent=jnp.array([[True], [True]]),
        ...     report=ClientReport(loss=jnp.array([0.5, 0.7])),
        ... )
        >>> mean = aggregate.upload.update["w"] / aggregate.upload.weight
        >>> mean.tolist()
        [[2.0]]
    """

    upload: Upload
    num_sent: Array
    sent: Array
    report: ClientReport
    participation: Participation = Participation()
    notes: dict[str, PyTree] = NO_TREES


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a round reveals about a client's examples, for differential-privacy accounting.

    Attributes:
        gradients: Gradients computed per mini-batch, personal models included; 0 if the examples themselves are sent,
            which leaves epsilon unbounded. Tables then count 1.
        passes: Mini-batches used in a round, as a multiple of the solver's steps; `Problem.passes` converts a number of
            epochs. Two phases of one epoch each are 2 passes of 1 gradient.
        unaccounted: What else others can learn about a client's data, in words; epsilon does not cover it.

    Examples:
        >>> from pfljax.author import Ledger
        >>> ledger = Ledger(gradients=2)
        >>> ledger.with_unaccounted("numbers of examples, which weight the mean")
        Ledger(gradients=2, passes=1, unaccounted='numbers of examples, which weight the mean')
    """

    gradients: int
    passes: float = 1
    unaccounted: str = ""

    def __post_init__(self) -> None:
        """Raises `ArgumentError` if a field is not accepted."""
        is_whole = isinstance(self.gradients, int | np.integer)
        if not is_whole or isinstance(self.gradients, bool):
            raise ArgumentError("gradients", "accepted: whole numbers", self.gradients)
        if abs(self.gradients) > MOST:
            raise ArgumentError("gradients", f"accepted: 0 to {MOST}", self.gradients)
        if self.gradients < 0:
            raise ArgumentError("gradients", "accepted: 0 or more", self.gradients)
        is_number = isinstance(self.passes, int | float | np.integer | np.floating)
        if not is_number or isinstance(self.passes, bool):
            raise ArgumentError("passes", "accepted: numbers", self.passes)
        if abs(self.passes) == np.inf:
            raise ArgumentError("passes", "accepted: finite numbers", self.passes)
        if not self.passes >= 0:
            raise ArgumentError("passes", "accepted: 0 or more", self.passes)
        if not isinstance(self.unaccounted, str):
            raise ArgumentError("unaccounted", "accepted: text", self.unaccounted)

    def with_unaccounted(self, text: str) -> Ledger:
        """The ledger with one more entry in `unaccounted`."""
        entries = self.unaccounted.split("; ") if self.unaccounted else []
        if text in entries:
            return self
        return dataclasses.replace(self, unaccounted="; ".join([*entries, text]))


@dataclasses.dataclass(frozen=True)
class MethodReport:
    """Extra entries for the plan, summary and pages.

    Attributes:
        scored: The model that the evaluation scores, in words; "": by topology.
        facts: Further entries, by name.
        collaboration: (context, row) -> a client's arrays for collaboration.npz: "index" and "weights" (J,), instead of
            those of its prediction, if it uses other clients' models elsewhere; "affinity" (K,); and any others that
            the method defines. None: the prediction's index and weights.
        topology: Topology of what `collaboration` returns; None: the prediction's.

    Examples:
        >>> from pfljax.author import MethodReport
        >>> report = MethodReport(facts=(("components", 3),))
        >>> dict(report.facts)
        {'components': 3}
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

    Examples:
        A method that sends a quarter of each contribution:

        >>> from pfljax.author import Traffic
        >>> def sent(traffic):
        ...     return traffic._replace(upload=traffic.upload / 4)
        >>> sent(Traffic(model=400, upload=400, report=0, server=0)).upload
        100.0
    """

    model: float
    upload: float
    report: float
    server: float
    shapes: tuple[PyTree, PyTree] = ((), ())


SCORED = {
    Topology.OWN: "each client's own model",
    Topology.SHARED: "the global model",
    Topology.PEERS: "each client's mixture of models",
    Topology.PUSH: "each client's mixture of its own models",
}


class EngineFields(NamedTuple):
    """What stages and runs add to a method, beside its functions.

    Attributes:
        takes_part: (a client's key for a round) -> () bool: whether it takes part, whatever the others do (Poisson
            sampling). A cohort holds those who do, as far as it has places; in the others are clients whose report has
            "away". None: all of the cohort do.
        tune: (context, prediction, data) -> Prediction: applied to what `predict` or `adapt` returned, with its models
            and weights filled in; None: nothing.
        measures: Further metrics of what a client predicts, by name: (x (B, *features) -> predictions (B, ...), its
            examples) -> (), NaN if there is nothing to measure.
        matmul_precision: What a float32 product means in its programs; set by the run, see `LocalTraining`.
    """

    takes_part: Callable[[Key], Array] | None = None
    tune: Callable[[ClientContext, Prediction, ClientData], Prediction] | None = None
    measures: Mapping[str, Callable[[Callable[[Array], Array], Split], Array]] = {}
    matmul_precision: str | None = None


NOTHING_ADDED = EngineFields()


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
        select_models: (context, row, size) -> Mixture: whose models a client predicts with; `size`: n_k. None: its own,
            or under "shared" all N models, equally.
        predict: (context, models, row, data) -> Prediction: what a client makes of these models (J, ...) before it
            predicts; may train, but never changes the row. None: it mixes their predictions by `select_models`.
        apply: (models (J, ...), inputs, x (B, *features)) -> logits (B, C), or values (B,), for predictions that are no
            mixture of the models' predictions, with the `inputs` of a Prediction; None: the mixture.
        adapt: (context, models, data) -> Prediction of a client unseen in training. `models` are all N models, or ()
            under "own"; an index refers to them. None, under "shared": `select_models` and `predict`, with an
            empty row. Otherwise, unseen clients require it. Under "peers", clients that were never in a cohort use it,
            too, with a few clients' models; see `stages.latecomers`.
        global_model: (models (J, ...)) -> Prediction: what a client that has never trained predicts with in place of
            what it keeps: the server's model, whole. Its arrays have the shapes of what the client predicts with
            otherwise. None: every client predicts as `predict` says.
        topology: "own": N = K, a model never leaves its client (J = 1); "shared": N models on a server, which all
            clients may receive; "peers": N = K, clients receive each other's models; "push": N = K, each client sends
            one upload to all clients in its index and receives only what others send.
        ledger: What local training reveals about a client's examples; required, since a private run's epsilon depends
            on it.
        sample: (key, state, clients) -> (S,) int32, the ids of the round's cohort, ascending and distinct; None:
            uniform without replacement.
        fine_tuned: Number of epochs, at least 1 -> the algorithm whose `predict` and `adapt` fine-tune for that long
            in a way specific to the method; None: the general fine-tuning, which trains whatever a client predicts
            with.
        exchanges: Number of times that a round repeats exchange and server update on the same download.
        report: Extra entries for the plan, summary and pages.
        via_server: Whether peers' models are stored on a server, so that uploading a client's own model is traffic.
        averages: Whether the server averages updates, which are uploaded with their weights. Another aggregator can
            then replace the mean.
        changes: Names of `Upload.sums` that a server adds up over rounds: changes of what clients keep.
        sends: What uploads hold, besides the weighted updates of `averages`: "updates", of which compression may leave
            parts out; "sums" of models or features; "models" that replace earlier ones; "products" that travel as
            factors.
        traffic: Traffic counted by the engine -> traffic actually sent (compression); None: as counted.
        stale: Whether the N models of a server are its last ones, newest first, so that an index is a number of steps
            late, which a clock can determine.
        any_age: With `stale`, whether updates count however late they are. On a clock, the N models are then those that
            someone trains from, and the server begins with one; it puts a new model first and drops the last.
        engine: What stages and runs add; methods leave it as it is.

    Examples:
        A method whose clients neither train nor send anything:

        >>> import jax.numpy as jnp
        >>> from pfljax.author import Algorithm, ClientOutput, ClientReport, Ledger, Upload
        >>> def client_update(context, models, row, data):
        ...     return ClientOutput(row, Upload(), ClientReport(loss=jnp.zeros(())))
        >>> def server_update(key, state, aggregate):
        ...     return state, {}
        >>> algorithm = Algorithm(
        ...     client_update=client_update,
        ...     server_update=server_update,
        ...     topology="own",
        ...     ledger=Ledger(gradients=0),
        ... )
        >>> algorithm.report.scored
        "each client's own model"
    """

    client_update: Callable[[ClientContext, Params, PyTree, ClientData], ClientOutput]
    server_update: Callable[[Key, State, Aggregate], tuple[State, Metrics]]
    topology: Topology
    ledger: Ledger
    start: Callable[[Key, ClientData], Start] = lambda key, clients: Start()
    first_row: Callable[[Key, Array, Start], First] = lambda key, client, start: First()
    download: Callable[[ClientContext, PyTree, Cohort], Array] | None = None
    select_models: Callable[[ClientContext, PyTree, Array], Mixture] | None = None
    predict: Callable[[ClientContext, Params, PyTree, ClientData], Prediction] | None = None
    apply: Callable[[Params, PyTree, Array], Array] | None = None
    adapt: Callable[[ClientContext, Params, ClientData], Prediction] | None = None
    global_model: Callable[[Params], Prediction] | None = None
    sample: Callable[[Key, State, ClientData], Array] | None = None
    fine_tuned: Callable[[int], Algorithm] | None = None
    exchanges: int = 1
    report: MethodReport = MethodReport()
    via_server: bool = False
    averages: bool = False
    changes: tuple[str, ...] = ()
    sends: Literal["updates", "sums", "models", "products"] = "updates"
    traffic: Callable[[Traffic], Traffic] | None = None
    stale: bool = False
    any_age: bool = False
    engine: EngineFields = NOTHING_ADDED

    def __post_init__(self) -> None:
        if self.topology not in SCORED:
            raise ArgumentError("topology", f"accepted: {', '.join(SCORED)}", self.topology)
        object.__setattr__(self, "topology", Topology(self.topology))
        if self.download is None and self.topology.between_clients:
            text = f"required with topology={str(self.topology)!r}"
            raise ArgumentError("download", f"{text}; it says who receives whose model")
        if not isinstance(self.averages, bool):
            text = "accepted: True or False, whether uploads hold weight x (theta_k - theta)"
            raise ArgumentError("averages", text, type(self.averages).__name__)
        if not isinstance(self.ledger, Ledger):
            text = "accepted: a Ledger, which says how many gradients are computed per mini-batch"
            raise ArgumentError("ledger", text, self.ledger)
        if not self.report.scored:
            # A client that changes the server's models before it predicts has its own.
            is_changed = self.topology.on_server and self.predict is not None
            topology = Topology.OWN if is_changed else self.topology
            report = dataclasses.replace(self.report, scored=SCORED[topology])
            object.__setattr__(self, "report", report)
