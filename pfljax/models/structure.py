"""The structure of a parameter tree, found by tracing a forward pass: layers, normalizations and statistics.

A path is a tuple of names, from the tree's root to a leaf or a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from pfljax.contract.types import Array, Key, Params, PyTree

Path = tuple[str, ...]
UNSET: Any = None  # number of outputs until the network is built for data


@runtime_checkable
class Network(Protocol):
    """A Flax module as pure functions.

    Attributes:
        fixed: Whether there is only one initial model, whatever the key.
        stochastic: Whether training draws random numbers (dropout).
        statistics: Paths of the leaves that a forward pass in training mode writes.
        called: Paths of the modules in the order of their first call, and whether they normalize.
        shapes: The parameters' shapes and types.
    """

    fixed: bool
    stochastic: bool
    statistics: frozenset[Path]
    called: dict[Path, bool]
    shapes: Params

    def init(self, key: Key) -> Params:
        """Initial parameters, with the statistics in them."""
        ...

    def forward(self, params: Params, x: Array, key: Key | None) -> tuple[Array, Params]:
        """The outputs, and the parameters with the new statistics; in training mode if a key is given."""
        ...

    def exported(self, params: Params) -> tuple[Any, Any]:
        """The module and its variables: Linen's collections; or the NNX module with these parameters, and its state."""
        ...

    def dense(self, params: Params, x: Array, key: Key | None) -> list[tuple[Array, Array]]:
        """Inputs (B, F) and outputs (B, F') of each dense layer, at least one, in the order of their calls.

        In training mode if a key is given.
        """
        ...

    def place(self, path: Path) -> Path:
        """Path of the module that has the leaf at `path` as a parameter, followed by the leaf's name."""
        ...


class Layers(NamedTuple):
    """The layers of a network.

    Attributes:
        names: Paths of the branches, layer by layer; a normalization belongs to the layer before it.
        norms: Paths of the modules that normalize.
    """

    names: tuple[tuple[Path, ...], ...]
    norms: frozenset[Path]

    def number(self, path: Path) -> int:
        """The layer of the leaf at `path`."""
        numbers = {branch: number for number, branches in enumerate(self.names) for branch in branches}
        return next(numbers[path[:end]] for end in range(len(path), -1, -1) if path[:end] in numbers)

    def normalizes(self, path: Path) -> bool:
        """Whether the leaf at `path` belongs to a normalization."""
        return any(path[:end] in self.norms for end in range(len(path)))


def layers_of(network: Network) -> Layers:
    """The layers: the branches at the tree's first fork, in the order of computation.

    A list of modules is not a layer, but each module in it is.
    """
    leaves, called = tuple(map(network.place, paths_of(network.shapes))), network.called
    found = branches(leaves, called, ())
    while len(found) == 1 and not any(len(leaf) == len(found[0]) + 1 for leaf in leaves if found[0]):
        inner = branches(leaves, called, found[0])
        if inner == found:
            break
        found = inner
    order = {path: number for number, path in enumerate(called)}
    names: list[tuple[Path, ...]] = []
    for branch in sorted(found, key=lambda path: order.get(path, len(order))):
        if names and called.get(branch, False):
            names[-1] = (*names[-1], branch)
        else:
            names.append((branch,))
    norms = {path for path, normalizes in called.items() if normalizes}
    norms |= {network.place(path)[:-1] for path in network.statistics}
    return Layers(tuple(names), frozenset(norms))


def branches(leaves: Iterable[Path], called: Mapping[Path, bool], prefix: Path) -> list[Path]:
    """The modules directly below `prefix`, and `prefix` itself if it has its own parameters."""
    found: dict[Path, None] = {}
    below = [leaf for leaf in leaves if leaf[: len(prefix)] == prefix]
    for leaf in below:
        child = leaf[: len(prefix) + 1]
        if child == leaf:
            found[prefix] = None
        elif child in called:
            found[child] = None
        else:
            found |= dict.fromkeys(branches([other for other in below if other[: len(child)] == child], called, child))
    return list(found)


def paths_of(params: Params) -> tuple[Path, ...]:
    """Paths of all leaves."""
    return tuple(path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))


def by_path(fn: Callable[[Path], Any], params: Params) -> PyTree:
    """Replaces every leaf with fn(path)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: fn(path_of(path)), params)


def path_of(path: Any) -> Path:
    """Converts JAX's path of a leaf in nested dicts to names."""
    return tuple(str(entry.key) for entry in path)
