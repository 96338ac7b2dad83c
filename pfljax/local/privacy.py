"""Differentially private local training: per-example clipping, Gaussian noise, and the privacy ledger.

DP-SGD of Abadi et al., "Deep learning with differential privacy" (CCS 2016), with jax-privacy (the extra `privacy`).
Each client draws its own noise from its key, which follows from the run's `secret_key`.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import optional, processes
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Key, Params, PyTree
from pfljax.settings.fields import hyperparameter, settings


@settings
class Privacy:
    """Parameters of private gradients.

    Attributes:
        noise_multiplier: sigma, the noise's standard deviation divided by the clipping norm; needs jax-privacy, of
            pip install 'pfljax[privacy]'.
        clip_norm: Per-example gradient clipping norm (L2, over all parameters); inf disables clipping and needs zero
            noise.
        delta: The delta at which the ledger reports epsilon.
        noise_seed: For tests only: a seed for the noise. Whoever knows it can subtract the noise from a model. None:
            a secret that is drawn whenever training starts and never written.

    Examples:
        >>> import pfljax as pfl
        >>> privacy = pfl.Privacy(noise_multiplier=1.1, clip_norm=1.0)
        >>> privacy.active
        True
        >>> local = pfl.LocalTraining(privacy=privacy)
    """

    noise_multiplier: float = hyperparameter(0.0, at_least=0)
    clip_norm: float = hyperparameter(math.inf, above=0, infinite=True)
    delta: float = hyperparameter(1e-5, above=0, below=1, read_with={"noise_multiplier": ()})
    noise_seed: int | None = hyperparameter(None, at_least=0, read_with={"noise_multiplier": ()})

    def __post_init__(self):
        if self.noise_multiplier and not math.isfinite(self.clip_norm):
            text = "needs a finite clip_norm, such as 1"
            raise ArgumentError("noise_multiplier", text, self.noise_multiplier)
        if self.active:
            optional.load("jax_privacy", "privacy")

    @property
    def active(self) -> bool:
        """Whether gradients are clipped or noised."""
        return self.noise_multiplier > 0 or math.isfinite(self.clip_norm)


def secret_key(seeds: Sequence[int | None], key: Key) -> Key:
    """Returns the key from which a run draws everything but its initial state and its cohorts.

    Without noise it is `key`, which follows from the run's seed. That seed is public: noise drawn from it could be
    subtracted. So it is a new secret with noise, the same on all processes: resumed runs never repeat earlier noise.

    Args:
        seeds: The `noise_seed` of each mechanism with noise; the secret is new if one of them is None.
        key: Key that follows from the run's seed.
    """
    known = [seed for seed in seeds if seed is not None]
    if len(known) == len(seeds):
        return functools.reduce(jax.random.fold_in, known, key)
    public = jax.random.key_data(key)
    secret = np.frombuffer(secrets.token_bytes(public.nbytes), public.dtype)
    secret = processes.from_first(secret.reshape(public.shape))
    return jax.random.wrap_key_data(secret, impl=jax.random.key_impl(key))


def private_mean(
    privacy: Privacy,
    key: Key,
    loss: Callable[..., Array],
    params: Params,
    examples: tuple[Array, ...],
    inside: Array,
) -> Array:
    """The mean loss of a batch, with a gradient in `params` that is clipped per example and noised.

    Args:
        privacy: Clipping norm C and noise multiplier sigma.
        key: Key for the noise, N(0, (sigma C)^2) on each coordinate of the sum of clipped gradients.
        loss: (params, x (1, ...), y (1,), keys (1,) if given) -> losses (1,).
        params: One model.
        examples: x (B, ...), y (B,), loss weights (B,), and optionally keys (B,).
        inside: (B,) bool, False for padding.

    Returns:
        () the sum of weighted losses divided by the number of examples.
    """
    library = optional.load("jax_privacy", "privacy")

    def weighted_loss(params: Params, x: PyTree, y: Array, weight: Array, *keys: Key) -> Array:
        return (loss(params, x, y, *keys) * weight).sum()

    # The sum of clipped gradients, with noise.
    gradient = library.clipped_grad(
        weighted_loss,
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
    loss_sum = jnp.where(inside, aux.values, 0).sum()
    value = jax.lax.stop_gradient(loss_sum / count)

    # A term of value zero with the private gradient: anything that a method adds to the mean loss (such as a proximal
    # term, which reads no data) is differentiated as usual.
    def linear(leaf: Array, fixed_leaf: Array, gradient_sum: Array) -> Array:
        return jnp.vdot(leaf - fixed_leaf, gradient_sum / count)

    terms = jax.tree.map(linear, params, fixed, jax.lax.stop_gradient(total))
    return value + sum(jax.tree.leaves(terms))


# `Ledger.unaccounted`
BY_LOSS = "training losses, which weight or select models, examples or clients"
LEAST_NOISE = 0.1  # noise multiplier from which on losses are few enough for a grid
BY_SEED = "the noise, which whoever knows its seed can subtract"
BY_SCALING = "the mean and standard deviation of all clients' features, which scale them"


def finite(value: float) -> float | None:
    """The value, or None if it is infinite; JSON has no infinity."""
    return float(value) if math.isfinite(value) else None


def accountant(sigma: float, step: float) -> Any:
    """How epsilon is computed: from privacy loss distributions (PLD), or moments (RDP) where these are too wide.

    Args:
        sigma: Noise multiplier; losses grow as it falls, and their grid with them.
        step: Of the grid of losses, which are rounded up, at noise multipliers of 1 or more.
    """
    accounting = optional.load("jax_privacy.accounting", "privacy")
    if sigma < LEAST_NOISE:
        return accounting.RdpAccountantConfig()
    return accounting.PldAccountantConfig(value_discretization_interval=step * max(1.0, sigma**-2))


def epsilons(
    privacy: Privacy, num_examples: Array, batch_size: int, steps: np.ndarray, gradients: int = 1
) -> np.ndarray:
    """The ledger: each client's epsilon at `privacy.delta` for what local training has revealed about its examples.

    As is usual, the accountant treats mini-batches as Poisson samples of their expected size, although an epoch here
    iterates over shuffled examples. Several gradients on one mini-batch are one release with as much more signal.

    Args:
        privacy: Noise multiplier and delta.
        num_examples: (K,) n_k.
        batch_size: B.
        steps: (K,), total number of mini-batches that each client has used.
        gradients: Number of gradients per mini-batch; 0 if examples themselves are sent.

    Returns:
        (K,) epsilon: 0 for a client that has not trained; infinite without noise, or if examples are sent.
    """
    if not privacy.noise_multiplier or not gradients:
        return np.where(steps > 0, np.inf, 0.0)
    accounting = optional.load("jax_privacy.accounting", "privacy")
    sigma = privacy.noise_multiplier / math.sqrt(gradients)
    training = accounting.DpsgdTrainingAccountant(accountant(sigma, 1e-3))

    # Clients with as many examples and steps have the same epsilon.
    sizes_and_steps = np.stack([num_examples, steps])
    pairs, inverse = np.unique(sizes_and_steps, axis=1, return_inverse=True)

    def epsilon(size: int, count: int) -> float:
        if not size or not count:
            return 0.0
        parameters = accounting.DpParams(
            noise_multipliers=sigma,
            num_samples=size,
            delta=privacy.delta,
            batch_size=min(batch_size, size),
        )
        return float(training.compute_epsilon(count, parameters))

    with optional.quiet():  # the accountant warns about each order that it skips by design
        pair_epsilons = np.array([epsilon(int(size), int(count)) for size, count in pairs.T])
    return pair_epsilons[inverse.reshape(-1)]
