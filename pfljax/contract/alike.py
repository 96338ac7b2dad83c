"""Whether two values are surely the same: settings, functions with what they hold, networks and arrays."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

PLAIN = (int, float, complex, str, bytes, bool, type(None))
DERIVED = types.MappingProxyType({"derived": True})
Pairs = frozenset[tuple[int, int]]


def alike(a: Any, b: Any, within: Pairs = frozenset()) -> bool:
    """Whether two values surely compute the same: equal in all that they hold, at any depth.

    Functions are compared by their code, defaults and closures, and by the globals that they read. It is False if it is
    not known.

    Args:
        a: A value.
        b: Another one.
        within: Ids of the pairs that are being compared, for values that hold themselves.
    """
    pair = (id(a), id(b))
    if a is b or pair in within:
        return True
    if isinstance(a, PLAIN) and isinstance(b, PLAIN):
        return same_plain(a, b)
    if is_array(a) and is_array(b):
        return same_arrays(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, core.Jaxpr):
        return str(a) == str(b)

    # Values that hold others.
    alike_inside = functools.partial(alike, within=within | {pair})
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(alike_inside(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(alike_inside, a, b))
    if isinstance(a, types.FunctionType | types.MethodType | functools.partial | types.CodeType):
        return alike_inside(held_by_function(a), held_by_function(b))
    if isinstance(a, type | types.ModuleType | types.BuiltinFunctionType):
        return bool(a == b)
    attributes_a = attributes(a)
    attributes_b = attributes(b)
    if attributes_a or attributes_b:
        return alike_inside(attributes_a, attributes_b)
    return equal(a, b)


def same_plain(a: Any, b: Any) -> bool:
    """Whether two plain values are equal; NaN equals NaN, and True does not equal 1."""
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    both_nan = a != a and b != b
    return a == b or both_nan


def is_array(value: Any) -> bool:
    """Whether a value is an array or a NumPy scalar."""
    return isinstance(value, np.ndarray | np.generic | jax.Array)


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two arrays have one dtype, shape and content."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a = jax.random.key_data(a)
        b = jax.random.key_data(b)
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def held_by_function(function: Any) -> tuple:
    """What a function computes with."""
    if isinstance(function, types.CodeType):
        return function.co_code, function.co_names, function.co_consts
    if isinstance(function, types.MethodType):
        return function.__func__, function.__self__
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    empty = types.CellType()
    cells = function.__closure__ or ()
    closure = [cell.cell_contents for cell in cells if cell != empty]
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    used = {name: function.__globals__[name] for name in names}
    return function.__code__, function.__defaults__, function.__kwdefaults__, closure, used


def attributes(value: Any) -> dict[str, Any]:
    """What an object holds, by name: its fields if it is a dataclass, otherwise all that it has."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if not derived(field)]
        return {name: getattr(value, name) for name in names}
    slots = []
    for base in type(value).__mro__:
        slots.extend(vars(base).get("__slots__", ()))
    names = [name for name in slots if hasattr(value, name) and not name.startswith("__")]
    in_slots = {name: getattr(value, name) for name in names}
    return in_slots | dict(getattr(value, "__dict__", {}))


def derived(field: dataclasses.Field) -> bool:
    """Whether a dataclass declares that a field follows from its others: its metadata are `DERIVED`."""
    return "derived" in field.metadata


def equal(a: Any, b: Any) -> bool:
    """a == b; False if that is not known."""
    try:
        return bool(a == b)
    except Exception:  # whatever the values' own comparison raises
        return False
