"""Arrays that are read by indexing, such as a client's examples, of which only some are computed at a time."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


class LazyArray(abc.ABC):
    """Rows that are read by indexing: `x[positions]` for an array of positions, or `x[...]` for all of them."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of `x[...]`."""

    @abc.abstractmethod
    def __getitem__(self, index: Any) -> Any:
        """Reads rows."""

    def positions(self, index: Any) -> Array:
        """The positions that an index reads."""
        return jnp.arange(self.shape[0]) if index is Ellipsis else index
