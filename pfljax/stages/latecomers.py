"""Clients that were never in a cohort, for any method whose clients receive each other's models.

The model of such a client is untrained, and with many clients and small cohorts most clients are such. They are scored
as newcomers are, by the method's `adapt` on their own examples. Newcomers see all models, which may be a million, most
of them untrained. These clients see the models of the `MET` clients that were in most cohorts.

In evaluation, every client receives at least `MET` models. Under vmap, both ways are computed for every client, because
a condition that differs between clients becomes a selection: up to `MET` more forward passes over a client's examples.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.types import Algorithm, Array, Key, Mixture, Params, Prediction
from pfljax.exchange.lifting import resolved
from pfljax.local.problem import Problem
from pfljax.stages import messages
from pfljax.stages.notes import Noted, with_notes

MET = 16  # most models that a client that was never in a cohort adapts to
TIES = 1  # folded into the server's key; keeps the draws apart


class Known(NamedTuple):
    """The clients that were in most cohorts.

    Attributes:
        ids: (MET,) int32, these clients.
        rounds: (MET,) int32, the number of their cohorts, in descending order; 0: no client.
    """

    ids: Array
    rounds: Array

    def with_cohort(self, key: Key, ids: Array, rounds: Array) -> Known:
        """Notes a cohort (S,) and the numbers of its clients' cohorts (S,); ties are broken at random."""
        outdated = (self.ids[:, None] == ids).any(axis=1)
        all_ids = jnp.concatenate([ids, self.ids])
        all_rounds = jnp.concatenate([rounds, jnp.where(outdated, 0, self.rounds)])
        most = jnp.lexsort((jax.random.uniform(key, all_ids.shape), -all_rounds))[: len(self.ids)]
        return Known(all_ids[most], all_rounds[most])

    def met(self) -> Array:
        """(MET,) int32: the clients whose models others may meet, repeated if there are fewer."""
        return self.ids[jnp.arange(len(self.ids)) % jnp.maximum((self.rounds > 0).sum(), 1)]


def with_latecomers(problem: Problem, algorithm: Algorithm) -> Algorithm:
    """The algorithm whose clients predict as newcomers until they are in a cohort.

    It is the same algorithm if all clients are in every cohort, if no client receives others' models, or without
    `adapt`. Before the first cohort, all clients predict as the method says.

    Args:
        problem: The problem of the algorithm.
        algorithm: Any algorithm.
    """
    if problem.cohort_size == problem.num_clients or algorithm.topology != "peers" or algorithm.adapt is None:
        return algorithm
    nobody = np.zeros((min(MET, problem.num_clients),), np.int32)
    noted = with_notes(algorithm, lambda clients: Known(nobody, nobody), lambda known, client: jnp.zeros((), jnp.int32))

    def client_update(context, models, row, data):
        out = noted.client_update(context, models, row, data)
        rounds = row.note + (context.step == 0).astype(jnp.int32)
        report = messages.beside(out.report, client=context.client, rounds=rounds)
        return out._replace(client=Noted(out.client.inner, rounds), report=report)

    def server_update(key, state, aggregate):
        report = aggregate.report
        state, metrics = noted.server_update(key, state, aggregate._replace(report=report["method"]))
        known = state.server.note.with_cohort(jax.random.fold_in(key, TIES), report["client"], report["rounds"])
        return state._replace(server=Noted(state.server.inner, known)), metrics

    changes = _predictions(noted)
    return dataclasses.replace(noted, client_update=client_update, server_update=server_update, **changes)


def _predictions(noted: Algorithm) -> dict[str, Any]:
    """`whom` and `predict` of an algorithm with notes for clients of whom some were never in a cohort."""
    own_adapt = noted.adapt
    assert own_adapt is not None
    late = lambda context, row: (row.note == 0) & (context.server.note.rounds[0] > 0)

    def usual(context, row, size):
        alone = Mixture(context.client[None], jnp.ones((1,)))
        return noted.whom(context, row, size) if noted.whom else alone

    def whom(context, row, size):
        mixture, met = usual(context, row, size), context.server.note.met()
        equally, width = Mixture(met, jnp.full(met.shape, 1 / len(met))), max(len(mixture.index), len(met))
        return tree.where(late(context, row), _wide(equally, width), _wide(mixture, width))

    def predict(context, models, row, data):
        mixture, met = usual(context, row, data.train.size), context.server.note.met()
        some = lambda num: jax.tree.map(lambda leaf: leaf[:num], models)

        def as_usual():
            seen, received = context._replace(index=mixture.index), some(len(mixture.index))
            made = noted.predict(seen, received, row, data) if noted.predict else Prediction()
            return made, received, mixture.weights

        def as_newcomer():
            received = some(len(met))
            return own_adapt(context._replace(index=met[:0]), received, data), received, None

        ways = as_newcomer, as_usual
        own = any(bool(jax.tree.leaves(jax.eval_shape(lambda way=way: way()[0].models))) for way in ways)
        found = [lambda way=way: _completed(*way(), own) for way in ways]
        width = max(tree.num_rows(jax.eval_shape(way).weights) for way in found)
        return jax.lax.cond(late(context, row), *(lambda way=way: _wide(way(), width) for way in found))

    return {"whom": whom, "predict": predict}


def _completed(made: Prediction, received: Params, weights: Array | None, own: bool) -> Prediction:
    """A prediction with its models if some clients have models of their own, otherwise with its index; and weights."""
    full = resolved(made, received, weights)
    assert full.weights is not None
    if own:
        return full
    places = jnp.arange(len(full.weights), dtype=jnp.int32) if made.index is None else made.index
    return Prediction((), full.weights, places, full.inputs)


def _wide(found: Any, width: int) -> Any:
    """A mixture or prediction with `width` models or places: the first is repeated, with weight 0."""
    again = lambda leaf: jnp.concatenate([leaf, jnp.repeat(leaf[:1], width - len(leaf), axis=0)])
    parts = {name: jax.tree.map(again, getattr(found, name)) for name in ("models", "index") if hasattr(found, name)}
    return found._replace(**parts, weights=jnp.pad(found.weights, (0, width - len(found.weights))))
