"""Clients whose data change while they train: labels, clients' examples, classes, and who is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Split
from pfljax.data.federation import SPLITS, Federation
from pfljax.data.sources.source import generator
from pfljax.data.variants import with_marked
from pfljax.settings.fields import Seed, checked, hyperparameter, settings

Change = Literal["labels", "exchange", "classes", "arrive", "leave"]
Numbers = Sequence[Annotated[int, hyperparameter(at_least=0)]]


@settings
class Drift:
    """A change of some clients' data after a round, for `Run(drift=...)`.

    The changes:

    - "labels": the classes of the clients' examples are permuted, all by the same permutation.
    - "exchange": the clients take over each other's examples, those of training, validation and testing.
    - "classes": the clients get examples of new classes. Until then they do not have their examples of these.
    - "arrive": the clients come. Until then they have no examples, so that they neither train nor are scored.
    - "leave": the clients leave for good, and have no examples from then on.

    Attributes:
        round: The last round before the change. Its evaluation is the last one on the earlier data.
        change: The change.
        share: Share of the clients that change, at least one. They are drawn uniformly with the run's seed.
        clients: Numbers of the clients that change, in place of a share of them. In an exchange, each takes over the
            examples of the next one, and the last one those of the first.
        labels: For "labels", the new class of each class 0 to C - 1; empty: drawn, so that every class becomes another.
            For "classes", the classes that are new; empty: half of the classes that a client has, drawn for each.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.data.Drift(round=40, change="labels", share=0.5)
        Drift(round=40, change='labels', share=0.5, clients=(), labels=())
    """

    round: int = hyperparameter(at_least=1)
    change: Change = "labels"
    share: float = hyperparameter(0.25, above=0, at_most=1)
    clients: Numbers = hyperparameter((), distinct=True, empty=True)
    labels: Numbers = hyperparameter(
        (), distinct=True, empty=True, read_with={"change": ("labels", "classes")}
    )

    def __post_init__(self):
        # Equal changes have equal texts, by which runs are identified.
        for name in ("clients", "labels"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.change} after round {self.round}"


Drifts = Annotated[
    Drift | Sequence[Drift],
    hyperparameter(
        empty=True, accepted="a Drift, such as pfljax.data.Drift(round=40), or a list of them"
    ),
]


class _World(NamedTuple):
    """Which examples the clients have for some rounds.

    Attributes:
        source: (K,), number of the client whose examples each client has.
        labels: (K, C), class that each client sees for each class of these examples.
        missing: (K, C), whether examples of a class are not there yet, by the client that has them at first.
        present: (K,), whether the client is there.
    """

    source: np.ndarray
    labels: np.ndarray
    missing: np.ndarray
    present: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Phases:
    """The clients' data over rounds.

    Attributes:
        drifts: The drifts, in the order of their rounds.
        changed: For each drift, the numbers of the clients that it changes.
        starts: The number of rounds before each phase; the first one is 0.
        clients: The clients of each phase. All have the same shapes.
    """

    drifts: tuple[Drift, ...]
    changed: tuple[np.ndarray, ...]
    starts: tuple[int, ...]
    clients: tuple[Federation, ...]

    def number(self, round_number: int) -> int:
        """The number of the phase in which a round is trained and scored; round 0 is that of the initial models."""
        return sum(start < round_number for start in self.starts[1:])

    def last_start(self, round_number: int) -> int:
        """The number of rounds before the phase of a round."""
        return self.starts[self.number(round_number)]

    def map(self, change: Callable[[Federation], Federation]) -> Phases:
        """The same phases of changed clients."""
        return dataclasses.replace(self, clients=tuple(map(change, self.clients)))


@checked()
def drifted(clients: Federation, drift: Drifts, round: int, seed: Seed = 0) -> Federation:
    """Returns the clients as they are in a round of a run with this drift and seed.

    Args:
        clients: The clients that were passed to the run.
        drift: The drift, or several.
        round: The round, from 1 on.
        seed: The run's seed, which draws what changes.

    Raises:
        ArgumentError: if the clients cannot change so.

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=8)
        >>> drift = pfl.data.Drift(round=40, change="leave", clients=[2, 5])
        >>> bool(pfl.data.drifted(clients, drift, round=40).train.size.all())
        True
        >>> pfl.data.drifted(clients, drift, round=41).train.size[[2, 5]].tolist()
        [0, 0]
    """
    phases = make_phases(clients, drift, seed)
    return phases.clients[phases.number(round)]


def make_phases(clients: Federation, drift: Drifts, seed: int) -> Phases:
    """Returns the clients' data over rounds.

    Args:
        clients: The clients with all their examples, those that come later among them.
        drift: The drift, or several.
        seed: Seed that draws what changes.

    Raises:
        ArgumentError: if the clients cannot change so.
    """
    drifts = (drift,) if isinstance(drift, Drift) else tuple(drift)
    drifts = tuple(sorted(drifts, key=lambda one: one.round))
    rngs = [generator(seed, f"drift {number}") for number in range(len(drifts))]
    changed = [_drawn_clients(clients, *pair) for pair in zip(drifts, rngs, strict=True)]

    # What is not there at first.
    num_clients = clients.num_clients
    num_classes = clients.num_classes
    everyone = np.arange(num_clients)
    world = _World(
        source=everyone,
        labels=np.tile(np.arange(num_classes), (num_clients, 1)),
        missing=np.zeros((num_clients, num_classes), bool),
        present=np.ones(num_clients, bool),
    )
    new_classes = []
    for one, ids, rng in zip(drifts, changed, rngs, strict=True):
        is_new = _new_classes(clients, one, ids, rng)
        new_classes.append(is_new)
        world.missing[is_new] = True
        if one.change == "arrive":
            world.present[ids] = False

    # What the changes of each round leave.
    worlds = [world]
    starts = [0]
    for one, ids, rng, is_new in zip(drifts, changed, rngs, new_classes, strict=True):
        world = _after(world, clients, one, ids, rng, is_new)
        if starts[-1] == one.round:
            worlds[-1] = world
        else:
            worlds.append(world)
            starts.append(one.round)
    if not all(world.present.any() for world in worlds):
        raise ArgumentError("drift", "leaves no client; accepted: at least one that is there")
    return Phases(
        drifts,
        tuple(changed),
        tuple(starts),
        tuple(_in_world(clients, world) for world in worlds),
    )


def _drawn_clients(clients: Federation, drift: Drift, rng: np.random.Generator) -> np.ndarray:
    """The clients that change, in the order in which an exchange passes examples on."""
    num_clients = clients.num_clients
    ids = np.asarray(drift.clients, int)
    if not len(ids):
        num_drawn = max(1, round(drift.share * num_clients))
        ids = rng.choice(num_clients, num_drawn, replace=False)
        if drift.change == "exchange" and clients.group is not None:
            return ids[np.argsort(clients.group[ids], kind="stable")]
        return np.sort(ids)
    if ids.max() >= num_clients:
        accepted = f"accepted: 0 to {num_clients - 1}"
        raise ArgumentError("drift.clients", accepted, drift.clients)
    return ids


def _new_classes(
    clients: Federation, drift: Drift, ids: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """(K, C) bool: the classes that the drift brings to each client."""
    is_new = np.zeros((clients.num_clients, clients.num_classes), bool)
    if drift.change not in ("labels", "classes"):
        return is_new
    labels = np.asarray(drift.labels, int)
    if clients.task != "classification" or clients.train.y.ndim > 2:
        text = f"{drift.change!r} changes classes; accepted here: 'exchange', 'arrive' or 'leave'"
        raise ArgumentError("drift.change", text)
    if labels.size and labels.max() >= clients.num_classes:
        accepted = f"accepted: classes 0 to {clients.num_classes - 1}"
        raise ArgumentError("drift.labels", accepted, drift.labels)
    if drift.change == "labels":
        return is_new
    if labels.size:
        is_new[np.ix_(ids, labels)] = True
        return is_new
    counts = clients.class_counts()
    assert counts is not None
    for client in ids:
        classes = np.flatnonzero(counts[client])
        drawn = rng.choice(classes, len(classes) // 2, replace=False) if len(classes) else classes
        is_new[client, drawn] = True
    return is_new


def _after(
    world: _World,
    clients: Federation,
    drift: Drift,
    ids: np.ndarray,
    rng: np.random.Generator,
    is_new: np.ndarray,
) -> _World:
    """Which examples the clients have after a change."""
    if drift.change == "labels":
        permutation = _permutation(drift, clients.num_classes, rng)
        labels = world.labels.copy()
        labels[ids] = permutation[labels[ids]]
        return world._replace(labels=labels)
    if drift.change == "exchange":
        givers = _givers(drift, ids)
        source = world.source.copy()
        labels = world.labels.copy()
        source[ids] = world.source[givers]
        labels[ids] = world.labels[givers]
        return world._replace(source=source, labels=labels)
    if drift.change == "classes":
        return world._replace(missing=world.missing & ~is_new)
    present = world.present.copy()
    present[ids] = drift.change == "arrive"
    return world._replace(present=present)


def _permutation(drift: Drift, num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """(C,), the new class of each class."""
    if not len(drift.labels):
        order = rng.permutation(num_classes)
        permutation = np.empty(num_classes, int)
        permutation[order] = np.roll(order, 1)
        return permutation
    if len(drift.labels) != num_classes:
        accepted = f"accepted: a permutation of the {num_classes} classes"
        raise ArgumentError("drift.labels", accepted, drift.labels)
    return np.asarray(drift.labels, int)


def _givers(drift: Drift, ids: np.ndarray) -> np.ndarray:
    """The client that each one takes over the examples of: of drawn ones, one of another group where possible."""
    if len(ids) < 2:
        text = "accepted: an exchange of at least 2 clients"
        raise ArgumentError("drift.clients", text, tuple(ids.tolist()))
    step = 1 if len(drift.clients) else len(ids) // 2
    return np.roll(ids, -step)


def _in_world(clients: Federation, world: _World) -> Federation:
    """The clients with the examples that they have in some rounds."""
    if clients.recorded_digest is not None:  # placeholders of examples
        return clients
    local = clients.local_rows
    source = world.source[local]
    if clients.local_clients is not None and not np.array_equal(
        source, np.arange(len(world.source))[local]
    ):
        text = "'exchange' moves examples between processes; accepted in one process"
        raise ArgumentError("drift.change", text)
    splits = {name: _split_in_world(clients, getattr(clients, name), world) for name in SPLITS}
    return dataclasses.replace(
        clients,
        **splits,
        group=_groups(clients.group, world),
        target=_groups(clients.target, world),
    )


def _split_in_world(clients: Federation, split: Split, world: _World) -> Split:
    """A split of the clients with the examples that they have in some rounds."""
    local = clients.local_rows
    source = world.source[local]
    rows = source - local.start
    size = np.asarray(split.size)[source]

    def take(leaf: Any) -> Any:
        return leaf[rows]

    taken = Split(tree.map_rows(take, split.x), tree.map_rows(take, split.y), size)
    has_classes = clients.task == "classification" and split.y.ndim == 2
    if has_classes:
        y = np.asarray(taken.y)
        number = np.arange(len(y))[:, None]
        is_example = np.arange(y.shape[1]) < size[:, None]
        is_there = is_example & ~world.missing[source][number, y]
        if not np.array_equal(is_there, is_example):
            taken = with_marked(taken, is_there)

        # Classes as the clients see them; padding has class 0.
        y = np.asarray(taken.y)
        is_example = np.arange(y.shape[1]) < taken.size[:, None]
        labels = world.labels[local][number, y]
        taken = taken._replace(y=np.where(is_example, labels, 0).astype(y.dtype))
    all_sizes = clients.gather_rows(np.asarray(taken.size))
    present_sizes = np.where(world.present, all_sizes, 0)
    return taken._replace(size=present_sizes.astype(np.int32))


def _groups(group: np.ndarray | None, world: _World) -> np.ndarray | None:
    """The clients' true groups: those of their examples, and others where labels are permuted."""
    if group is None:
        return None
    moved = group[world.source]
    is_permuted = (world.labels != np.arange(world.labels.shape[1])).any(axis=1)
    if not is_permuted.any():
        return moved.astype(group.dtype)
    _, number = np.unique(world.labels[is_permuted], axis=0, return_inverse=True)
    moved = moved.copy()
    moved[is_permuted] += (group.max() + 1) * (number.reshape(-1) + 1)
    return moved.astype(group.dtype)
