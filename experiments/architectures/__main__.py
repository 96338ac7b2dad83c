"""Times local SGD with networks as users write them: Linen and NNX, XLA's own forms, and a plain PyTorch loop.

    pip install -e '.[benchmark]' && python -m experiments.architectures --plan=map

The sides take turns, round by round, so that a machine that changes its speed favors none. PyTorch runs with one thread
and with all. A few networks: `--networks="U-Net,ViT 2 x 64"`. XLA's own convolutions are slow on CPUs: `--native`. The
modules of PyTorch as networks of pfljax: `pip install -e '.[torch]'` and `--torch_modules`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import benchmark, timing
from experiments.architectures import ARCHITECTURES, Architecture, linen
from pfljax import data, models
from pfljax.cli import launch
from pfljax.cli.flags import RUNS, define_devices
from pfljax.cli.parsing import Group
from pfljax.cli.settings import FlagError, Settings
from pfljax.data import Federation
from pfljax.folder import files
from pfljax.local.training import LocalTraining
from pfljax.run.experiment import Execution
from pfljax.settings import method
from pfljax.training import describe


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    define_devices(registry)
    add = Group(RUNS, registry)
    add.add("repeats", int, 9, "number of timed rounds of each side", at_least=3)
    add.add("networks", str, ",".join(ARCHITECTURES), f"accepted: {', '.join(ARCHITECTURES)}")
    add.add("native", bool, False, "also time XLA's own convolutions and pooling")
    add.add("torch_modules", bool, False, "also time PyTorch's modules as networks of pfljax")
    add.add("out", str, "runs/architectures", "folder of architectures.json")


def clients_of(work: Architecture, channels_first: bool = False) -> Federation:
    """Random pixels, vectors or tokens."""
    shape = work.shape
    if channels_first and len(shape) == 3:
        height, width, channels = shape
        shape = (channels, height, width)
    federation = data.random_pixels(work.num_clients, work.examples, shape, linen.CLASSES, 0)
    return benchmark.as_tokens(federation, linen.TOKENS) if len(shape) == 1 else federation


def ours(module: Any, federation: Federation, settings: Settings, work: Architecture) -> Callable:
    """A function that runs a round of Local and returns its seconds."""
    return rounds_of(model_of(module, federation), federation, settings, work)


def native(module: Any, federation: Federation, settings: Settings, work: Architecture) -> Callable:
    """The same with XLA's own convolutions and pooling."""
    model = model_of(module, federation)
    vars(model)["_forward"] = lambda frozen, *args: model.network.forward(*args)
    return rounds_of(model, federation, settings, work)


def model_of(module: Any, federation: Federation) -> models.Model:
    """A module of any library as a model for the clients' examples."""
    x = federation.train.x
    return models.build(module, x.shape[2:], federation.task, federation.num_classes, dtype=x.dtype)


def rounds_of(
    model: models.Model, federation: Federation, settings: Settings, work: Architecture
) -> Callable:
    """A function that runs a round of Local and returns its seconds."""
    solver = LocalTraining(optax.sgd(benchmark.RATE), batch_size=work.batch_size).bind(model)
    plan = settings.make(Execution).make_plan()
    experiment = timing.build(method.get("local")(), federation, model, solver, plan)
    dispatch = timing.compile_rounds(experiment)
    return lambda: dispatch()[0]


def theirs(torch: Any, work: Architecture, federation: Federation, threads: int) -> Callable:
    """The same round as a plain loop in PyTorch."""
    networks = [benchmark.network_in_torch(torch, work) for _ in range(work.num_clients)]
    xs, ys = benchmark.examples_in_torch(torch, federation)
    train = benchmark.fastest_loop(torch, work.batch_size, networks, xs, ys)

    def one_round() -> float:
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        train()
        return time.perf_counter() - begin

    return one_round


def measure(torch: Any, work: Architecture, settings: Settings) -> dict[str, float]:
    """Median milliseconds of a round on each side."""
    federation = clients_of(work)
    sides = {"Linen": ours(work.make(), federation, settings, work)}
    if work.nnx:
        from experiments.architectures import nnx

        sides["NNX"] = ours(getattr(nnx, work.nnx), federation, settings, work)
    if settings.native:
        sides["native"] = native(work.make(), federation, settings, work)
    if settings.torch_modules:
        module = benchmark.network_in_torch(torch, work)
        sides["module"] = ours(module, clients_of(work, channels_first=True), settings, work)
    for threads in benchmark.threads_of_torch():
        sides[f"PyTorch, {threads} thread(s)"] = theirs(torch, work, federation, threads)
    seconds = [{name: side() for name, side in sides.items()} for _ in range(settings.repeats + 1)][
        1:
    ]
    return {name: 1e3 * float(np.median([each[name] for each in seconds])) for name in sides}


def run(settings: Settings) -> None:
    """The command."""
    settings.refuse("client_store", "all clients are in every round")
    settings.check_out()
    torch = benchmark.require_torch()
    names = settings.networks.split(",")
    for name in names:
        if name not in ARCHITECTURES:
            raise FlagError.at("networks", f"accepted: {', '.join(ARCHITECTURES)}", name)
    rows = {}
    out = Path(settings.out)
    for name in names:
        rows[name] = measure(torch, ARCHITECTURES[name], settings)
        print(
            f"{name}: " + ", ".join(f"{side} {ms:.1f} ms" for side, ms in rows[name].items()),
            flush=True,
        )
        config = {"flags": dict(sorted(settings.values.items()))} | describe.environment()
        files.write_json(out / "architectures.json", {**config, "rounds_ms": rows})
    table = Table(
        "network", "pfljax, ms", "PyTorch, ms", "PyTorch over pfljax", title="a round of local SGD"
    )
    for name, row in rows.items():
        best = min(ms for side, ms in row.items() if side.startswith("PyTorch"))
        table.add_row(name, f"{row['Linen']:.1f}", f"{best:.1f}", f"{best / row['Linen']:.2f}")
    Console(width=100).print(table)


COMMAND = launch.Command(__doc__, define, run, keep_compiled=False)

if __name__ == "__main__":
    launch.main(COMMAND)
