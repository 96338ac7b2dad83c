"""Arrays that a program takes as an argument and its functions read from context: a network's frozen parameters."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Protocol

from pfljax.contract.types import PyTree

GIVEN: contextvars.ContextVar[Any] = contextvars.ContextVar("frozen", default=None)


class Holder(Protocol):
    """A network with arrays that are not trained."""

    @property
    def held(self) -> PyTree:
        """The arrays."""
        ...

    def on(self, plan: Any) -> PyTree:
        """The arrays on a plan's devices, each once or spread over those that share a model."""
        ...


@contextlib.contextmanager
def given(frozen: PyTree) -> Iterator[None]:
    """Within this context, networks compute with these frozen arrays."""
    token = GIVEN.set(frozen)
    try:
        yield
    finally:
        GIVEN.reset(token)
