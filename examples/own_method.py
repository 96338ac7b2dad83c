"""A method of one's own, in its own file: FedAvg whose clients' updates are cut to a norm, so that none leads it away.

    python examples/own_method.py --algorithms=fedavg,fedclip --seeds=0,1 --fedclip.norm=0.3

It is registered, and from then on every entry point knows it: here `compare`, with all its flags. Sun, Kairouz, Suresh,
McMahan, "Can you really backdoor federated learning?" (2019):

    A round: client k receives theta, trains it to theta_k; d_k <- (theta_k - theta) min(1, norm / |theta_k - theta|);
    theta <- theta + sum_k n_k d_k / sum_k n_k.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax import algorithms
from pfljax.algorithms.common import aggregation
from pfljax.core import tree
from pfljax.core.types import Algorithm, ClientOutput, Predictor, State
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class FedClipConfig:
    """FedClip's knob, which becomes the flag --fedclip.norm.

    Attributes:
        norm: to which a client's update is cut
    """

    norm: float = 0.5


def fedclip(problem: Problem, config: FedClipConfig) -> Algorithm:
    """FedAvg with cut updates."""

    def init(key, clients):  # one global model, and what clients keep of their optimizers
        models = problem.init_models(key, 1)
        return State((), models, (), problem.optimizer_rows(models, tree.num_rows(clients)))

    def download(key, state, cohort):  # everyone of the cohort receives model 0
        return jnp.zeros((cohort.ids.shape[0], 1), jnp.int32)

    def work(turn, models, kept, shard):  # one client, with the stack of what it has received
        trained, kept, losses = problem.fit_models(turn, models, kept, shard.train)
        update = tree.subtract(trained, models)
        length = jnp.sqrt(tree.inner(update, update))
        update = tree.scale(update, jnp.minimum(1, config.norm / jnp.maximum(length, 1e-12)))
        upload, sent = aggregation.weighted(update, shard.train.size)  # n_k d_k and n_k, summed on the way
        return ClientOutput(kept, upload, {"loss": losses[0], "cut": length > config.norm}, sent)

    def update(key, state, returned):  # the server
        zeros = jax.tree.map(jnp.zeros_like, state.models)
        models = tree.add(state.models, aggregation.average(zeros, returned))
        return state._replace(models=models), {"clients_cut": returned.report["cut"].mean()}

    def predictor(key, state, clients):  # what is scored, for newcomers too
        return Predictor.one(state.models, tree.num_rows(clients))

    return Algorithm(init, download, work, update, predictor, predictor, "shared", "the global model")


algorithms.METHODS["fedclip"] = algorithms.Method(
    fedclip, FedClipConfig, "FedAvg with cut updates (Sun et al., 2019)", "nothing", "the global model, both ways"
)

if __name__ == "__main__":
    from experiments import common, compare  # only now, since their flags come from the registry

    common.main(compare.run)
