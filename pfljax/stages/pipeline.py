"""The pipeline: a method whose clients' messages pass through a list of stages.

Everything that stages need to agree on is decided here and nowhere else: their order, where their
notes are kept, what a client does that does not train, and what the server gets of a message that
is lost. `Experiment.stages` has the list.

Who is missing
- An absent client does what the method makes of a client without examples; its row and the stages'
  notes stay as they were.
- A lost message is replaced, directly behind the stage that loses it, by that of a client without
  examples. The client does not know: it keeps its new row.
- A dropped message is replaced likewise, and the client gets back its old row and notes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Cohort,
    First,
    Key,
    Metrics,
    Mixture,
    Params,
    Participation,
    Prediction,
    PyTree,
    Split,
    Start,
    State,
)
from pfljax.local.problem import Problem
from pfljax.stages.messages import LocalWork, choose, either
from pfljax.stages.stage import Stage, StageMaker, StageState


class WithNotes(NamedTuple):
    """A server's state or a client's row, with what the stages keep beside it.

    Attributes:
        state: The method's.
        notes: The stages', by their name.
    """

    state: PyTree
    notes: dict[str, PyTree]


def pipelined(problem: Problem, method: Algorithm, makers: Iterable[StageMaker]) -> Algorithm:
    """The method with those of the stages that have something to do.

    Args:
        problem: The problem of the method.
        method: Any method.
        makers: What makes the stages, from the client to the server.
    """
    pipeline = Pipeline(method)
    for make in makers:
        stage = make(problem, pipeline)
        if stage is not None:
            pipeline = pipeline.with_stage(stage)
    return pipeline.algorithm()


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A method and its stages.

    Attributes:
        method: The method, with what the stages declare.
        stages: The stages, from the client to the server.
    """

    method: Algorithm
    stages: tuple[Stage, ...] = ()

    def with_stage(self, stage: Stage) -> Pipeline:
        """The pipeline with one more stage around it."""
        return Pipeline(stage.declare(self.method), (*self.stages, stage))

    @property
    def chooses(self) -> bool:
        """Whether the method or a stage chooses the clients of a round."""
        return self.method.sample is not None or any(stage.chooses for stage in self.stages)

    def algorithm(self) -> Algorithm:
        """The method and its stages as the engine runs them."""
        method = self.method
        report = method.report
        if report.collaboration is not None:
            report = dataclasses.replace(report, collaboration=self.collaboration)
        algorithm = dataclasses.replace(
            method,
            start=self.start,
            first_row=self.first_row,
            client_update=self.client_update,
            server_update=self.server_update,
            sample=self.sample if self.chooses else None,
            download=self.download if method.download else None,
            select_models=self.select_models if method.select_models else None,
            predict=self.predict if method.predict else None,
            adapt=self.adapt if method.adapt else None,
            report=report,
            engine=method.engine._replace(tune=self.tune if method.engine.tune else None),
        )
        for stage in self.stages:
            algorithm = stage.around(algorithm)
        return algorithm

    # At the beginning.

    def start(self, key: Key, clients: ClientData) -> Start:
        """What the server begins with, and every stage's note."""
        start = self.method.start(key, clients)
        notes = {stage.name: stage.server_note(key, start, clients) for stage in self.stages}
        for stage in self.stages:
            start = stage.start(start)
        return start._replace(state=WithNotes(start.state, notes))

    def first_row(self, key: Key, client: Array, start: Start) -> First:
        """What a client begins with, and every stage's note."""
        method_state, server_notes = start.state
        first = self.method.first_row(key, client, start._replace(state=method_state))
        notes = {}
        for stage in self.stages:
            notes[stage.name] = stage.client_note(server_notes[stage.name], client)
        return first._replace(row=WithNotes(first.row, notes))

    # A client's part.

    def download(self, context: ClientContext, row: WithNotes, cohort: Cohort) -> Array:
        """The models that a client receives."""
        assert self.method.download is not None
        notes = context.server.notes
        context = method_context(context)
        index = self.method.download(context, row.state, cohort)
        for stage in self.stages:
            index = stage.download(context, index, notes[stage.name])
        return index

    def client_update(
        self, context: ClientContext, models: Params, row: WithNotes, data: ClientData
    ) -> ClientOutput:
        """A client's part in an exchange."""
        notes = {}
        for stage in self.stages:
            name = stage.name
            notes[name] = StageState(context.server.notes[name], row.notes[name])

        # What the client trains with, and whether it does.
        work = LocalWork(method_context(context), models, row.state, data)
        for stage in reversed(self.stages):
            work = stage.before_client(work, notes[stage.name])
        if work.absent is not None:
            work = work._replace(data=without_examples(work.data, work.absent))

        # What it sends.
        output = self._train(work)
        participation = Participation(absent=work.absent, away=work.away)
        output = output._replace(participation=participation)
        kept_notes = {}
        for stage in self.stages:
            changed, kept_notes[stage.name] = stage.after_client(work, output, notes[stage.name])
            output = self._arrived(work, output, changed)

        # Nothing happens to those who are absent or dropped.
        next_row = WithNotes(output.row, kept_notes)
        undone = either(work.absent, output.participation.dropped)
        if undone is not None:
            next_row = choose(undone, row, next_row)
        participation = output.participation._replace(idle=undone)
        return output._replace(row=next_row, opt_state=(), participation=participation)

    def _train(self, work: LocalWork) -> ClientOutput:
        """The method's client, whose contributions are sent where they have a weight."""
        output = self.method.client_update(work.context, work.models, work.row, work.data)
        weight = output.upload.weight
        if output.sent is None and weight is not None:
            output = output._replace(sent=weight > 0)
        return output

    def _arrived(self, work: LocalWork, before: ClientOutput, after: ClientOutput) -> ClientOutput:
        """What later stages see: of a message that a stage loses, that of an idle client."""
        if after.participation.absent is before.participation.absent:
            return after
        idle_work = work._replace(data=without_examples(work.data, True))

        def idle() -> tuple:
            output = self._train(idle_work)
            return output.upload, output.report, output.sent

        def message() -> tuple:
            return after.upload, after.report, after.sent

        upload, report, sent = jax.lax.cond(after.participation.absent, idle, message)
        return after._replace(upload=upload, report=report, sent=sent)

    # The server's part.

    def sample(self, key: Key, state: State, clients: ClientData) -> Array:
        """The clients of a round, chosen by the last stage that does, or by the method."""
        for stage in reversed(self.stages):
            if stage.chooses:
                note = state.server.state.notes[stage.name]
                return stage.sample(key, state_of_method(state), clients, note)
        assert self.method.sample is not None
        return self.method.sample(key, state_of_method(state), clients)

    def server_update(self, key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
        """The stages' and the method's part on the server."""
        server_notes = dict(state.server.state.notes)
        client_notes = dict(state.rows.notes)
        state = state_of_method(state)
        metrics: Metrics = {}
        for stage in reversed(self.stages):
            name = stage.name
            note = StageState(server_notes[name], client_notes[name])
            aggregate, note, stage_metrics = stage.before_server(key, state, aggregate, note)
            server_notes[name] = note.server
            client_notes[name] = note.client
            metrics = stage_metrics | metrics

        # The method sees neither the stages' notes nor what became of clients.
        aggregate = aggregate._replace(participation=Participation(), notes={})
        state, method_metrics = self.method.server_update(key, state, aggregate)

        for stage in self.stages:
            name = stage.name
            state, server_notes[name] = stage.after_server(key, state, server_notes[name])
        state = state.with_server(WithNotes(state.server.state, server_notes))
        state = state.with_rows(WithNotes(state.rows, client_notes))
        return state, method_metrics | metrics

    # What a client predicts with. Newcomers have no row.

    def select_models(self, context: ClientContext, row: Any, size: Array) -> Mixture:
        """Whose models a client predicts with."""
        assert self.method.select_models is not None
        return self.method.select_models(method_context(context), row_of_method(row), size)

    def predict(
        self, context: ClientContext, models: Params, row: Any, data: ClientData
    ) -> Prediction:
        """What a client makes of its models."""
        assert self.method.predict is not None
        return self.method.predict(method_context(context), models, row_of_method(row), data)

    def adapt(self, context: ClientContext, models: Params, data: ClientData) -> Prediction:
        """What a newcomer predicts with."""
        assert self.method.adapt is not None
        return self.method.adapt(method_context(context), models, data)

    def tune(self, context: ClientContext, prediction: Prediction, data: ClientData) -> Prediction:
        """A fine-tuned prediction."""
        tune = self.method.engine.tune
        assert tune is not None
        return tune(method_context(context), prediction, data)

    def collaboration(self, context: ClientContext, row: Any) -> Mapping[str, Array]:
        """What a run records of whom a client uses."""
        assert self.method.report.collaboration is not None
        return self.method.report.collaboration(method_context(context), row_of_method(row))


def method_context(context: ClientContext) -> ClientContext:
    """The context as the method knows it."""
    return context._replace(server=context.server.state)


def row_of_method(row: Any) -> PyTree:
    """A row as the method knows it; () of a newcomer."""
    return row.state if row else row


def state_of_method(state: State) -> State:
    """The state as the method knows it."""
    return state.with_server(state.server.state.state).with_rows(state.rows.state)


def without_examples(data: ClientData, absent: Array | bool) -> ClientData:
    """The data of a client, of which an absent one has nothing."""

    def emptied(split: Split) -> Split:
        return split._replace(size=jnp.where(absent, 0, split.size))

    return data._replace(train=emptied(data.train), validation=emptied(data.validation))
