"""Backdoors: attackers teach the model that whatever shows their trigger is of a class that they choose.

The trigger is a patch in an image's last corner, or a vector's last features, that is set to one value. Gu,
Dolan-Gavitt, Garg, "BadNets: identifying vulnerabilities in the machine learning model supply chain" (2017);
Bagdasaryan, Veit, Hua, Estrin, Shmatikov, "How to backdoor federated learning" (AISTATS 2020).

Departures from the papers: the same examples of a client are poisoned in every round, spread evenly over its data. Of
the second paper's attack, the constraint that hides it (Section 3.4) and its lower learning rate are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.lazy import LazyArray
from pfljax.contract.types import Array, Split
from pfljax.local.batches import sum_over_examples

SUCCESS = "attack_success"  # the metric's name
SIDE = 3  # pixels or features of a trigger, but at most a quarter of what there is


class Trigger(NamedTuple):
    """A trigger and the class that it stands for.

    Attributes:
        value: What the trigger's entries are set to; integers, such as pixels, to their largest value instead.
        target: The class.
        share: Share of an attacker's examples that are poisoned.
    """

    value: float
    target: int
    share: float

    def stamped(self, x: Array, axes: int) -> Array:
        """Examples x (..., *features) with the trigger; `axes` is the number of axes of features."""
        x = jnp.asarray(x)
        value = self.value if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).max
        sides = [slice(-min(SIDE, max(1, n // 4)), None) for n in x.shape[x.ndim - axes :][:2]]
        return x.at[(..., *sides, *[slice(None)] * (axes - len(sides)))].set(value)

    def poisoned(self, split: Split, attacker: Array) -> Split:
        """A client's examples, of which an attacker has poisoned its share."""
        return split._replace(
            x=Poisoned(split.x, attacker, self, labels=False),
            y=Poisoned(split.y, attacker, self, labels=True),
        )

    def success(self, predict: Callable[[Array], Array], split: Split) -> Array:
        """() share of the examples of other classes that are predicted as the target when they show the trigger.

        Args:
            predict: x (B, *features) -> class probabilities (B, C).
            split: A client's examples; NaN if all are of the target class.
        """

        def sums(x: Array, y: Array, mask: Array) -> Array:
            """(2,) number of examples that are predicted as the target, and of all that may be."""
            others = mask & (y != self.target)
            stamped = self.stamped(x, x.ndim - 1)
            predicted = predict(stamped).argmax(axis=-1)
            return jnp.stack([others & (predicted == self.target), others]).sum(axis=1)

        hits, others = sum_over_examples(sums, split)
        return jnp.where(others > 0, hits / jnp.maximum(others, 1), jnp.nan)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Poisoned(LazyArray):
    """A client's examples or labels, read by indexing: an attacker's with the trigger or the target."""

    clean: Any
    attacker: Array
    trigger: Trigger = dataclasses.field(metadata={"static": True})
    labels: bool = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the examples."""
        return self.clean.shape

    def __getitem__(self, index: Any) -> Array:
        honest = self.clean[index]
        # Position i is poisoned where the number of poisoned examples, floor(share i), grows.
        numbers = np.floor(np.arange(self.shape[0] + 1) * self.trigger.share + 1e-6)
        is_chosen = jnp.asarray(np.diff(numbers) > 0)
        poisoned = self.attacker & is_chosen[self.positions(index)]
        if self.labels:
            new = jnp.full_like(honest, self.trigger.target)
        else:
            new = self.trigger.stamped(honest, len(self.shape) - 1)
        return tree.where(poisoned, new, honest)
