"""What the clients' predictions depend on, found by tracing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax.contract.held import taking
from pfljax.contract.types import ClientData, Key, PyTree, State
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_host_plan
from pfljax.folder import fingerprint
from pfljax.run.compiled import used_inputs
from pfljax.run.experiment import Experiment
from pfljax.stores.registry import store_of


class Dependence(NamedTuple):
    """Whether a prediction depends on an array: trees of bool.

    Attributes:
        state: The method's state.
        clients: The clients' data.
    """

    state: State
    clients: ClientData

    @property
    def on_examples(self) -> bool:
        """Whether clients read their own examples, other than their number, before they predict."""
        splits = (self.clients.train, self.clients.validation)
        return any(jax.tree.leaves([(split.x, split.y) for split in splits]))

    @property
    def on_own_arrays(self) -> bool:
        """Whether clients predict with something that they hold themselves."""
        row = self.state.rows
        method_row = getattr(row, "state", row)  # without the stages' notes
        return any(jax.tree.leaves((method_row, self.state.clients.model)))

    @property
    def on_server_models(self) -> bool:
        """Whether clients predict with models of the server."""
        return any(jax.tree.leaves(self.state.server.models))


def trace_predictions(experiment: Experiment) -> Dependence | None:
    """Returns what clients' predictions depend on; None if they cannot be traced, because they read values.

    Clients whose state is on disk and that never took part begin with what they would have begun with, which may depend
    on examples, too.
    """
    plan = make_host_plan()
    problem = experiment.problem._replace(plan=plan)
    algorithm = experiment.algorithm(plan)
    arguments = fingerprint.shapes(problem, algorithm, experiment)
    outputs = fingerprint.predicted(problem, algorithm)
    is_on_disk = store_of(experiment).on_disk

    def predictions(key: Key, state: State, ids: Any, clients: ClientData) -> PyTree:
        served = lifting.serve(algorithm, plan, outputs, key, state, ids, clients)
        start = algorithm.start(key, clients) if is_on_disk else ()
        return served.outputs, start

    ids = jax.ShapeDtypeStruct((problem.num_clients,), np.int32)
    args = (arguments.key, arguments.state, ids, arguments.clients)
    network = problem.model.network
    try:
        used = used_arguments(taking(network, predictions), args, network.frozen_on_host)
    except jax.errors.JAXTypeError:
        return None
    _, state, _, clients = used
    return Dependence(state, clients)


def used_arguments(function: Callable, args: tuple, frozen: PyTree) -> tuple:
    """Returns trees of bool like `args`: whether a result of the function depends on the array."""
    traced = jax.make_jaxpr(function)(*args, frozen=frozen)
    return used_inputs(traced, args, frozen)
