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

from pfljax.contract import tree
from pfljax.contract.pooled import is_pooled
from pfljax.contract.types import Examples, Topology
from pfljax.data import Federation
from pfljax.folder import files
from pfljax.local import lasting
from pfljax.local.training import LocalTraining
from pfljax.run import memory
from pfljax.run.compiled import Compiled
from pfljax.run.experiment import Experiment
from pfljax.settings import recorded
from pfljax.stores.registry import store_of

STALE = 0.05  # share of the initial batch statistics from which a plan speaks of it


def settings(
    method: Any, clients: Federation, model: Any, local: LocalTraining, options: dict
) -> dict:
    """Returns the settings that must agree when a run is resumed, except functions (optimizer and schedule)."""
    named = [
        field.name
        for field in dataclasses.fields(local)
        if field.name not in ("optimizer", "schedule")
    ]
    comparable = {f"local.{name}": files.plain(getattr(local, name)) for name in named}
    if not isinstance(local.loss, str):
        comparable["local.loss"] = getattr(local.loss, "__name__", type(local.loss).__name__)
    knobs = {
        f"{method.info.name}.{name}": value for name, value in dataclasses.asdict(method).items()
    }
    text = (
        repr(model)
        if dataclasses.is_dataclass(model)
        else getattr(model, "__name__", type(model).__name__)
    )
    found = {"method": method.info.name, **knobs, "model": text, **comparable, **options}
    return found | {"num_clients": clients.num_clients, "partition": clients.index_digest}


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
    of_local = {f"local.{name}": value for name, value in recorded.fields(local).items()}
    parts = recorded.recordable({"method": method, "model": model, **of_local, **options})
    parts |= {"clients": clients.origin} if clients.origin else {}
    texts = {
        name: repr(value) for name, value in options.items() if dataclasses.is_dataclass(value)
    }
    if options.get("stop") is not None and "stop" not in texts:
        texts["stop"] = "a function"  # whose code belongs to the program
    names = [getattr(make, "__qualname__", repr(make)) for make in options.get("own_stages", ())]
    texts["own_stages"] = ", ".join(names) or "none"
    return {"settings": settings(method, clients, model, local, options | texts), "parts": parts}


def environment() -> dict:
    """Returns versions, device and git commit for config.json."""
    folder = Path(__file__).parent
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
        )
        commit = asked.stdout.strip() or None
    except OSError:  # git is not installed
        commit = None
    device = jax.local_devices()[0]
    versions = {
        name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "numpy")
    }
    return {
        "versions": {"python": platform.python_version()} | versions,
        "device": f"{len(jax.local_devices())} x {device.device_kind} ({device.platform})",
        "git_commit": commit,
    }


def inputs(scaling: Any, examples: Any) -> str:
    """Describes the scale of examples, given their shapes."""
    if scaling is None:
        return "as the data set gives them"

    def kind(mean, x):
        return (
            "" if mean is None else "channel" if len(x.shape) == 3 or mean.ndim == 0 else "feature"
        )

    kinds = jax.tree.map(kind, scaling.mean, examples, is_leaf=lambda leaf: leaf is None)
    per = sorted(set(jax.tree.leaves(kinds)) - {""})
    return f"standardized: mean 0 and standard deviation 1 per {' or '.join(per)}"


def features(experiment: Experiment) -> list[tuple[str, str]]:
    """Says what is computed once per example, or why nothing is though layers are frozen."""
    if experiment.features:
        return [("features", experiment.features.said)]
    return (
        [("features", f"computed in every step: {experiment.not_cached}")]
        if experiment.not_cached
        else []
    )


def examples(x: Examples) -> str:
    """Describes how the examples of a split are stored."""
    if not hasattr(x, "shape"):
        leaves, _ = jax.tree.flatten_with_path(x, is_leaf=is_pooled)
        return told_once({jax.tree_util.keystr(path): examples(leaf) for path, leaf in leaves})
    if not is_pooled(x):
        return "one copy per client, no larger than an index"
    copies = memory.readable(x.dtype.itemsize * math.prod(x.shape))
    where = "each device holds its clients' part" if x.spread else "shared by all devices"
    return f"a pool with an index, {where}; one copy per client would take {copies}"


def plan_lines(compiled: Compiled, data: Any, experiment: Experiment) -> list[tuple[str, Any]]:
    """Returns the lines of the memory plan, (name, bytes or text): totals of the run, and what each device needs."""
    plan = compiled.plan
    needs = compiled.memory
    state = compiled.state
    algorithm = compiled.algorithm
    size = experiment.problem.cohort_size
    num_clients = experiment.federation.num_clients
    per_device = -(-size // plan.num_devices)
    at_once = min(plan.chunk or per_device, per_device)
    kind = {0: "vmap", 1: "map"}.get(plan.chunk, "chunk")
    at_once = ", then ".join(f"{count} x {width}" for width, count in plan.buckets) or at_once
    most = "at most " * plan.in_cache
    store = store_of(experiment)

    def cut(leaf):
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)

    of_round = state.models if algorithm.topology.on_server else jax.tree.map(cut, state.models)
    lines = [
        ("models", tree.num_bytes(state.models)),
        ("optimizer", tree.num_bytes(state.opt_state)),
        ("per-client state", tree.num_bytes(state.rows)),
        (
            "data",
            sum(
                leaf.nbytes for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(data)}.values()
            ),
        ),
        ("inputs", inputs(experiment.federation.scaling, experiment.inputs)),
        *features(experiment),
        ("examples", told_once({part: examples(split.x) for part, split in data.items()})),
        ("arguments, per device", needs.arguments),
        ("other outputs, per device", needs.outputs),
        ("temporaries, per device", needs.temporaries),
        ("device memory", needs.limit),
        (
            "plan",
            f"{kind}: {most}{at_once} of {per_device} clients at a time, {plan.devices_in_words}",
        ),
        ("idle steps", f"{most}{100 * plan.waiting(experiment.steps, size):.1f} %"),
        (
            "gradients per client and round",
            f"{experiment.gradients(algorithm):,.4g} on average, of mini-batches",
        ),
        ("exchange", plan.exchange_of(algorithm.topology, of_round)),
        ("clients' state and data", store.home),
    ]
    if frozen := tree.num_bytes(experiment.problem.model.network.held):
        lines.insert(0, ("frozen parameters, held once", frozen))
    if compiled.saving is not None and store.on_disk:
        lines.append(("disk, at most", compiled.saving.check(experiment.problem.rounds)))
    if groups := experiment.problem.groups:
        lines.insert(0, ("networks", groups.described(num_clients)))
    slow = [
        layer
        for model in experiment.problem.models
        for layer in model.slow_layers(plan.device.platform)
    ]
    lines += [("slow layer", layer) for layer in dict.fromkeys(slow)]
    if stale := stale_statistics(experiment):
        lines.append(("batch statistics", stale))
    if kept := kept_of_optimizer(experiment, algorithm.topology):
        lines.append(("optimizer's state", kept))
    lines += surroundings(experiment)
    if num_clients % plan.num_devices and store.on_devices:
        lines.append(
            (
                "not divided",
                f"{num_clients} clients over {plan.num_devices} devices: each device holds all",
            )
        )
    return lines


def stale_statistics(experiment: Experiment) -> str:
    """Says that a normalization's averages will hardly have left their initial values; "" if they will have."""
    momentum = max(
        (each for model in experiment.problem.models for each in model.network.momenta), default=0.0
    )
    steps = experiment.problem.rounds * float(experiment.steps.mean())
    if (kept := momentum**steps) <= STALE:
        return ""
    text = f"momentum {momentum:g} keeps {100 * kept:.0f} % of the initial values after {steps:,.0f} steps"
    return f"{text}; lower it, or predictions may be poor"


def kept_of_optimizer(experiment: Experiment, topology: Topology) -> str:
    """Says what of the clients' optimizer goes on over rounds; "" if it has no state."""
    problem = experiment.problem
    optimizer = problem.solver.optimizer
    shapes = problem.model.network.shapes
    if not jax.tree.leaves(jax.eval_shape(optimizer.init, shapes)):
        return ""
    if not topology.moves or problem.keep_optimizer:
        return "all of it goes on over rounds"
    return f"for shared models, {lasting.described(optimizer, shapes)}; for clients' own models, all goes on"


def told_once(of_parts: dict[str, str]) -> str:
    """Joins what is said of each part; says it once if it is the same for all."""
    texts = set(of_parts.values())
    return (
        texts.pop()
        if len(texts) == 1
        else "; ".join(f"{part}: {text}" for part, text in of_parts.items())
    )


def surroundings(experiment: Experiment) -> list[tuple[str, str]]:
    """Returns the lines of the plan on what stands between clients and server, other than the defaults."""
    server = experiment.server
    attack = experiment.attack
    sent = experiment.compression
    clients = experiment.federation
    clock = experiment.problem.clock
    chance = experiment.problem.chance
    size = experiment.problem.cohort_size
    drawn = "drawn from each client's examples; the data set's own are not used"
    tests = {None: "", True: "the data set's own", False: drawn}[clients.official_test]
    attackers = 0 if clients.attacker is None else int(clients.attacker.sum())
    lines = [
        ("test examples", tests),
        ("cohorts", server.sampler != "uniform" and server.sampler),
        ("aggregator", server.aggregator != "mean" and server.described(size)),
        (
            "attackers",
            attack.active and f"{attackers} of {clients.num_clients} clients, {attack.kind}",
        ),
        ("compressed uploads", sent.upload != "none" and sent.described),
        ("compressed downloads", sent.download != "none" and sent.download),
        ("clock", clock and clock.described),
        ("faults", experiment.faults.active and experiment.faults.described),
        (
            "client privacy",
            experiment.client_privacy.active and experiment.client_privacy.described,
        ),
    ]
    if chance is not None:
        lines.append(
            (
                "cohorts",
                f"each client takes part with probability {chance:g}; at most {size} in a round",
            )
        )
    lines.append(("secure aggregation", server.secure_aggregation and "the server sees sums only"))
    return [(name, text) for name, text in lines if text]
