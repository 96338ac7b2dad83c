"""Descriptions of a run: its settings and environment for config.json, and its plan for the user."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

from pfljax.core import tree
from pfljax.core.pooled import is_pooled
from pfljax.core.types import Algorithm, Examples
from pfljax.data import Federation
from pfljax.local.training import LocalTraining
from pfljax.training import files, memory
from pfljax.training.compiled import Compiled
from pfljax.training.experiment import Experiment

HOME = {
    "device": "on the device(s)",
    "host": "on the host, of a round on the device(s)",
    "disk": "rows on the disk and data on the host, of a round on the device(s)",
}


def settings(method: Any, clients: Federation, model: Any, local: LocalTraining, options: dict) -> dict:
    """What must agree where a run is resumed; optimizers and schedules are functions, which cannot be compared."""
    named = [field.name for field in dataclasses.fields(local) if field.name not in ("optimizer", "schedule")]
    comparable = {f"local.{name}": files.plain(getattr(local, name)) for name in named}
    knobs = {f"{method.info.name}.{name}": value for name, value in dataclasses.asdict(method).items()}
    text = repr(model) if dataclasses.is_dataclass(model) else getattr(model, "__name__", type(model).__name__)
    found = {"algorithm": method.info.name, **knobs, "model": text, **comparable, **options}
    return found | {"num_clients": clients.num_clients, "partition": clients.index_digest}


def environment() -> dict:
    """Versions, device and git commit, for config.json."""
    folder = Path(__file__).parent
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
        commit = asked.stdout.strip() or None
    except OSError:  # there is no git here
        commit = None
    device = jax.local_devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "numpy")}
    return {
        "versions": {"python": platform.python_version()} | versions,
        "device": f"{len(jax.local_devices())} x {device.device_kind} ({device.platform})",
        "git_commit": commit,
    }


def mini_batches(experiment: Experiment, algorithm: Algorithm) -> int:
    """Number of mini-batches that the largest client uses in a round."""
    return math.ceil(int(experiment.steps.max(initial=0)) * algorithm.ledger.passes)


def examples(x: Examples) -> str:
    """Where a part's examples are read, in words."""
    if not is_pooled(x):
        return "a copy for each client, which takes no more than an index"
    copies = memory.readable(x.dtype.itemsize * math.prod(x.shape))
    where = "each device has those of its clients" if x.spread else "of all clients"
    return f"a pool with an index, {where}; copies would take {copies}"


def plan_lines(compiled: Compiled, data: Any, experiment: Experiment) -> list[tuple[str, Any]]:
    """Lines of the memory plan, (name, bytes or text): what the whole run holds, and what a device needs."""
    plan, needs, state, algorithm = compiled.plan, compiled.memory, compiled.state, compiled.algorithm
    size, num_clients = experiment.problem.cohort_size, experiment.federation.num_clients
    per_device = -(-size // plan.num_devices)
    at_once = min(plan.chunk or per_device, per_device)
    kind = {0: "vmap", 1: "map"}.get(plan.chunk, "chunk")
    at_once = ", then ".join(f"{count} x {width}" for width, count in plan.buckets) or at_once
    on_host = experiment.client_store != "device"
    cut = lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)
    of_round = state.models if algorithm.topology == "shared" else jax.tree.map(cut, state.models)
    lines = [
        ("models", tree.num_bytes(state.models)),
        ("optimizer", tree.num_bytes(state.optimizer)),
        ("per-client state", tree.num_bytes(state.clients)),
        ("data", sum(leaf.nbytes for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(data)}.values())),
        ("examples", "; ".join(f"{part}: {examples(split.x)}" for part, split in data.items())),
        ("arguments, per device", needs.arguments),
        ("outputs beside them, per device", needs.outputs),
        ("temporaries, per device", needs.temporaries),
        ("device memory", needs.limit),
        ("plan", f"{kind}: {at_once} of {per_device} clients at a time on each of {plan.num_devices} device(s)"),
        ("steps that wait for other clients", f"{100 * plan.waiting(experiment.steps, size):.1f} %"),
        ("mini-batches of a client, per round", f"up to {mini_batches(experiment, algorithm):,}"),
        ("exchange", plan.exchange_of(algorithm.topology, of_round)),
        ("clients' rows and data", HOME[experiment.client_store]),
    ]
    if compiled.saving is not None and experiment.client_store == "disk":
        lines.append(("disk, at most", compiled.saving.check(experiment.problem.rounds)))
    lines += surroundings(experiment)
    if num_clients % plan.num_devices and not on_host:
        lines.append(("not divided", f"{num_clients} clients by {plan.num_devices} devices: each device holds all"))
    return lines


def surroundings(experiment: Experiment) -> list[tuple[str, str]]:
    """Lines of the plan on what surrounds the method, where that is not the usual."""
    server, attack, lines = experiment.server, experiment.attack, []
    official = experiment.federation.official_test
    if official is not None:
        drawn = "a share of each client's examples; the data set's own are not used"
        lines.append(("test examples", "the data set's own" if official else drawn))
    if server.sampler != "uniform":
        lines.append(("cohorts", server.sampler))
    if server.aggregator != "mean":
        lines.append(("aggregator", server.aggregator))
    if attack.active:
        attackers = experiment.federation.attacker
        number = 0 if attackers is None else int(attackers.sum())
        lines.append(("attackers", f"{number} of {experiment.federation.num_clients} clients, {attack.kind}"))
    return lines
