"""What goes on over rounds of an optimizer's state where clients train a shared model.

A shared model is another one in each round, so what the optimizer has seen of the old one starts anew: moments, and
with them the counts that correct their bias. A count of steps that stands for itself goes on: the learning rate of a
schedule then follows the number of steps that the client has taken in the run. Which is which follows from optax's
convention that a transformation's state is one tuple: where all that it holds is numbers, counts and random keys, all
of it goes on, and where it holds arrays like the parameters, none of it does. Exceptions:

  - `optax.MultiSteps` and `optax.apply_every` go on with the gradients that they have accumulated.
  - `optax.inject_hyperparams` goes on with its hyperparameters, whatever their shape.
  - `optax.contrib.schedule_free`: its number of steps goes on; its average of iterates starts anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.contract.types import Params, PyTree

# Fields that go on, of states by the name of their type; None: all. What is inside of them follows the rules above.
FIELDS: dict[str, set[str] | None] = {
    "MultiStepsState": None,
    "ApplyEvery": None,
    "InjectHyperparamsState": None,
    "InjectStatefulHyperparamsState": None,
    "ScheduleFreeState": {"step_count"},
}
# States of optax of which more than a bias depends on earlier steps: schedules, and learning rates that are estimated.
LONG_LIVED = {
    "COCOBState",
    "DAdaptAdamWState",
    "DoGState",
    "DoWGState",
    "MechanicState",
    "ProdigyState",
    "SAMState",
    "ScaleByAdemamixState",
    "ScaleByDistanceOverGradientsState",
    "ScaleByRpropState",
    "ScaleBySimplifiedAdEMAMixState",
}


def marks(optimizer: optax.GradientTransformation, params: Params) -> list[bool]:
    """Which leaves of the optimizer's state for these parameters go on over rounds, in the order of its leaves."""
    state, lasting_types = _state(optimizer, params)
    return [goes_on for _, goes_on in _leaves(state, lasting_types)]


def select_lasting(marked: list[bool], state: PyTree) -> tuple:
    """What goes on of a state."""
    leaves = jax.tree.leaves(state)
    return tuple(leaf for leaf, goes_on in zip(leaves, marked, strict=True) if goes_on)


def resumed(marked: list[bool], fresh: PyTree, earlier: tuple) -> PyTree:
    """A fresh state with what goes on of an earlier one."""
    fresh_leaves, structure = jax.tree.flatten(fresh)
    earlier_leaves = iter(earlier)
    leaves = []
    for leaf, goes_on in zip(fresh_leaves, marked, strict=True):
        leaves.append(next(earlier_leaves) if goes_on else leaf)
    return jax.tree.unflatten(structure, leaves)


def described(optimizer: optax.GradientTransformation, params: Params) -> str:
    """Says what of the optimizer's state goes on over rounds, and what starts anew; "" if it has none."""
    state, lasting_types = _state(optimizer, params)
    going_on: list[str] = []
    starting_anew: list[str] = []
    for name, goes_on in _leaves(state, lasting_types):
        names = going_on if goes_on else starting_anew
        if name not in names:
            names.append(name)

    texts = []
    if going_on:
        texts.append(f"over rounds goes on: {', '.join(going_on)}")
    if starting_anew:
        texts.append(f"in each round starts anew: {', '.join(starting_anew)}")
    return "; ".join(texts)


def long_lived(optimizer: optax.GradientTransformation, params: Params) -> list[str]:
    """Types of the states that start anew though training may depend on many steps in a row.

    They are those in `LONG_LIVED`, and states that are not optax's and count steps beside arrays like the parameters.
    """
    state, lasting_types = _state(optimizer, params)
    names = dict.fromkeys(_long_lived(state, lasting_types))
    return list(names)


def _state(optimizer: optax.GradientTransformation, params: Params) -> tuple[PyTree, set[type]]:
    """Shapes of the state, as if no parameter were a scalar; and the types of the tree of parameters."""

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf) or (1,), jnp.result_type(leaf))

    shapes = jax.tree.map(shape_of, params)
    state = jax.eval_shape(optimizer.init, shapes)
    return state, {optax.MaskedNode, *_containers(params)}


def _containers(params: Params) -> Iterator[type]:
    """The types of a tree's nodes."""
    yield type(params)
    children = jax.tree.leaves(params, is_leaf=lambda node: node is not params)
    for child in children:
        if child is not params and not jax.tree_util.all_leaves([child]):
            yield from _containers(child)


class _Entry(NamedTuple):
    """What a state holds: a leaf, or a state inside of it.

    Attributes:
        name: Name of the state's field; "" where it has none.
        value: The leaf or state.
        is_state: Whether it is a state.
    """

    name: str
    value: Any
    is_state: bool


def _entries(state: Any, lasting_types: set[type]) -> list[_Entry]:
    """All that a state holds, in order."""

    def is_state(node: Any) -> bool:
        return node is not state and isinstance(node, tuple) and type(node) not in lasting_types

    entries = []
    for path, value in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_state):
        name = str(getattr(path[0], "name", "")) if path else ""
        entries.append(_Entry(name, value, is_state(value)))
    return entries


def _goes_on(state: Any, name: str, leaves: list[Any]) -> bool:
    """Whether a field of a state that holds these leaves goes on over rounds."""
    kind = type(state).__name__
    if kind in FIELDS:
        fields = FIELDS[kind]
        return fields is None or name in fields
    return not any(leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)


def _leaves(state: Any, lasting_types: set[type]) -> Iterator[tuple[str, bool]]:
    """The name of each leaf of a state, and whether it goes on over rounds."""
    entries = _entries(state, lasting_types)
    leaves = [entry.value for entry in entries if not entry.is_state]
    for entry in entries:
        if entry.is_state:
            yield from _leaves(entry.value, lasting_types)
        else:
            name = entry.name or "state"
            yield f"{type(state).__name__}.{name}", _goes_on(state, name, leaves)


def _long_lived(state: Any, lasting_types: set[type]) -> Iterator[str]:
    """Types of the states inside of a state that are `long_lived`."""
    entries = _entries(state, lasting_types)
    leaves = [entry.value for entry in entries if not entry.is_state]
    fields = [entry.name for entry in entries if not entry.is_state]
    if not all(_goes_on(state, name, leaves) for name in fields):
        counts = [
            leaf for leaf in leaves if not leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.integer)
        ]
        foreign = not type(state).__module__.startswith("optax.")
        if type(state).__name__ in LONG_LIVED or (foreign and counts):
            yield type(state).__name__
    for entry in entries:
        if entry.is_state:
            yield from _long_lived(entry.value, lasting_types)
