"""Clients that were never in a cohort, for any method whose clients receive each other's models.

The model of such a client is untrained, and with many clients and small cohorts most clients are such; so is that of a
client that was absent from all of its cohorts. They are scored
as newcomers are, by the method's `adapt` on their own examples. Newcomers see all models, which may be a million, most
of them untrained. These clients see the models of the `MET` clients that were in most cohorts.

In evaluation, every client receives at least `MET` models. Under vmap, both ways are computed for every client, because
a condition that differs between clients becomes a selection: up to `MET` more forward passes over a client's examples.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Key,
    Metrics,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
)
from pfljax.exchange.lifting import resolved
from pfljax.local.problem import Problem
from pfljax.stages.messages import LocalWork, either, with_note
from pfljax.stages.stage import Stage, StageState

if TYPE_CHECKING:
    from pfljax.stages.pipeline import Pipeline

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


def latecomers_stage(problem: Problem, pipeline: Pipeline) -> Latecomers | None:
    """The stage of clients that predict as newcomers until they have taken part in a round.

    There is none if all clients are in every cohort, if no client receives others' models, or
    without `adapt`. Before the first cohort, all clients predict as the method says.
    """
    method = pipeline.method
    if problem.cohort_size == problem.num_clients or method.adapt is None:
        return None
    return Latecomers(problem.num_clients) if method.topology.reads_others else None


@dataclasses.dataclass(frozen=True)
class Latecomers(Stage):
    """Clients predict as newcomers until they have taken part in a round.

    Its notes are, on the server, the clients `Known`, and on a client the number of rounds that it
    took part in.
    """

    name = "latecomers"
    num_clients: int

    def around(self, algorithm: Algorithm) -> Algorithm:
        predicting = Predicting(self.name, algorithm)
        return dataclasses.replace(
            algorithm, select_models=predicting.select_models, predict=predicting.predict
        )

    def server_note(self, key: Key, start: Start, clients: ClientData) -> Known:
        nobody = np.zeros((min(MET, self.num_clients),), np.int32)
        return Known(nobody, nobody)

    def client_note(self, note: Known, client: Array) -> Array:
        return jnp.zeros((), jnp.int32)

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, Array]:
        takes_part = work.context.step == 0
        undone = either(work.absent, output.participation.dropped)
        if undone is not None:
            takes_part = takes_part & ~undone
        rounds = note.client + takes_part.astype(jnp.int32)
        report = {"client": work.context.client, "rounds": rounds}
        return with_note(output, self.name, report), rounds

    def before_server(
        self, key: Key, state: State, aggregate: Aggregate, note: StageState
    ) -> tuple[Aggregate, StageState, Metrics]:
        report = aggregate.notes[self.name]
        ties_key = jax.random.fold_in(key, TIES)
        known = note.server.with_cohort(ties_key, report["client"], report["rounds"])
        return aggregate, note._replace(server=known), {}


@dataclasses.dataclass(frozen=True)
class Predicting:
    """`select_models` and `predict` of clients of whom some have not taken part in a round.

    Attributes:
        name: The stage's name, under which its notes are.
        algorithm: The method with all stages before this one.
    """

    name: str
    algorithm: Algorithm

    def select_models(self, context: ClientContext, row: PyTree, size: Array) -> Mixture:
        """The usual mixture, or for latecomers the models of clients that are known, equally."""
        mixture = self._usual(context, row, size)
        met = self._known(context).met()
        equally = Mixture(met, jnp.full(met.shape, 1 / len(met)))
        width = max(len(mixture.index), len(met))
        is_late = self._is_late(context, row)
        return tree.where(is_late, _wide(equally, width), _wide(mixture, width))

    def predict(
        self, context: ClientContext, models: Params, row: PyTree, data: ClientData
    ) -> Prediction:
        """The usual prediction, or for latecomers that of a newcomer."""
        algorithm = self.algorithm
        mixture = self._usual(context, row, data.train.size)
        met = self._known(context).met()

        def first_of(num: int) -> Params:
            return jax.tree.map(lambda leaf: leaf[:num], models)

        def as_usual() -> tuple[Prediction, Params, Array | None]:
            received = first_of(len(mixture.index))
            prediction = Prediction()
            if algorithm.predict is not None:
                seen = context._replace(index=mixture.index)
                prediction = algorithm.predict(seen, received, row, data)
            return prediction, received, mixture.weights

        def as_newcomer() -> tuple[Prediction, Params, Array | None]:
            assert algorithm.adapt is not None
            received = first_of(len(met))
            seen = context._replace(index=met[:0])
            return algorithm.adapt(seen, received, data), received, None

        # Both have the same shapes.
        shapes = [jax.eval_shape(as_newcomer), jax.eval_shape(as_usual)]
        has_models = any(bool(jax.tree.leaves(prediction.models)) for prediction, _, _ in shapes)

        def newcomer() -> Prediction:
            return _completed(*as_newcomer(), has_models)

        def usual() -> Prediction:
            return _completed(*as_usual(), has_models)

        widths = [tree.num_rows(jax.eval_shape(way).weights) for way in (newcomer, usual)]
        width = max(widths)
        return jax.lax.cond(
            self._is_late(context, row),
            lambda: _wide(newcomer(), width),
            lambda: _wide(usual(), width),
        )

    def _known(self, context: ClientContext) -> Known:
        return context.server.notes[self.name]

    def _is_late(self, context: ClientContext, row: PyTree) -> Array:
        return (row.notes[self.name] == 0) & (self._known(context).rounds[0] > 0)

    def _usual(self, context: ClientContext, row: PyTree, size: Array) -> Mixture:
        if self.algorithm.select_models is not None:
            return self.algorithm.select_models(context, row, size)
        return Mixture(context.client[None], jnp.ones((1,)))


def _completed(
    prediction: Prediction, received: Params, weights: Array | None, has_models: bool
) -> Prediction:
    """A prediction with its models if some clients have models of their own, otherwise with its index; and weights."""
    full = resolved(prediction, received, weights)
    assert full.weights is not None
    if has_models:
        return full
    positions = (
        jnp.arange(len(full.weights), dtype=jnp.int32)
        if prediction.index is None
        else prediction.index
    )
    return Prediction((), full.weights, positions, full.inputs)


def _wide(narrow: Any, width: int) -> Any:
    """A mixture or prediction with `width` models or places: the first is repeated, with weight 0."""

    def widened(leaf: Array) -> Array:
        again = jnp.repeat(leaf[:1], width - len(leaf), axis=0)
        return jnp.concatenate([leaf, again])

    no_padding = [(0, 0)] * (narrow.weights.ndim - 1)
    weights = jnp.pad(narrow.weights, [(0, width - len(narrow.weights)), *no_padding])
    narrow = narrow._replace(index=jax.tree.map(widened, narrow.index), weights=weights)
    if isinstance(narrow, Prediction):
        narrow = narrow._replace(models=jax.tree.map(widened, narrow.models))
    return narrow
