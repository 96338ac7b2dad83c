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
from collections.abc import Callable, Iterable
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
    First,
    KeptOptimizer,
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
    def of(cls, shapes: Iterable[PyTree]) -> Packing:
        """A packing for trees with these shapes."""
        shapes = tuple(shapes)
        sizes = Counter[str]()
        for each in shapes:
            total = Counter[str]()
            for leaf in jax.tree.leaves(each):
                total[str(leaf.dtype)] += math.prod(leaf.shape)
            sizes |= total  # the larger number of each dtype
        return cls(shapes, dict(sizes))

    def pack(self, number: int, unpacked: PyTree) -> Packed:
        """Tree `number` as arrays, by dtype."""
        if shapes_of(unpacked) != shapes_of(self.shapes[number]):
            raise TypeError(
                f"got arrays {shapes_of(unpacked)}; expected {shapes_of(self.shapes[number])}"
            )
        parts: dict[str, list[Array]] = {name: [] for name in self.sizes}
        for leaf in map(jnp.asarray, jax.tree.leaves(unpacked)):
            parts[str(leaf.dtype)].append(leaf.reshape(-1))
        packed = {}
        for name, leaves in parts.items():
            padding = self.sizes[name] - sum(leaf.size for leaf in leaves)
            packed[name] = jnp.concatenate([*leaves, jnp.zeros((padding,), name)])
        return packed

    def unpack(self, number: int, packed: Packed) -> PyTree:
        """Undoes `pack`."""
        taken = Counter[str]()

        def take(leaf):
            name = str(leaf.dtype)
            size = math.prod(leaf.shape)
            taken[name] += size
            return packed[name][taken[name] - size : taken[name]].reshape(leaf.shape)

        return jax.tree.map(take, self.shapes[number])


class Row(NamedTuple):
    """A client's group, () int32, and what it keeps, packed."""

    group: Array
    kept: Packed


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
        chooses_models = any(algorithm.whom for algorithm in self.algorithms)
        tunes = any(algorithm.engine.tune for algorithm in self.algorithms)
        collaboration = self.collaboration if base.report.collaboration else None
        return dataclasses.replace(
            base,
            first_row=self.first_row,
            download=self.download if downloads else None,
            client_update=self.client_update,
            whom=self.whom if chooses_models else None,
            predict=self.predicted,
            apply=self.apply,
            adapt=self.adapt,
            fine_tuned=None,
            report=dataclasses.replace(base.report, collaboration=collaboration),
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
        return ArgumentError(
            "model",
            f"{text}; accepted: methods that send what all have, such as prototypes or heads",
        )

    @functools.cached_property
    def starts(self) -> list[Start]:
        """Shapes of what the server begins with, in the structure of each network."""
        key = jax.eval_shape(jax.random.key, 0)
        return [jax.eval_shape(each.start, key, self.clients) for each in self.algorithms]

    @functools.cached_property
    def firsts(self) -> list[First]:
        """Shapes of what a client of each group begins with."""
        args = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), jnp.int32)
        return [
            jax.eval_shape(a.first_row, *args, s)
            for a, s in zip(self.algorithms, self.starts, strict=True)
        ]

    @functools.cached_property
    def rows(self) -> Packing:
        """The packing of rows."""
        return Packing.of(first.row for first in self.firsts)

    @functools.cached_property
    def models(self) -> Packing:
        """The packing of clients' own models."""
        return Packing.of(first.model for first in self.firsts)

    @functools.cached_property
    def opt_states(self) -> Packing:
        """The packing of their optimizer states."""
        return Packing.of(first.opt_state for first in self.firsts)

    @functools.cached_property
    def optimizer_packing(self) -> Packing:
        """The packing of optimizer states that the engine keeps for clients."""
        found = []
        for problem, algorithm in zip(self.problems, self.algorithms, strict=True):
            shapes = shapes_of_client(algorithm, self.clients, problem.cohort_size)
            found.append(shapes.output.opt_state)
        return Packing.of(found)

    @functools.cached_property
    def predictions(self) -> Packing:
        """The packing of models, weights and inputs of predictions."""

        def one(number, algorithm, key, row, server, received, clients):
            data = view(clients, jnp.zeros((), jnp.int32))
            zero = jnp.zeros((), jnp.int32)
            index = (
                jnp.zeros((tree.num_rows(received),), jnp.int32)
                if jax.tree.leaves(received)
                else zero[None]
            )
            return self.resolved(
                number, ClientContext(key, zero, zero, index, server, zero), received, row, data
            )

        shapes = []
        for number, (algorithm, first, start) in enumerate(
            zip(self.algorithms, self.firsts, self.starts, strict=True)
        ):
            received = start.models
            if not algorithm.topology.on_server:
                received = jax.eval_shape(tree.stack_one, first.model)
            key = jax.eval_shape(jax.random.key, 0)
            run = functools.partial(one, number, algorithm)
            shapes.append(jax.eval_shape(run, key, first.row, start.state, received, self.clients))
        return Packing.of(shapes)

    def switch(self, group: Array, branch: Callable[[int], PyTree]) -> PyTree:
        """branch(number) for the number that `group` has; with the structure that the first one returns."""
        structures = {}

        def run(number):
            leaves, structures[number] = jax.tree.flatten(branch(number))
            return [jnp.asarray(leaf) for leaf in leaves]

        try:
            found = jax.lax.switch(
                group, [functools.partial(run, number) for number in range(len(self.algorithms))]
            )
        except TypeError as error:
            raise (self.differs() if "branch" in str(error) else error) from error
        if 0 not in structures:  # nothing is compiled, so that only one branch was called
            jax.eval_shape(functools.partial(run, 0))
        return jax.tree.unflatten(structures[0], found)

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

    def first_row(self, key, client, start):
        group = self.groups.number_of(client)

        def branch(number):
            first = self.algorithms[number].first_row(
                key, client, formed(self.starts[number], start)
            )
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
            kept = self.rows.unpack(number, row.kept)
            output = algorithm.client_update(own_context, self.received(number, models), kept, data)
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

    def of_row(self, name: str, context: ClientContext, row: Row, *args: Any) -> PyTree:
        """What function `name` of the client's algorithm returns for (context, row, ...)."""

        def branch(number):
            function = getattr(self.algorithms[number], name)
            return function(self.within(number, context), self.rows.unpack(number, row.kept), *args)

        return self.switch(row.group, branch)

    def download(self, context, row, cohort):
        return self.of_row("download", context, row, cohort)

    def whom(self, context, row, size):
        return self.of_row("whom", context, row, size)

    def collaboration(self, context, row):
        def branch(number):
            of_client = self.algorithms[number].report.collaboration
            assert of_client is not None
            return of_client(self.within(number, context), self.rows.unpack(number, row.kept))

        return self.switch(row.group, branch)

    def resolved(self, number, context, received, row, data):
        """What a client of a group predicts with: models, their weights and further inputs."""
        algorithm = self.algorithms[number]
        made = (
            algorithm.predict(context, received, row, data) if algorithm.predict else Prediction()
        )
        weights = algorithm.whom(context, row, data.train.size).weights if algorithm.whom else None
        return parts_of(resolved(made, received, weights))

    def packed(self, group: Array, branch: Callable[[int], tuple]) -> Prediction:
        """A prediction with the packed result of a branch, as if that was one model."""
        found = self.switch(group, lambda number: self.predictions.pack(number, branch(number)))
        return Prediction(tree.stack_one(found), jnp.ones((1,)), inputs=group)

    def unpacked(self, number: int, models: Params) -> Prediction:
        """A client's prediction as the algorithm of its group made it."""
        models, weights, inputs = self.predictions.unpack(number, tree.first(models))
        return Prediction(models, weights, None, inputs)

    def predicted(self, context, models, row, data):
        def branch(number):
            kept = self.rows.unpack(number, row.kept)
            received = self.received(number, models)
            return self.resolved(number, self.within(number, context), received, kept, data)

        return self.packed(row.group, branch)

    def adapt(self, context, models, data):
        def branch(number):
            algorithm = self.algorithms[number]
            own = self.within(number, context)
            models_of = formed(self.starts[number].models, models)
            if algorithm.adapt is None:
                return self.resolved(number, own, models_of, (), data)
            return parts_of(resolved(algorithm.adapt(own, models_of, data), models_of))

        return self.packed(self.groups.in_turns(context.client), branch)

    def tune(self, context, prediction, data):
        def branch(number):
            before = self.unpacked(number, prediction.models)
            tune_one = self.algorithms[number].engine.tune
            assert tune_one is not None
            return parts_of(tune_one(self.within(number, context), before, data))

        return self.packed(prediction.inputs, branch)

    def apply(self, models, group, x):
        def branch(number):
            return self.outputs(
                self.problems[number], self.algorithms[number], self.unpacked(number, models), x
            )

        return self.switch(group, branch)


def parts_of(prediction: Prediction) -> tuple:
    """Models, weights and further inputs."""
    return prediction.models, prediction.weights, prediction.inputs


def shapes_of(found: PyTree) -> tuple:
    """Shape and dtype of each leaf."""
    return tuple(
        (tuple(jnp.shape(leaf)), str(jnp.result_type(leaf))) for leaf in jax.tree.leaves(found)
    )


def formed(like: PyTree, found: PyTree) -> PyTree:
    """The leaves of one tree in the structure of another."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(found))
