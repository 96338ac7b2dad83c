"""What training leaves in memory, and a run's keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfljax.contract.errors import OutOfMemory, RunError
from pfljax.contract.types import Algorithm, ClientData, Key, State, Topology
from pfljax.exchange.lifting import Use
from pfljax.exchange.plan import ExecutionPlan
from pfljax.folder import files
from pfljax.folder.folders import CLIENTS
from pfljax.folder.history import History
from pfljax.local.privacy import secret_key
from pfljax.run.experiment import Experiment
from pfljax.run.replicates import ONE
from pfljax.stores import stacks
from pfljax.stores.registry import store_of


@dataclasses.dataclass(eq=False)
class Outcome:
    """The outcome of a run."""

    summary: dict  # content of summary.json
    history: History  # all evaluations
    experiment: Experiment  # the run
    plan: ExecutionPlan  # how clients are mapped to devices
    key: Key  # the key of the last evaluation
    clients: ClientData  # the clients' data, where the run stores them
    # The final state; an error if further rounds overwrote it, or it cannot be read
    state: State | RunError

    def whole_state(self) -> State:
        """Returns the final state with all clients' rows. Raises `OutOfMemory` if these are on disk and do not fit."""
        if isinstance(self.state, RunError):
            raise self.state
        return stacks.in_memory(self.state)

    def serve(self, use: Callable[[Algorithm], Use], clients: Sequence[int]) -> Any:
        """Returns what `use` of the method makes of these clients' predictions that were scored last, stacked."""
        if isinstance(self.state, RunError):
            raise self.state
        experiment = self.experiment
        store = store_of(experiment)
        build = functools.partial(experiment.algorithm, self.plan)
        ids = np.asarray(clients, np.int32)
        num_clients = experiment.federation.num_clients
        trained = store.put(self.plan, ONE, [self.history.has_trained], num_clients)
        return store.serve(
            experiment, build, self.plan, use, ids, self.key, self.state, self.clients, trained
        )

    def detach(self) -> None:
        """Copies the state to host memory, since the next rounds overwrite it."""
        try:
            self.state = stacks.copied(self.whole_state())
        except OutOfMemory as error:
            text = "the run was trained further, and its earlier state was not kept"
            self.state = OutOfMemory(f"{text}: {error}")


def saved_outcome(experiment: Experiment, out: Path, summary: dict) -> Outcome:
    """Returns the outcome of a finished run from its folder. Its state is in host memory or on disk.

    Raises `ArgumentError` if the run's model is not that of the folder.
    """
    from pfljax.folder import checkpoints  # orbax is slow to import

    done = summary["last"]["round"]
    key = jax.random.key(experiment.seed)
    experiment = dataclasses.replace(experiment, directory=out / CLIENTS)
    store = store_of(experiment)
    federation = experiment.federation
    plan = experiment.problem.plan
    num_clients = federation.num_clients
    clients = store.put(plan, ONE, [federation.client_data], num_clients)
    read = functools.partial(checkpoints.read, out / "checkpoints", done)
    try:
        state = store.read_saved(experiment, read, clients)
    except RunError as error:  # an earlier version's, which `predict` raises
        state = error
    recorded = files.read_npz(out / "collaboration.npz")
    topology = Topology(str(recorded["topology"]))
    history = History(experiment, out, done, topology, summary["scored"])
    secret = secret_key(experiment.noise_seeds, key)
    key = make_key(experiment, key, secret, 2, done)
    if (
        experiment.phases is not None
    ):  # the models began on the first clients, and predict for the last ones
        experiment = experiment.in_round(done)
        clients = store.put(plan, ONE, [experiment.federation.client_data], num_clients)
    return Outcome(summary, history, experiment, plan, key, clients, state)


def make_key(experiment: Experiment, key: Key, secret: Key, purpose: int, done: int) -> Key:
    """Returns a run's key after `done` rounds, for its initial state (0), rounds (1), predictors (2) or newcomers (3).

    With private noise, no two predictors share theirs.
    """
    known = jax.random.fold_in(key, purpose)
    hidden = jax.random.fold_in(secret, purpose)
    if purpose == 1:
        return experiment.keys(known, hidden)
    if purpose == 2 and experiment.noise_seeds:
        return jax.random.fold_in(hidden, done)
    return hidden if purpose else known
