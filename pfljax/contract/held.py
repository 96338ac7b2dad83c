"""Arrays that a program takes as an argument and its functions read from context: a network's frozen parameters."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pfljax.contract.types import PyTree

# The network's own arrays, and those that stand for them in the program that is traced.
GIVEN: contextvars.ContextVar[tuple[Any, Any]] = contextvars.ContextVar(
    "frozen", default=(None, None)
)


class Holder(Protocol):
    """A network with arrays that are not trained.

    Attributes:
        own: The arrays, on the host; () if there are none.
    """

    own: PyTree

    def on(self, plan: Any) -> PyTree:
        """The arrays on a plan's devices, once on each or spread over those that share a model."""
        ...


@contextlib.contextmanager
def given(network: Holder, frozen: PyTree) -> Iterator[None]:
    """Within this context, the network computes with these frozen arrays."""
    token = GIVEN.set((network.own, frozen))
    try:
        yield
    finally:
        GIVEN.reset(token)


def held_by(network: Holder) -> PyTree:
    """The network's frozen arrays: those of the program that is being traced, or else its own."""
    own, traced = GIVEN.get()
    return traced if own is network.own else network.own


def taking(network: Holder, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a further argument, `frozen`: the network's frozen arrays."""

    def run(*args: Any, frozen: PyTree) -> Any:
        with given(network, frozen):
            return fn(*args)

    return run
