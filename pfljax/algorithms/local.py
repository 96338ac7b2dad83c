"""Local training: every client alone, the yardstick of whether collaboration helps.

Each client k trains its own model phi_k on D_k; nothing is sent. Its optimizer's state stays with it over the rounds.
"""

from __future__ import annotations

import dataclasses

import jax

from pfljax.core import tree
from pfljax.core.types import Algorithm, ClientOutput, Predictor, State
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class LocalConfig:
    """Local training has no knobs of its own."""


def local(problem: Problem, config: LocalConfig) -> Algorithm:
    """Local training."""
    del config

    def init(key, clients):
        models = problem.init_models(key, tree.num_rows(clients))
        return State(server=(), models=models, optimizer=(), clients=problem.init_optimizers(models))

    def download(key, state, cohort):
        return cohort.ids[:, None]

    def work(turn, models, opt_state, shard):
        params = jax.tree.map(lambda leaf: leaf[0], models)
        params, opt_state, loss = problem.solver.fit(turn.key, params, opt_state, shard.train, round_number=turn.round)
        return ClientOutput(client=opt_state, upload=tree.stack_one(params), report={"loss": loss})

    def update(key, state, returned):
        return state._replace(models=returned.upload), {}

    def predictor(key, state, clients):
        return Predictor.own(state.models)

    def adapt(key, state, clients):
        return problem.newcomers_alone(key, clients)

    return Algorithm(init, download, work, update, predictor, adapt, "own", "each client's own model")
