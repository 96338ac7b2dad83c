"""Descriptions of a run: its settings and environment for config.json, and its plan for the user."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfljax.contract import tree
from pfljax.contract.pooled import is_pooled
from pfljax.contract.types import Examples, PyTree, Topology
from pfljax.data import Federation
from pfljax.folder import files
from pfljax.local import lasting
from pfljax.local.training import LocalTraining
from pfljax.run import memory
from pfljax.run.compiled import Compiled
from pfljax.run.experiment import Experiment
from pfljax.settings import recorded
from pfljax.stores.registry import store_of
from pfljax.training import never_trained

# Lines of the plan that are shown in any case.
SURPRISES = (
    "slow layer",
    "evaluations",
    "batch statistics",
    "not divided",
    "features",
    "test examples",
    "replicates in one kernel",
)
STALE = 0.05  # share of the initial batch statistics from which a plan speaks of it


def settings(
    method: Any, clients: Federation, model: Any, local: LocalTraining, options: dict
) -> dict:
    """Returns the settings that must agree when a run is resumed, except functions (optimizer and schedule)."""
    names = [field.name for field in dataclasses.fields(local)]
    comparable = {
        f"local.{name}": files.plain(getattr(local, name))
        for name in names
        if name not in ("optimizer", "schedule")
    }
    if not isinstance(local.loss, str):
        comparable["local.loss"] = _name(local.loss)
    name = method.info.name
    hyperparameters = dataclasses.asdict(method)
    values = {"method": name}
    values |= {
        f"{name}.{hyperparameter}": value for hyperparameter, value in hyperparameters.items()
    }
    values["model"] = repr(model) if dataclasses.is_dataclass(model) else _name(model)
    values |= comparable
    values |= options
    values["num_clients"] = clients.num_clients
    values["partition"] = clients.index_digest
    return values


def _name(value: Any) -> str:
    """The name of a function or class, or of an object's class."""
    return getattr(value, "__name__", type(value).__name__)


def config(
    method: Any,
    clients: Federation,
    model: Any,
    local: LocalTraining,
    participation: float,
    options: dict,
) -> dict:
    """Returns "settings", and "parts": what the run can be made again from, without what cannot be recorded."""
    options = options | {"participation": participation}
    parts = {"method": method, "model": model}
    for name, value in recorded.fields(local).items():
        parts[f"local.{name}"] = value
    parts = recorded.recordable(parts | options)
    if clients.origin:
        parts["clients"] = clients.origin
    texts = {
        name: repr(value) for name, value in options.items() if dataclasses.is_dataclass(value)
    }
    if options.get("stop") is not None and "stop" not in texts:
        texts["stop"] = "a function"  # whose code belongs to the program
    names = [getattr(make, "__qualname__", repr(make)) for make in options.get("own_stages", ())]
    texts["own_stages"] = ", ".join(names) or "none"
    if "drift" in options:
        texts["drift"] = ", ".join(map(repr, options["drift"]))
    return {"settings": settings(method, clients, model, local, options | texts), "parts": parts}


def environment() -> dict:
    """Returns versions, device and git commit for config.json."""
    folder = Path(__file__).parent
    command = ["git", "rev-parse", "HEAD"]
    try:
        git = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or None
    except OSError:  # git is not installed
        commit = None
    device = jax.local_devices()[0]
    versions = {"python": platform.python_version()}
    for name in ("jax", "flax", "optax", "numpy"):
        versions[name] = importlib.metadata.version(name)
    return {
        "versions": versions,
        "device": f"{len(jax.local_devices())} x {device.device_kind} ({device.platform})",
        "git_commit": commit,
    }


def inputs(scaling: Any, examples: Any) -> str:
    """Describes the scale of examples, given their shapes."""
    if scaling is None:
        return "as the data set gives them"

    def unit(mean: Any, x: Any) -> str:
        """What has a mean and a standard deviation of its own; "" if a leaf is not scaled."""
        if mean is None:
            return ""
        is_image = len(x.shape) == 3
        return "channel" if is_image or mean.ndim == 0 else "feature"

    units = jax.tree.map(unit, scaling.mean, examples, is_leaf=lambda leaf: leaf is None)
    scaled = sorted(set(jax.tree.leaves(units)) - {""})
    return f"standardized: mean 0 and standard deviation 1 per {' or '.join(scaled)}"


def features(experiment: Experiment) -> list[tuple[str, str]]:
    """Says what is computed once per example, or why nothing is though layers are frozen."""
    if experiment.features:
        return [("features", experiment.features.line)]
    if experiment.not_cached:
        return [("features", f"computed in every step: {experiment.not_cached}")]
    return []


def examples(x: Examples) -> str:
    """Describes how the examples of a split are stored."""
    if not hasattr(x, "shape"):
        leaves, _ = jax.tree.flatten_with_path(x, is_leaf=is_pooled)
        texts = {jax.tree_util.keystr(path): examples(leaf) for path, leaf in leaves}
        return join_texts(texts)
    if not is_pooled(x):
        return "one copy per client, no larger than an index"
    copies = memory.readable(x.dtype.itemsize * math.prod(x.shape))
    where = "each device holds its clients' part" if x.spread else "shared by all devices"
    return f"a pool with an index, {where}; one copy per client would take {copies}"


def plan_lines(compiled: Compiled, data: Any, experiment: Experiment) -> list[tuple[str, Any]]:
    """Returns the lines of the memory plan, (name, bytes or text): totals of the run, and what each device needs."""
    plan = compiled.plan
    memory_needed = compiled.memory
    algorithm = compiled.algorithm
    problem = experiment.problem
    store = store_of(experiment)
    num_clients = experiment.federation.num_clients
    gradients = experiment.gradients(algorithm)
    stored = {part: examples(split.x) for part, split in data.items()}
    lines: list[tuple[str, Any]] = []

    # Networks and bytes.
    if problem.groups:
        lines.append(("networks", problem.groups.described(num_clients)))
    frozen = tree.num_bytes(problem.model.network.frozen_in_program)
    if frozen:
        lines.append(("frozen parameters, held once", frozen))
    lines += [
        ("models", tree.num_bytes(compiled.state.models)),
        ("optimizer", tree.num_bytes(compiled.state.opt_state)),
        ("per-client state", tree.num_bytes(compiled.state.rows)),
        ("data", _num_bytes_of_data(data)),
        ("inputs", inputs(experiment.federation.scaling, experiment.inputs)),
        *features(experiment),
        ("examples", join_texts(stored)),
        ("arguments, per device", memory_needed.arguments),
        ("other outputs, per device", memory_needed.outputs),
        ("temporaries, per device", memory_needed.temporaries),
        ("device memory", memory_needed.limit),
    ]

    # How a round is played.
    lines += _lines_of_execution(compiled, experiment)
    lines.append(
        ("gradients per client and round", f"{gradients:,.4g} on average, of mini-batches")
    )
    exchange = plan.exchange_of(algorithm.topology, _models_of_cohort(compiled, experiment))
    lines.append(("exchange", exchange))
    lines.append(("clients' state and data", store.home))
    if compiled.saving is not None and store.on_disk:
        lines.append(("disk, at most", compiled.saving.check(problem.rounds)))

    # What may surprise.
    slow_layers: dict[str, None] = {}
    for model in problem.models:
        slow_layers |= dict.fromkeys(model.slow_layers(plan.device.platform))
    lines += [("slow layer", layer) for layer in slow_layers]
    stale = stale_statistics(experiment)
    if stale:
        lines.append(("batch statistics", stale))
    lasting_state = state_of_optimizer(experiment, algorithm.topology)
    if lasting_state:
        lines.append(("optimizer's state", lasting_state))
    lines += surroundings(experiment)
    if num_clients % plan.num_devices and store.on_devices:
        clients = f"{num_clients} clients over {plan.num_devices} devices"
        lines.append(("not divided", f"{clients}: each device holds all"))
    return lines


def short_lines(
    compiled: Compiled, experiment: Experiment, outs: Sequence[Path]
) -> list[tuple[str, str]]:
    """Returns the plan in short: method, clients, rounds, memory, and what is written.

    Args:
        compiled: The compiled run.
        experiment: The run, or one of several.
        outs: Folders of the runs; empty: nothing is written.
    """
    problem = experiment.problem
    federation = experiment.federation
    needed = compiled.memory
    examples_of_all = int(np.asarray(federation.train.size).sum())
    clients = f"{problem.num_clients:,} with {examples_of_all:,} training examples"
    state_bytes = tree.num_bytes((compiled.state.server, compiled.state.clients))
    device_bytes = needed.arguments + needed.outputs + needed.temporaries
    limit = f" of {memory.readable(needed.limit)}" if needed.limit else ""
    per_device = f"{memory.readable(device_bytes)}{limit} per device"
    execution = dict(_lines_of_execution(compiled, experiment))

    # Rounds, and who takes part in none of them.
    chance = problem.chance
    cohort = (
        f"{problem.cohort_size:,}" if chance is None else f"about {problem.expected_clients:,.4g}"
    )
    rounds = f"{problem.rounds:,}, with {cohort} clients in each"
    never = never_trained.forecast(experiment, compiled.algorithm, compiled.state)
    rounds = f"{rounds}; {never}" if never else rounds

    # What is written.
    written = "nothing: the run has no folder"
    if outs:
        others = f" and {len(outs) - 1} more" if len(outs) > 1 else ""
        written = f"{outs[0]}{others}, with checkpoints of {memory.readable(state_bytes)}"
    return [
        ("method", str(experiment.method)),
        ("clients", clients),
        ("rounds", rounds),
        ("memory", f"{per_device}; {execution['plan']}"),
        ("files", written),
    ]


def _num_bytes_of_data(data: Any) -> int:
    """Bytes of the arrays, of which splits may share some."""
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(data)}
    return sum(array.nbytes for array in arrays.values())


def _lines_of_execution(compiled: Compiled, experiment: Experiment) -> list[tuple[str, str]]:
    """How many clients a device computes at a time, and how much of that is idle."""
    plan = compiled.plan
    size = experiment.problem.cohort_size
    per_device = -(-size // plan.num_devices)
    kind = {0: "vmap", 1: "map"}.get(plan.chunk, "chunk")
    at_once = str(min(plan.chunk or per_device, per_device))
    if plan.buckets:
        at_once = ", then ".join(f"{count} x {width}" for width, count in plan.buckets)
    most = "at most " if plan.in_cache else ""
    clients = f"{most}{at_once} of {per_device} clients at a time"
    idle = 100 * plan.waiting(experiment.steps, size)
    return [
        ("plan", f"{kind}: {clients}, {plan.devices_in_words}"),
        ("idle steps", f"{most}{idle:.1f} %"),
    ]


def _models_of_cohort(compiled: Compiled, experiment: Experiment) -> PyTree:
    """Shapes of the models that are exchanged in a round."""
    models = compiled.state.models
    if compiled.algorithm.topology.on_server:
        return models
    return tree.shapes_of_rows(models, experiment.problem.cohort_size)


def stale_statistics(experiment: Experiment) -> str:
    """Says that a normalization's averages will hardly have left their initial values; "" if they will have."""
    momenta = [
        momentum for model in experiment.problem.models for momentum in model.network.momenta
    ]
    momentum = max(momenta, default=0.0)
    steps = experiment.problem.rounds * float(experiment.steps.mean())
    share = momentum**steps
    if share <= STALE:
        return ""
    initial = f"{100 * share:.0f} % of the initial values after {steps:,.0f} steps"
    return f"momentum {momentum:g} keeps {initial}; lower it, or predictions may be poor"


def state_of_optimizer(experiment: Experiment, topology: Topology) -> str:
    """Says what of the clients' optimizer goes on over rounds; "" if it has no state."""
    problem = experiment.problem
    optimizer = problem.solver.optimizer
    shapes = problem.model.network.shapes
    if not jax.tree.leaves(jax.eval_shape(optimizer.init, shapes)):
        return ""
    if not topology.moves or problem.keep_optimizer:
        return "all of it goes on over rounds"
    shared = lasting.described(optimizer, shapes)
    return f"for shared models, {shared}; for clients' own models, all goes on"


def join_texts(texts: dict[str, str]) -> str:
    """Joins the texts on several parts; a single text if all are the same."""
    different = set(texts.values())
    if len(different) == 1:
        return different.pop()
    return "; ".join(f"{part}: {text}" for part, text in texts.items())


def surroundings(experiment: Experiment) -> list[tuple[str, str]]:
    """Returns the lines of the plan on what stands between clients and server, other than the defaults."""
    server = experiment.server
    attack = experiment.attack
    compression = experiment.compression
    client_privacy = experiment.client_privacy
    clients = experiment.federation
    clock = experiment.problem.clock
    chance = experiment.problem.chance
    size = experiment.problem.cohort_size
    lines: list[tuple[str, str]] = []
    if clients.official_test:
        lines.append(("test examples", "the data set's own"))
    elif clients.official_test is not None:
        drawn = "drawn from each client's examples; the data set's own are not used"
        lines.append(("test examples", drawn))
    if server.sampler != "uniform":
        lines.append(("cohorts", server.sampler))
    if server.aggregator != "mean":
        lines.append(("aggregator", server.described(size)))
    if attack.active:
        num = 0 if clients.attacker is None else int(clients.attacker.sum())
        lines.append(("attackers", f"{num} of {clients.num_clients} clients, {attack.kind}"))
    phases = experiment.phases
    if phases is not None:
        for drift, changed in zip(phases.drifts, phases.changed, strict=True):
            lines.append(("drift", f"{drift}, of {len(changed)} clients"))
    if compression.upload != "none":
        lines.append(("compressed uploads", compression.described))
    if compression.download != "none":
        lines.append(("compressed downloads", compression.download))
    if clock:
        lines.append(("clock", clock.described))
    if experiment.faults.active:
        lines.append(("faults", experiment.faults.described))
    if client_privacy.active:
        lines.append(("client privacy", client_privacy.described))
    if chance is not None:
        taking_part = f"each client takes part with probability {chance:g}"
        lines.append(("cohorts", f"{taking_part}; at most {size} in a round"))
    if server.secure_aggregation:
        lines.append(("secure aggregation", "the server sees sums only"))
    return [(name, text) for name, text in lines if text]
