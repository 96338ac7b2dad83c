"""The shared types and the symbols of the field.

Symbols, the same everywhere: K clients, N models in a stack, J models that a client holds or downloads,
M neighbors or mixture components, C classes, B batch, n_k examples of client k, R rounds, S clients in a
round's cohort. "Stacked" means a leading axis K, N or S on every leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
Key = jax.Array
Params = Any
PyTree = Any
Metrics = dict[str, Array]
Topology = Literal["own", "shared", "peers"]
Task = Literal["classification", "regression"]


class Split(NamedTuple):
    """One part (train, validation or test) of a client's data, or of all clients' stacked.

    Rows at and beyond `size` are padding (zeros) and must not influence any result.
    """

    x: Array  # (n_max, *features) float32, or (n_max, T) uint8 tokens of sequences; stacked (K, n_max, *features)
    # (n_max,) int32 classes, or float32 targets of a regression; (n_max, T) uint8 for sequences, 255 where there is
    # nothing to predict; stacked (K, n_max, ...).
    y: Array
    size: Array  # () int32: how many examples are real; stacked (K,)


class ClientData(NamedTuple):
    """What one client knows, and all that a method ever sees of it: there is no test data in it."""

    train: Split
    validation: Split


@dataclasses.dataclass(frozen=True)
class Federation:
    """All clients' data on the host, and what is known about it.

    Attributes:
        train: Stacked training splits, K clients.
        validation: Stacked validation splits (n_max may be 0).
        test: Stacked test splits; only evaluation reads them.
        distribution: (K,) int32, the true distribution of each client: for colors and reports, never for training.
        task: "classification" or "regression".
        num_classes: Classes C; 1 for a regression.
        name: Data set and partition, for titles.
        target: (K,) int32, the distribution of each client's validation and test data; None: as `distribution`.
        own: Of which clients x and y are here, on this process; None: of all. Everything else is of all clients.
        index_digest: A fingerprint of who has which examples, known without their content.
    """

    train: Split
    validation: Split
    test: Split
    distribution: np.ndarray
    task: Task
    num_classes: int
    name: str
    target: np.ndarray | None = None
    own: slice | None = None
    index_digest: str = ""

    @property
    def num_clients(self) -> int:
        return int(self.train.size.shape[0])

    @property
    def shards(self) -> ClientData:
        """What methods may see: everything but the test data."""
        return ClientData(self.train, self.validation)


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
    round: Array = np.int32(0)  # () int32: how many rounds have been played; the engine counts


class ClientContext(NamedTuple):
    """Which piece of work this is.

    Attributes:
        key: The client's key for this round.
        round: () int32, the number of the round, from 0.
        step: () int32, which of the round's exchanges (0 unless `Algorithm.exchanges` is more than 1).
        index: (J,) int32, which models the client has received.
        server: State.server, which everyone may read; not counted as traffic, since it is small.
    """

    key: Key
    round: Array
    step: Array
    index: Array
    server: PyTree = ()


class ClientOutput(NamedTuple):
    """What one client makes of a round."""

    client: PyTree  # the client's next row
    # Leaves (J, ...): a contribution per received model, summed over clients at its owner, or leaves (J', ...): only
    # for the first J' of them; under "own" the next model; under `push` leaves (...), one model for all; () where
    # nothing comes back.
    upload: PyTree
    report: Metrics  # what the server sees of this client; "loss" () is required
    sent: Array | None = None  # (J,) or (J',) bool: which contributions are made; None: all
    shares: Array | None = None  # (J,) under `push`: the weight with which each receiver counts the upload


class Aggregate(NamedTuple):
    """What came back to the owners and the server in one exchange."""

    upload: PyTree  # leaves (N, ...): sums of the contributions
    count: Array  # (N,) int32: how many contributions each model received
    sent: Array  # (S, J) bool: which contributions were made
    report: Metrics  # leaves (S, ...)


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
    """

    models: Params
    index: Array
    weights: Array
    topology: Topology = dataclasses.field(metadata={"static": True})

    @classmethod
    def own(cls, models: Params) -> Predictor:
        """Client k predicts with model k of a stack of K."""
        num = jax.tree.leaves(models)[0].shape[0]
        return cls(models, jnp.arange(num, dtype=jnp.int32)[:, None], jnp.ones((num, 1)), "own")

    @classmethod
    def one(cls, models: Params, num: int) -> Predictor:
        """All `num` clients predict with the one model of a stack (1, ...)."""
        return cls(models, jnp.zeros((num, 1), jnp.int32), jnp.ones((num, 1)), "shared")


class Algorithm(NamedTuple):
    """A method: pure functions that the engine composes into a round (download, exchange, update).

    Attributes:
        init: (key, clients) -> State, from the stacked ClientData of all K clients.
        download: (key, state, cohort) -> (S, J) int32: which models each client of the cohort receives; column 0 is
            the client's own where it has one. Client ids where N = K, else indices into the N models.
        work: (turn, models, row, shard) -> ClientOutput, for one client: its J received models, its row and its data.
            Arrays of the shard are read by indexing (`x[...]` is all of it).
        update: (key, state, returned) -> (State, Metrics): owners and server take what came back.
        predictor: (key, state, clients) -> Predictor; may train locally, never changes the state.
        adapt: (key, state, clients) -> Predictor for clients that were not there in training.
        topology: "own": N = K, a model never leaves its client (J = 1); "shared": N models on a server,
            everyone may receive them; "peers": N = K, clients receive each other's models.
        scored: Which model the evaluation scores, in words.
        exchanges: How often a round repeats exchange and update on the same download.
        push: Whether clients only send: work then receives its own model alone, and uploads one to all of the index.
        uploads_own: Whether peers' models lie on a server, so that a client's upload of its own is traffic.
        facts: What the plan and the summary tell of it beside its knobs, by name.
        gradients: How many gradients a client takes of one mini-batch, for the privacy ledger, of models that stay
            with it too; 0 if its examples themselves are sent, so that there is no bound.
        passes: How often the solver's steps are taken in a round, on mini-batches of their own.
        unaccounted: What else of a client's data others can learn something from, in words: the ledger omits it.
        tune: (key, predictor, clients) -> Predictor: what is done to a predictor before it is evaluated; None: nothing.
        collaboration: The topology of what it tells, and state -> arrays for collaboration.npz: "index" and "weights"
            (K, J) in place of the predictor's where a client uses others' models otherwise than in its predictions;
            "affinity" (K, K); and others of the method's own.
        by_rows: Whether predictor and collaboration of some clients follow from these clients' rows and the server's
            part of the state, so that they can be asked for block by block; models that the predictor indexes, if it
            is of peers, are the state's own.
    """

    init: Callable[[Key, ClientData], State]
    download: Callable[[Key, State, Cohort], Array]
    work: Callable[[ClientContext, Params, PyTree, ClientData], ClientOutput]
    update: Callable[[Key, State, Aggregate], tuple[State, Metrics]]
    predictor: Callable[[Key, State, ClientData], Predictor]
    adapt: Callable[[Key, State, ClientData], Predictor]
    topology: Topology
    scored: str
    exchanges: int = 1
    push: bool = False
    uploads_own: bool = False
    facts: tuple[tuple[str, str | float], ...] = ()
    gradients: int = 1
    passes: int = 1
    unaccounted: str = ""
    tune: Callable[[Key, Predictor, ClientData], Predictor] | None = None
    collaboration: tuple[Topology, Callable[[State], dict[str, Array]]] | None = None
    by_rows: bool = True


class UsageError(ValueError):
    """A user's mistake, in one line that names the flag or file and what is accepted (exit code 2)."""


class RunError(RuntimeError):
    """A run that could not go on, in one line (exit code 1)."""
