"""A server that computes a model, or something else, for each client."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pfljax.contract.types import Algorithm, Ledger, Mixture


def one_for_each(**functions: Any) -> Algorithm:
    """An algorithm whose server has a stack (K, ...): client k receives entry k, and predicts with it.

    Args:
        functions: `start`, `client_update`, `server_update` and others, as in `Algorithm`. Clients compute one gradient
            per mini-batch.
    """
    return Algorithm(
        download=lambda context, row, cohort: context.client[None],
        whom=lambda context, row, size: Mixture(context.client[None], jnp.ones((1,))),
        topology="shared",
        ledger=Ledger(gradients=1),
        **functions,
    )
