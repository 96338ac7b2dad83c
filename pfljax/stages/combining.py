"""A server that combines what it averages in its own way: clients' updates, and whatever they send to be averaged.

A part is what a client adds to one average: its update, each of its sums (SCAFFOLD's changes of control variates,
FedPAC's features by class) and the squared norm of its update that it may tell, all divided by their weights. Each part
is combined on its own, features by class for each class, and counts again as much as the weights' sum. In one stack of
all parts, the largest would decide which client stands out, and hide what attackers do to others. Weights, counts and
single numbers stay sums.

A rule of changes that a server adds up (`Algorithm.changes`) would add up its errors, too. The server has the sum of
each client's changes so far, and moves by the rule of the new sums minus that of the old ones; for the mean, this is
the mean change. FLTrust combines the changes: its server keeps no sum of its own ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientData,
    ClientOutput,
    Key,
    Metrics,
    PyTree,
    Start,
    State,
    Upload,
)
from pfljax.local.problem import Problem
from pfljax.stages.attacks import Attack
from pfljax.stages.collusion import colluded
from pfljax.stages.compression import first_output
from pfljax.stages.messages import LocalWork, payload, positive, with_note
from pfljax.stages.robust import Aggregator, combine
from pfljax.stages.stage import Stage, StageState

Uploads = dict[str, Any]
UPDATE = "update"  # names of parts that are no sums
SQUARE = "square"


@dataclasses.dataclass(frozen=True)
class Combining(Stage):
    """Messages reach the server one by one, and it combines each part of them by its rule.

    They still count as uploaded. Parts that belong to a server's older models (`Algorithm.stale`)
    are combined together.

    Attributes:
        aggregator: The rule.
        trim: Assumed share of attackers.
        attack: What attackers do that know what others send.
        problem: The problem of the method.
        method: The method.
    """

    name = "combining"
    aggregator: Aggregator
    trim: float
    attack: Attack
    problem: Problem
    method: Algorithm

    @property
    def changes(self) -> tuple[str, ...]:
        """Sums that the server adds up over rounds."""
        return self.method.changes

    def server_note(self, key: Key, start: Start, clients: ClientData) -> Any:
        """Zeros in the shapes of a client's changes."""
        if not self.changes:
            return {}

        def uploads(output: ClientOutput) -> Uploads:
            return uploads_of(output).uploads

        shapes = jax.eval_shape(uploads, first_output(self.method, clients))
        changes = {name: shapes[name] for name in self.changes}
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), changes)

    def client_note(self, note: Any, client: Array) -> Any:
        return note

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, Uploads]:
        message = uploads_of(output)
        sums = {}
        for name in self.changes:
            sums[name] = tree.add(note.client[name], message.uploads[name])
        attacker = work.data.attacker
        single = {
            "parts": message.uploads,
            "weights": message.weights,
            "first": work.context.index[0],
            "attacker": jnp.zeros((), bool) if attacker is None else attacker,
        }
        output = output._replace(upload=Upload(sums=message.rest))
        return with_note(output, self.name, single), sums

    def before_server(
        self, key: Key, state: State, aggregate: Aggregate, note: StageState
    ) -> tuple[Aggregate, StageState, Metrics]:
        single = aggregate.notes[self.name]
        sent = single["weights"]["weight"]
        cohort_size, num_sent = sent.shape
        num_models = 1 if self.method.stale else tree.num_rows(state.models)
        # Each client trains one averaged model, or all of them in order.
        assert num_sent in (1, num_models)

        # One row for each contribution, and the model that it belongs to.
        def flat(leaf: Array) -> Array:
            return leaf.reshape(-1, *leaf.shape[2:])

        uploads = jax.tree.map(flat, single["parts"])
        weights = jax.tree.map(flat, single["weights"])
        attackers = jnp.repeat(single["attacker"], num_sent)
        first = jnp.zeros_like(single["first"]) if self.method.stale else single["first"]
        number = (first[:, None] + jnp.arange(num_sent)).reshape(-1)

        # Of changes, the rule of all sums so far minus that of the sums before.
        before = {}
        for name in self.changes:
            sums = jax.tree.map(flat, note.client[name])
            before[name] = tree.subtract(sums, uploads[name])
            uploads[name] = sums
        roots = self._roots(key, state, note)

        def combine_model(n: Array) -> tuple[Uploads, dict[str, Array], Array]:
            zeros = jax.tree.map(jnp.zeros_like, weights)
            model_weights = tree.where(number == n, weights, zeros)
            combined = {}
            for name, part in uploads.items():
                weight = weight_of(name, model_weights)
                root = jax.tree.map(lambda leaf: leaf[n], roots.get(name, ()))
                combined[name] = self._one_by_one(part, weight, attackers, root)
                if name in before:
                    old = self._one_by_one(before[name], weight, attackers, root)
                    combined[name] = tree.subtract(combined[name], old)
            totals = jax.tree.map(lambda weight: weight.sum(axis=0), model_weights)
            return combined, totals, (model_weights["weight"] > 0).sum()

        models = jnp.arange(num_models)
        combined, totals, count = self.problem.plan.over_rows(combine_model, models)

        report = aggregate.report
        if SQUARE in combined:
            square = weights["weight"] * combined.pop(SQUARE)[number]
            square = square.reshape(cohort_size, num_sent).sum(axis=1)
            report = report._replace(square=square)
        upload = as_sums(combined, totals, aggregate.upload.sums)
        aggregate = aggregate._replace(upload=upload, num_sent=count, sent=sent > 0, report=report)
        return aggregate, note, {}

    def _roots(self, key: Key, state: State, note: StageState) -> Uploads:
        """The server's own parts, leaves (N, ...); {} if it has none."""
        return {}

    def _one_by_one(self, part: PyTree, weight: Array, attackers: Array, root: PyTree) -> PyTree:
        """What the rule makes of parts with weights (n,); of weights (n, ...), for each entry."""
        if weight.ndim == 1:
            return self._together(part, weight, attackers, root)
        entries = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), (part, weight))

        def combine_entry(part: PyTree, weight: Array, root: PyTree) -> PyTree:
            return self._one_by_one(part, weight, attackers, root)

        return self.problem.plan.over_rows(combine_entry, *entries, root)

    def _together(self, part: PyTree, weight: Array, attackers: Array, root: PyTree) -> PyTree:
        """What the rule makes of parts with weights (n,)."""
        kind = self.attack.collusion
        if kind:
            part = colluded(kind, self.attack.factor, part, weight > 0, attackers)
        return combine(self.aggregator, part, weight, self.trim, root)


def as_sums(combined: Uploads, totals: dict[str, Array], rest: dict[str, PyTree]) -> Upload:
    """An upload in which each part counts again as much as the weights' sum.

    Args:
        combined: The update and sums as the rule combined them.
        totals: Sums of the weights, as `ClientParts.weights`.
        rest: What else was added up, as `ClientParts.rest`.
    """
    combined = dict(combined)
    update = tree.scale(combined.pop(UPDATE), totals["weight"])
    sums = dict(rest)
    for name, part in combined.items():
        total = tree.scale(part, weight_of(name, totals))
        sums[name] = tree.combine(total, sums[name]) if name in sums else total
    return Upload(update, totals["weight"], sums, totals.get("count"))


class ClientParts(NamedTuple):
    """What a client adds to the server's averages.

    Attributes:
        parts: By name, leaves (J, ...): `UPDATE`, the sums, `SQUARE`; zeros if they are not sent.
        weights: "weight" (J,), and "count" (J, ...) if the upload has one; zeros likewise.
        rest: The sums, with None in place of parts.
    """

    uploads: Uploads
    weights: dict[str, Array]
    rest: dict[str, PyTree]


def uploads_of(output: ClientOutput) -> ClientParts:
    """What a client adds to the server's averages."""
    upload = output.upload
    assert upload.weight is not None
    weights = {"weight": upload.weight}
    if upload.count is not None:
        weights["count"] = upload.count

    values, others = tree.partition(upload, payload(upload))
    uploads: Uploads = {UPDATE: values.update}
    for name, entry in values.sums.items():
        if jax.tree.leaves(entry):
            uploads[name] = tree.scale(entry, 1 / positive(weight_of(name, weights)))
    if output.report.square is not None:
        square = jnp.broadcast_to(output.report.square, upload.weight.shape)
        uploads[SQUARE] = square / positive(upload.weight)
    if output.sent is not None:
        # What does not arrive adds nothing to sums of changes.
        zeros = jax.tree.map(jnp.zeros_like, (uploads, weights))
        uploads, weights = tree.where(output.sent, (uploads, weights), zeros)
    rest = {name: entry for name, entry in others.sums.items() if jax.tree.leaves(entry)}
    return ClientParts(uploads, weights, rest)


def weight_of(name: str, weights: dict[str, Array]) -> Array:
    """A part's weights: of sums, the counts, if there are any."""
    if "count" in weights and name not in (UPDATE, SQUARE):
        return weights["count"]
    return weights["weight"]
