"""Differentially private local training: per-example clipping, Gaussian noise, and the ledger of what was spent.

DP-SGD of Abadi et al., "Deep learning with differential privacy" (CCS 2016), by jax-privacy (the extra `privacy`). A
client's noise is its own: it is drawn from the client's key.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.core.types import Array, Key, Params


class Privacy(NamedTuple):
    """How gradients are made private.

    Attributes:
        noise_multiplier: sigma: the noise's standard deviation over the clipping norm.
        clip_norm: The largest L2 norm, over all parameters, of an example's gradient; may be infinite without noise.
        delta: The delta for which the ledger states epsilon.
    """

    noise_multiplier: float = 0.0
    clip_norm: float = math.inf
    delta: float = 1e-5

    @property
    def active(self) -> bool:
        """Whether there is anything to do."""
        return self.noise_multiplier > 0 or math.isfinite(self.clip_norm)

    def check(self) -> None:
        """Raises ArgumentError for what cannot be."""
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ArgumentError("noise_multiplier", "accepted: 0 or more", self.noise_multiplier)
        if not self.clip_norm > 0:
            raise ArgumentError("clip_norm", "accepted: above 0, inf for none", self.clip_norm)
        if not 0 < self.delta < 1:
            raise ArgumentError("delta", "accepted: a probability in (0, 1)", self.delta)
        if self.noise_multiplier and not math.isfinite(self.clip_norm):
            raise ArgumentError("noise_multiplier", "noise needs a finite clip_norm, such as 1", self.noise_multiplier)
        if self.active:
            _library("jax_privacy")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ArgumentError("privacy", "needs jax-privacy; accepted after: pip install 'pfljax[privacy]'") from error


def private_mean(
    privacy: Privacy,
    key: Key,
    loss: Callable[..., Array],
    params: Params,
    examples: tuple[Array, ...],
    inside: Array,
) -> Array:
    """The mean of a batch's losses, whose gradient in `params` is clipped example by example and noised.

    Args:
        privacy: Clipping norm C and noise multiplier sigma.
        key: Draws the noise, N(0, (sigma C)^2) on each coordinate of the sum of the clipped gradients.
        loss: (params, x (1, ...), y (1,), keys (1,) if there are any) -> losses (1,).
        params: One model.
        examples: x (B, ...), y (B,), the losses' weights (B,), and keys (B,) or nothing.
        inside: (B,) bool, which of them are examples.

    Returns:
        () the weighted losses' sum over the number of examples.
    """
    library = _library("jax_privacy")

    def of_example(params, x, y, weight, *keys):
        return (loss(params, x, y, *keys) * weight).sum()

    gradient = library.clipped_grad(
        of_example,
        l2_clip_norm=privacy.clip_norm,
        batch_argnums=tuple(range(1, 1 + len(examples))),
        return_values=True,
        nan_safe=False,
    )
    fixed = jax.lax.stop_gradient(params)
    total, aux = gradient(fixed, *examples, is_padding_example=~inside)
    if privacy.noise_multiplier:
        deviation = privacy.noise_multiplier * privacy.clip_norm
        noise = library.noise_addition.gaussian_privatizer(stddev=deviation, prng_key=key)
        total, _ = noise.update(total, noise.init(total))
    count = jnp.maximum(inside.sum(), 1)
    value = jax.lax.stop_gradient(jnp.where(inside, aux.values, 0).sum() / count)
    # A term of value zero whose gradient is the private one: whatever a method adds to the mean loss (a proximal term
    # that reads no data) is differentiated as ever.
    linear = jax.tree.map(lambda p, q, g: jnp.vdot(p - q, g / count), params, fixed, jax.lax.stop_gradient(total))
    return value + sum(jax.tree.leaves(linear))


BY_LOSS = "training losses, by which models, examples or clients are weighed or chosen"  # `Ledger.unaccounted`


def epsilons(privacy: Privacy, num_examples: Array, batch_size: int, steps: np.ndarray, gradients: int = 1):
    """The ledger: each client's epsilon at `privacy.delta` for what local training has told of its examples.

    The accountant takes a mini-batch for a Poisson sample of its expected size, as is usual, though here an epoch goes
    through the shuffled examples. Several gradients of one mini-batch are one release with as much more signal.

    Args:
        privacy: Noise multiplier and delta.
        num_examples: (K,) n_k.
        batch_size: B.
        steps: (K,) mini-batches that each client has used in all.
        gradients: How many gradients were taken of each; 0 where examples themselves are sent.

    Returns:
        (K,) epsilon: 0 for a client that has not trained, infinite without noise and where examples are sent.
    """
    if not privacy.noise_multiplier or not gradients:
        return np.where(steps > 0, np.inf, 0.0)
    accounting = _library("jax_privacy.accounting")
    accountant = accounting.DpsgdTrainingAccountant(accounting.RdpAccountantConfig())
    pairs, inverse = np.unique(np.stack([num_examples, steps]), axis=1, return_inverse=True)

    def spent(size: int, count: int) -> float:
        if not size or not count:
            return 0.0
        parameters = accounting.DpParams(
            noise_multipliers=privacy.noise_multiplier / math.sqrt(gradients),
            num_samples=size,
            delta=privacy.delta,
            batch_size=min(batch_size, size),
        )
        return float(accountant.compute_epsilon(count, parameters))

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the accountant warns of each order that it leaves out, as it is meant to
    try:
        return np.array([spent(int(size), int(count)) for size, count in pairs.T])[inverse.reshape(-1)]
    finally:
        logger.setLevel(level)
