"""Traced functions: their equations, evaluated one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

Operation = Callable[..., Any]
# (Equation, the values of its inputs) -> the values of its outputs.
Apply = Callable[[Any, list[Any]], Sequence[Any]]


def interpret(traced: Any, args: Sequence[Any], apply: Apply) -> list[Any]:
    """Evaluates a traced function, a jaxpr with or without constants, with `apply` for each of its equations."""
    # Equations that no output needs are left out: initial values, for instance, need no forward pass.
    jaxpr, _ = partial_eval.dce_jaxpr(getattr(traced, "jaxpr", traced), True, instantiate=True)
    consts = getattr(traced, "consts", ())
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else values[v]

    for eqn in jaxpr.eqns:
        outputs = apply(eqn, [read(v) for v in eqn.invars])
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def operate(eqn: Any, arguments: Sequence[Any], operation: Operation) -> Sequence[Any]:
    """The outputs of an operation in place of an equation's, within the equation's scope."""
    with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
        outputs = operation(*arguments)
    return outputs if eqn.primitive.multiple_results else [outputs]


def bound(eqn: Any, *args: Any, **changed: Any) -> Any:
    """An equation's operation on other arguments, some of its parameters changed."""
    params = eqn.primitive.get_bind_params(eqn.params | changed)
    return eqn.primitive.bind(*args, **params)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those inside them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)
