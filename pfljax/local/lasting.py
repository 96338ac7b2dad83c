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
from typing import Any

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
    return [goes_on for _, goes_on in _leaves(*_state(optimizer, params))]


def kept(marked: list[bool], state: PyTree) -> tuple:
    """What goes on of a state."""
    return tuple(
        leaf for leaf, goes_on in zip(jax.tree.leaves(state), marked, strict=True) if goes_on
    )


def resumed(marked: list[bool], fresh: PyTree, earlier: tuple) -> PyTree:
    """A fresh state with what goes on of an earlier one."""
    leaves, structure = jax.tree.flatten(fresh)
    going_on = iter(earlier)
    found = [
        next(going_on) if goes_on else leaf for leaf, goes_on in zip(leaves, marked, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


def described(optimizer: optax.GradientTransformation, params: Params) -> str:
    """Says what of the optimizer's state goes on over rounds, and what starts anew; "" if it has none."""
    found: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for name, goes_on in _leaves(*_state(optimizer, params)):
        found[goes_on][name] = None
    names = {goes_on: ", ".join(each) for goes_on, each in found.items()}
    texts = [f"over rounds goes on: {names[True]}"] if names[True] else []
    texts += [f"in each round starts anew: {names[False]}"] if names[False] else []
    return "; ".join(texts)


def long_lived(optimizer: optax.GradientTransformation, params: Params) -> list[str]:
    """Types of the states that start anew though training may depend on many steps in a row.

    They are those in `LONG_LIVED`, and states that are not optax's and count steps beside arrays like the parameters.
    """
    return list(dict.fromkeys(_long_lived(*_state(optimizer, params))))


def _state(optimizer: optax.GradientTransformation, params: Params) -> tuple[PyTree, set[type]]:
    """Shapes of the state, as if no parameter were a scalar; and the types of the tree of parameters."""
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf) or (1,), jnp.result_type(leaf)), params
    )
    return jax.eval_shape(optimizer.init, shapes), {optax.MaskedNode, *_containers(params)}


def _containers(params: Params) -> Iterator[type]:
    """The types of a tree's nodes."""
    yield type(params)
    children = jax.tree.leaves(params, is_leaf=lambda each: each is not params)
    for child in children:
        if child is not params and not jax.tree_util.all_leaves([child]):
            yield from _containers(child)


def _opened(state: Any, kinds: set[type]) -> tuple[list[tuple], list[tuple]]:
    """What a state holds itself, as (path, leaf); and all that it holds, as (path, leaf or state, is it a state)."""

    def is_state(each: Any) -> bool:
        return each is not state and isinstance(each, tuple) and type(each) not in kinds

    parts = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_state)
    own = [(path, part) for path, part in parts if not is_state(part)]
    return own, [(path, part, is_state(part)) for path, part in parts]


def _goes_on(state: Any, name: str, own: list[tuple]) -> bool:
    """Whether a field of a state that holds the leaves `own` goes on over rounds."""
    kind = type(state).__name__
    if kind in FIELDS:
        fields = FIELDS[kind]
        return fields is None or name in fields
    return not any(leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.floating) for _, leaf in own)


def _leaves(state: Any, kinds: set[type]) -> Iterator[tuple[str, bool]]:
    """The name of each leaf of a state, and whether it goes on over rounds."""
    own, parts = _opened(state, kinds)
    for path, part, inside in parts:
        if inside:
            yield from _leaves(part, kinds)
        else:
            name = str(getattr(path[0], "name", "state")) if path else "state"
            yield f"{type(state).__name__}.{name}", _goes_on(state, name, own)


def _long_lived(state: Any, kinds: set[type]) -> Iterator[str]:
    own, parts = _opened(state, kinds)
    name = type(state).__name__
    if own and not all(
        _goes_on(state, str(getattr(path[0], "name", "")), own) for path, _ in own if path
    ):
        counts = [
            leaf for _, leaf in own if not leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.integer)
        ]
        foreign = not type(state).__module__.startswith("optax.")
        if name in LONG_LIVED or (foreign and counts):
            yield name
    for _, part, inside in parts:
        if inside:
            yield from _long_lived(part, kinds)
