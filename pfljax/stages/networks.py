"""Clients whose networks differ: a method's algorithms for each network, as one algorithm.

What a client keeps and predicts with is packed: all leaves of a dtype are joined into one array, with zeros behind
those of smaller networks, so that all clients' rows have the same shapes. What travels must have the same shapes
whatever the network; it has the first one's structure. The functions of a client switch between the networks. If
clients run one by one (map), each computes only its own network. Under vmap, a switch becomes a selection: every client
computes all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Cohort,
    First,
    KeptOptimizer,
    Key,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Start,
)
from pfljax.exchange.lifting import resolved, shapes_of_client
from pfljax.exchange.views import view
from pfljax.local.problem import Problem
from pfljax.stages.optimizers import keeps_optimizers

Packed = dict[str, Array]


class Packing(NamedTuple):
    """Trees of several structures as arrays of the same shapes.

    Attributes:
        shapes: Shapes and dtypes of each tree.
        sizes: Length of the array of each dtype.
    """

    shapes: tuple[PyTree, ...]
    sizes: dict[str, int]

    @classmethod
    def from_shapes(cls, shapes: Iterable[PyTree]) -> Packing:
        """A packing for trees with these shapes."""
        shapes = tuple(shapes)
        sizes = Counter[str]()
        for shape in shapes:
            total = Counter[str]()
            for leaf in jax.tree.leaves(shape):
                total[str(leaf.dtype)] += math.prod(leaf.shape)
            sizes |= total  # the larger number of each dtype
        return cls(shapes, dict(sizes))

    def pack(self, number: int, unpacked: PyTree) -> Packed:
        """Tree `number` as arrays, by dtype."""
        shapes = shapes_of(unpacked)
        expected = shapes_of(self.shapes[number])
        if shapes != expected:
            raise TypeError(f"got arrays {shapes}; expected {expected}")
        leaves_of: dict[str, list[Array]] = {name: [] for name in self.sizes}
        for leaf in map(jnp.asarray, jax.tree.leaves(unpacked)):
            leaves_of[str(leaf.dtype)].append(leaf.reshape(-1))
        packed = {}
        for name, leaves in leaves_of.items():
            padding = self.sizes[name] - sum(leaf.size for leaf in leaves)
            packed[name] = jnp.concatenate([*leaves, jnp.zeros((padding,), name)])
        return packed

    def unpack(self, number: int, packed: Packed) -> PyTree:
        """Undoes `pack`."""
        position = Counter[str]()  # in the array of each dtype

        def take(leaf: jax.ShapeDtypeStruct) -> Array:
            """The next leaf of this shape and dtype."""
            name = str(leaf.dtype)
            start = position[name]
            position[name] += math.prod(leaf.shape)
            return packed[name][start : position[name]].reshape(leaf.shape)

        return jax.tree.map(take, self.shapes[number])


class Row(NamedTuple):
    """A client's group, () int32, and what it keeps, packed."""

    group: Array
    packed_row: Packed


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A method for several networks.

    Attributes:
        problem: The problem of all clients, with its groups.
        problems: The problem of each network.
        algorithms: The method built for each.
        clients: Shapes of the data of all clients.
        outputs: `evaluation.metrics.outputs`.
    """

    problem: Problem
    problems: tuple[Problem, ...]
    algorithms: tuple[Algorithm, ...]
    clients: ClientData
    outputs: Callable[[Problem, Algorithm, Prediction, Array], Array]

    def algorithm(self) -> Algorithm:
        """The method's algorithms as one.

        Raises:
            ArgumentError: if clients receive each other's models, or what travels has other shapes in some network.
        """
        base = self.algorithms[0]
        if base.topology.between_clients:
            text = f"differs between clients ({self.named}), who receive each other's models; accepted: one network"
            raise ArgumentError("model", text)
        if len({shapes_of(start) for start in self.starts}) > 1:
            raise self.differs()
        downloads = any(algorithm.download for algorithm in self.algorithms)
        chooses_models = any(algorithm.select_models for algorithm in self.algorithms)
        tunes = any(algorithm.engine.tune for algorithm in self.algorithms)
        collaboration = self.collaboration if base.report.collaboration else None
        report = dataclasses.replace(base.report, collaboration=collaboration)
        return dataclasses.replace(
            base,
            first_row=self.first_row,
            download=self.download if downloads else None,
            client_update=self.client_update,
            select_models=self.select_models if chooses_models else None,
            predict=self.predicted,
            apply=self.apply,
            adapt=self.adapt,
            global_model=None,
            fine_tuned=None,
            report=report,
            engine=base.engine._replace(tune=self.tune if tunes else None),
        )

    @property
    def groups(self) -> Any:
        """The networks."""
        return self.problem.groups

    @property
    def named(self) -> str:
        """The networks' names."""
        return ", ".join(self.groups.names)

    def differs(self) -> ArgumentError:
        """The error for what travels in different shapes."""
        text = f"differs between clients, and what this method sends has other shapes in some of {self.named}"
        accepted = "methods that send what all have, such as prototypes or heads"
        return ArgumentError("model", f"{text}; accepted: {accepted}")

    @functools.cached_property
    def starts(self) -> list[Start]:
        """Shapes of what the server begins with, in the structure of each network."""
        key = jax.eval_shape(jax.random.key, 0)
        return [jax.eval_shape(algorithm.start, key, self.clients) for algorithm in self.algorithms]

    @functools.cached_property
    def firsts(self) -> list[First]:
        """Shapes of what a client of each group begins with."""
        key = jax.eval_shape(jax.random.key, 0)
        client = jax.ShapeDtypeStruct((), jnp.int32)
        return [
            jax.eval_shape(algorithm.first_row, key, client, start)
            for algorithm, start in zip(self.algorithms, self.starts, strict=True)
        ]

    @functools.cached_property
    def rows(self) -> Packing:
        """The packing of rows."""
        return Packing.from_shapes(first.row for first in self.firsts)

    @functools.cached_property
    def models(self) -> Packing:
        """The packing of clients' own models."""
        return Packing.from_shapes(first.model for first in self.firsts)

    @functools.cached_property
    def opt_states(self) -> Packing:
        """The packing of their optimizer states."""
        return Packing.from_shapes(first.opt_state for first in self.firsts)

    @functools.cached_property
    def optimizer_packing(self) -> Packing:
        """The packing of optimizer states that the engine keeps for clients."""
        opt_states = []
        for problem, algorithm in zip(self.problems, self.algorithms, strict=True):
            shapes = shapes_of_client(algorithm, self.clients, problem.cohort_size)
            opt_states.append(shapes.output.opt_state)
        return Packing.from_shapes(opt_states)

    @functools.cached_property
    def predictions(self) -> Packing:
        """The packing of models, weights and inputs of predictions."""
        key = jax.eval_shape(jax.random.key, 0)
        shapes = []
        for number, algorithm in enumerate(self.algorithms):
            first = self.firsts[number]
            start = self.starts[number]
            received = start.models
            if not algorithm.topology.on_server:
                received = jax.eval_shape(tree.stack_one, first.model)
            predict = functools.partial(self.first_prediction, number)
            shapes.append(
                jax.eval_shape(predict, key, first.row, start.state, received, self.clients)
            )
        return Packing.from_shapes(shapes)

    def first_prediction(
        self,
        number: int,
        key: Key,
        row: PyTree,
        server: PyTree,
        received: Params,
        clients: ClientData,
    ) -> tuple:
        """What client 0 would predict with before the first round, with network `number`."""
        zero = jnp.zeros((), jnp.int32)
        index = zero[None]
        if jax.tree.leaves(received):
            index = jnp.zeros((tree.num_rows(received),), jnp.int32)
        context = ClientContext(key, zero, zero, index, server, zero)
        return self.resolved(number, context, received, row, view(clients, zero))

    def switch(self, group: Array, branch: Callable[[int], PyTree]) -> PyTree:
        """branch(number) for the number that `group` has; with the structure that the first one returns."""
        structures = {}

        def leaves_of_branch(number: int) -> list[Array]:
            leaves, structures[number] = jax.tree.flatten(branch(number))
            return [jnp.asarray(leaf) for leaf in leaves]

        numbers = range(len(self.algorithms))
        branches = [functools.partial(leaves_of_branch, number) for number in numbers]
        try:
            leaves = jax.lax.switch(group, branches)
        except TypeError as error:
            raise (self.differs() if "branch" in str(error) else error) from error
        if 0 not in structures:  # nothing is compiled, so that only one branch was called
            jax.eval_shape(branches[0])
        return jax.tree.unflatten(structures[0], leaves)

    def received(self, number: int, models: Params) -> Params:
        """Received models (J, ...) in a network's own structure."""
        if not self.algorithms[number].topology.on_server:
            return tree.stack_one(self.models.unpack(number, tree.first(models)))
        return formed(self.starts[number].models, models)

    def within(self, number: int, context: ClientContext) -> ClientContext:
        """A context with the server's state and optimizers in a network's own structure."""
        context = context._replace(server=formed(self.starts[number].state, context.server))
        if context.optimizer is None:
            return context
        state = self.optimizer_packing.unpack(number, context.optimizer.state)
        return context._replace(optimizer=KeptOptimizer(state, context.optimizer.started))

    def first_row(self, key: Key, client: Array, start: Start) -> First:
        group = self.groups.number_of(client)

        def branch(number: int) -> First:
            own_start = formed(self.starts[number], start)
            first = self.algorithms[number].first_row(key, client, own_start)
            return First(
                row=self.rows.pack(number, first.row),
                model=self.models.pack(number, first.model),
                opt_state=self.opt_states.pack(number, first.opt_state),
            )

        first = self.switch(group, branch)
        return first._replace(row=Row(group, first.row))

    def client_update(
        self, context: ClientContext, models: Params, row: Row, data: ClientData
    ) -> ClientOutput:
        def branch(number: int) -> ClientOutput:
            algorithm = self.algorithms[number]
            own_context = self.within(number, context)
            own_row = self.rows.unpack(number, row.packed_row)
            received = self.received(number, models)
            output = algorithm.client_update(own_context, received, own_row, data)
            # Pack its own model, if it has one, its optimizer and its row.
            if not algorithm.topology.on_server:
                packed = self.models.pack(number, tree.first(output.upload.update))
                upload = output.upload._replace(update=tree.stack_one(packed))
                output = output._replace(upload=upload)
            opt_state = ()
            if keeps_optimizers(self.problem):
                opt_state = self.optimizer_packing.pack(number, output.opt_state)
            return output._replace(row=self.rows.pack(number, output.row), opt_state=opt_state)

        output = self.switch(row.group, branch)
        return output._replace(row=Row(row.group, output.row))

    def for_row(self, name: str, context: ClientContext, row: Row, *args: Any) -> PyTree:
        """What function `name` of the client's algorithm returns for (context, row, ...)."""

        def branch(number: int) -> PyTree:
            function = getattr(self.algorithms[number], name)
            own_context = self.within(number, context)
            own_row = self.rows.unpack(number, row.packed_row)
            return function(own_context, own_row, *args)

        return self.switch(row.group, branch)

    def download(self, context: ClientContext, row: Row, cohort: Cohort) -> Array:
        return self.for_row("download", context, row, cohort)

    def select_models(self, context: ClientContext, row: Row, size: Array) -> Mixture:
        return self.for_row("select_models", context, row, size)

    def collaboration(self, context: ClientContext, row: Row) -> Mapping[str, Array]:
        def branch(number: int) -> Mapping[str, Array]:
            collaboration = self.algorithms[number].report.collaboration
            assert collaboration is not None
            own_context = self.within(number, context)
            own_row = self.rows.unpack(number, row.packed_row)
            return collaboration(own_context, own_row)

        return self.switch(row.group, branch)

    def resolved(
        self, number: int, context: ClientContext, received: Params, row: PyTree, data: ClientData
    ) -> tuple:
        """What a client of a group predicts with: models, their weights and further inputs."""
        algorithm = self.algorithms[number]
        prediction = Prediction()
        if algorithm.predict:
            prediction = algorithm.predict(context, received, row, data)
        weights = None
        if algorithm.select_models:
            weights = algorithm.select_models(context, row, data.train.size).weights
        return parts_of(resolved(prediction, received, weights))

    def packed(self, group: Array, branch: Callable[[int], tuple]) -> Prediction:
        """A prediction with the packed result of a branch, as if that was one model."""

        def packed_branch(number: int) -> Packed:
            return self.predictions.pack(number, branch(number))

        packed = self.switch(group, packed_branch)
        return Prediction(tree.stack_one(packed), jnp.ones((1,)), inputs=group)

    def unpacked(self, number: int, models: Params) -> Prediction:
        """A client's prediction as the algorithm of its group made it."""
        models, weights, inputs = self.predictions.unpack(number, tree.first(models))
        return Prediction(models, weights, None, inputs)

    def predicted(
        self, context: ClientContext, models: Params, row: Row, data: ClientData
    ) -> Prediction:
        def branch(number: int) -> tuple:
            own_row = self.rows.unpack(number, row.packed_row)
            received = self.received(number, models)
            own_context = self.within(number, context)
            return self.resolved(number, own_context, received, own_row, data)

        return self.packed(row.group, branch)

    def adapt(self, context: ClientContext, models: Params, data: ClientData) -> Prediction:
        def branch(number: int) -> tuple:
            algorithm = self.algorithms[number]
            own_context = self.within(number, context)
            own_models = formed(self.starts[number].models, models)
            if algorithm.adapt is None:
                return self.resolved(number, own_context, own_models, (), data)
            prediction = algorithm.adapt(own_context, own_models, data)
            return parts_of(resolved(prediction, own_models))

        return self.packed(self.groups.in_turns(context.client), branch)

    def tune(self, context: ClientContext, prediction: Prediction, data: ClientData) -> Prediction:
        def branch(number: int) -> tuple:
            own_prediction = self.unpacked(number, prediction.models)
            tune = self.algorithms[number].engine.tune
            assert tune is not None
            own_context = self.within(number, context)
            return parts_of(tune(own_context, own_prediction, data))

        return self.packed(prediction.inputs, branch)

    def apply(self, models: Params, group: Array, x: PyTree) -> Array:
        def branch(number: int) -> Array:
            prediction = self.unpacked(number, models)
            return self.outputs(self.problems[number], self.algorithms[number], prediction, x)

        return self.switch(group, branch)


def parts_of(prediction: Prediction) -> tuple:
    """Models, weights and further inputs."""
    return prediction.models, prediction.weights, prediction.inputs


def shapes_of(values: PyTree) -> tuple:
    """Shape and dtype of each leaf."""
    leaves = jax.tree.leaves(values)
    return tuple((tuple(jnp.shape(leaf)), str(jnp.result_type(leaf))) for leaf in leaves)


def formed(like: PyTree, values: PyTree) -> PyTree:
    """The leaves of one tree in the structure of another."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(values))
