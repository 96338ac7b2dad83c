"""Arrays that a program takes as an argument and its functions read from context: a network's frozen parameters."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pfljax.contract.types import PyTree

# A network's arrays on the host, and those that stand for them in the program that is traced.
FROZEN: contextvars.ContextVar[tuple[Any, Any]] = contextvars.ContextVar(
    "frozen", default=(None, None)
)


class Holder(Protocol):
    """A network with arrays that are not trained.

    Attributes:
        frozen_on_host: The arrays, on the host; () if there are none.
    """

    frozen_on_host: PyTree

    def on(self, plan: Any) -> PyTree:
        """The arrays on a plan's devices, once on each or spread over those that share a model."""
        ...


@contextlib.contextmanager
def use_frozen(network: Holder, frozen: PyTree) -> Iterator[None]:
    """Within this context, the network computes with these frozen arrays."""
    token = FROZEN.set((network.frozen_on_host, frozen))
    try:
        yield
    finally:
        FROZEN.reset(token)


def current_frozen(network: Holder) -> PyTree:
    """The network's frozen arrays: those of the program that is being traced, or else those on the host."""
    on_host, traced = FROZEN.get()
    if on_host is network.frozen_on_host:
        return traced
    return network.frozen_on_host


def taking(network: Holder, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a further argument, `frozen`: the network's frozen arrays."""

    def run(*args: Any, frozen: PyTree) -> Any:
        with use_frozen(network, frozen):
            return fn(*args)

    return run
