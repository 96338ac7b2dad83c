"""Benchmarks local SGD of many clients and FedEM's round against PyTorch on the same work, and FedeRiCoFriends' round.

    pip install -e '.[benchmark]' && python -m experiments.benchmark

Local SGD is compared with the fastest plain loop over clients that we could write: no optimizer object, one fused
update of all parameters, no data loader. `--loop=dataloader` adds the loop that users of today's libraries run: client
objects, each with a `DataLoader` and an optimizer. FedEM's round is compared with two implementations
(`experiments.fedem_in_torch`): an ordinary loop and the fastest form. Each is timed with one thread and with all
threads, and the better time counts. Results are medians over the repeats.

`--roofline` also measures the products and updates of each round on their own (`experiments.roofline`).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
from absl import flags
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments import roofline, timing
from experiments.architectures import ARCHITECTURES, Architecture
from pfljax import data, models, report
from pfljax.cli import build, launch
from pfljax.cli.flags import RUNS, define_devices
from pfljax.cli.parsing import Group
from pfljax.cli.settings import FlagError, Settings
from pfljax.contract.types import Split
from pfljax.data import Federation
from pfljax.exchange.plan import ExecutionPlan
from pfljax.folder import files
from pfljax.local.training import LocalTraining
from pfljax.models.networks import MobileNetV2
from pfljax.report.draw import draw
from pfljax.report.picture import GRAY, Axis, Panel, Series
from pfljax.run.experiment import Execution
from pfljax.settings import method
from pfljax.training import describe

RATE = 0.1


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    define_devices(registry)
    add = Group(RUNS, registry)
    add.add("repeats", int, 15, "number of timed rounds per measurement", at_least=3)
    said = "dataloader also times a loop of client objects with data loaders"
    add.add("loop", str, "fastest", said, choices=list(LOOPS))
    add.add(
        "roofline",
        bool,
        False,
        "also measure a lower bound for each round of local SGD on this machine",
    )
    add.add("out", str, "runs/benchmark", "folder of benchmark.json and the figure")


class Workload(NamedTuple):
    """A round of local SGD: K clients train for one epoch over n examples in batches of B."""

    title: str
    model: str
    num_clients: int
    shape: tuple[int, ...]
    batch_size: int
    steps: int
    widths: tuple[int, ...] = ()  # hidden layers of an mlp, channels of a cnn
    classes: int = 10
    target: float = 1.0


WORKLOADS = (
    Workload(
        "MLP 784-200-10, K=100, 5 steps of 10", "mlp", 100, (28, 28, 1), 10, 5, (200,), target=5.0
    ),
    Workload(
        "MLP 784-32-10, K=1000, 5 steps of 10", "mlp", 1000, (28, 28, 1), 10, 5, (32,), target=8.0
    ),
    Workload("CNN 32/64, K=32, a step of 8", "cnn", 32, (28, 28, 1), 8, 1, (32, 64), target=1.8),
    Workload(
        "CNN 3 x 128, K=8, a step of 50", "cnn", 8, (32, 32, 3), 50, 1, (128, 128, 128), target=1.0
    ),
    Workload("MobileNet-V2, K=8, a step of 16", "mobilenet_v2", 8, (32, 32, 3), 16, 1, target=1.0),
    Workload("LSTM 2 x 256, K=8, a step of 16", "lstm", 8, (80,), 16, 1, classes=65, target=1.0),
    # As users write them, in experiments.architectures.
    Workload(
        "McMahan's CNN with nn.Conv, K=20, 6 steps of 10",
        "McMahan's CNN",
        20,
        (28, 28, 1),
        10,
        6,
        target=0.9,
    ),
    Workload("U-Net with nn.Conv, K=8, 2 steps of 16", "U-Net", 8, (32, 32, 3), 16, 2, target=0.9),
    Workload("ViT 2 x 64, K=8, 2 steps of 16", "ViT 2 x 64", 8, (32, 32, 3), 16, 2, target=0.9),
)


def clients_of(work: Workload) -> Federation:
    """Random pixels, or random characters with the next characters as targets."""
    examples = work.batch_size * work.steps
    federation = data.random_pixels(work.num_clients, examples, work.shape, work.classes, 0)
    return as_tokens(federation, work.classes) if work.model == "lstm" else federation


def as_tokens(federation: Federation, classes: int) -> Federation:
    """Numbers in [0, 1) as tokens, with the next tokens as targets."""

    def tokens(x):
        return (classes * x[...]).astype(np.uint8)

    splits = {
        name: Split(tokens(split.x), np.roll(tokens(split.x), -1, axis=-1), split.size)
        for name in ("train", "validation", "test")
        for split in [getattr(federation, name)]
    }
    return dataclasses.replace(federation, num_classes=classes, **splits)


def model_of(work: Workload) -> models.Model:
    """The workload's network."""
    if work.model in ARCHITECTURES:
        return models.build(
            ARCHITECTURES[work.model].make(), work.shape, "classification", work.classes
        )
    widths = {"hidden": work.widths, "channels": work.widths}
    return models.make(work.model, work.shape, "classification", work.classes, **widths)


def trace_folder(settings: Settings, title: str) -> Path | None:
    """Folder of the profiler's trace, if requested."""
    return (
        Path(settings.profile) / "".join(c if c.isalnum() else "-" for c in title)
        if settings.profile
        else None
    )


def time_ours(
    work: Workload,
    federation: Federation,
    plan: ExecutionPlan,
    repeats: int,
    trace: Path | None = None,
) -> float:
    """Median seconds of a round of Local."""
    model = model_of(work)
    solver = LocalTraining(optax.sgd(RATE), batch_size=work.batch_size).bind(model)
    experiment = timing.build(method.get("local")(), federation, model, solver, plan)
    return timing.median_seconds(timing.compile_rounds(experiment, trace=trace), repeats)


def torch_network(torch, work: Workload):
    """The workload's network in PyTorch."""
    nn = torch.nn

    if work.model in ARCHITECTURES:
        return network_in_torch(torch, ARCHITECTURES[work.model])
    if work.model == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, work.widths[0]), nn.ReLU(), nn.Linear(work.widths[0], 10)
        )
    if work.model == "cnn":
        height, _, width = work.shape
        layers = []
        for channels in work.widths:
            layers += [nn.Conv2d(width, channels, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
            width = channels
            height = height // 2
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * height * height, 10))
    if work.model == "lstm":

        class Characters(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(work.classes, 8)
                self.lstm = nn.LSTM(8, 256, 2, batch_first=True)
                self.dense = nn.Linear(256, work.classes)

            def forward(self, x):
                return self.dense(self.lstm(self.embedding(x))[0]).flatten(0, 1)

        return Characters()

    def project(before, after, activation=True, **options):
        convolution = nn.Conv2d(before, after, options.pop("size", 1), bias=False, **options)
        return [convolution, nn.GroupNorm(8, after), *([nn.ReLU6()] if activation else [])]

    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    layers = project(3, 32, size=3, stride=2, padding=1)
    width = 32
    for expansion, channels, blocks, first in MobileNetV2.stages:
        for number in range(blocks):
            inner = expansion * width
            stride = first if number == 0 else 1
            block = project(width, inner) if expansion > 1 else []
            block += project(inner, inner, size=3, stride=stride, padding=1, groups=inner)
            block += project(inner, channels, activation=False)
            layers.append(
                (Residual if stride == 1 and width == channels else nn.Sequential)(*block)
            )
            width = channels
    layers += [
        *project(width, 1280),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1280, work.classes),
    ]
    return nn.Sequential(*layers)


def network_in_torch(torch, work: Architecture):
    """A network as users write it in PyTorch."""
    from experiments.architectures import in_torch

    name, *arguments = work.torch
    return getattr(in_torch, name)(*(getattr(torch.nn, each) for each in arguments))


def time_torch(
    torch,
    work: Workload,
    federation: Federation,
    threads: Sequence[int],
    repeats: int,
    loop: str = "fastest",
) -> float:
    """Median seconds of the same round as a Python loop over clients in PyTorch, in one of the forms of `LOOPS`."""
    networks = [torch_network(torch, work) for _ in range(work.num_clients)]
    xs, ys = examples_in_torch(torch, federation)
    train = LOOPS[loop](torch, work.batch_size, networks, xs, ys)

    def one_round() -> float:
        begin = time.perf_counter()
        train()
        return time.perf_counter() - begin

    return best_of_threads(torch, one_round, threads, repeats)


def examples_in_torch(torch, federation: Federation) -> tuple[list, list]:
    """The clients' training examples as PyTorch expects them: images with channels first, and tokens as integers."""
    split = federation.train

    def layout(x):
        return np.moveaxis(x, -1, 1) if x.ndim == 4 else x

    whole = np.int64 if np.issubdtype(split.x.dtype, np.integer) else np.float32
    xs = [torch.from_numpy(layout(x).astype(whole)) for x in split.x]
    return xs, [torch.from_numpy(y.astype(np.int64)) for y in split.y]


def fastest_loop(
    torch, batch_size: int, networks: Sequence, xs: Sequence, ys: Sequence
) -> Callable[[], None]:
    """An epoch for every client: no optimizer object, one fused update of all parameters, no data loader."""
    parameters = [list(network.parameters()) for network in networks]

    def train() -> None:
        for network, params, x, y in zip(networks, parameters, xs, ys, strict=True):
            order = torch.randperm(len(y))
            for start in range(0, len(y), batch_size):
                batch = order[start : start + batch_size]
                loss = torch.nn.functional.cross_entropy(network(x[batch]), y[batch].flatten())
                grads = torch.autograd.grad(loss, params)
                with torch.no_grad():
                    torch._foreach_add_(params, grads, alpha=-RATE)

    return train


def dataloader_loop(
    torch, batch_size: int, networks: Sequence, xs: Sequence, ys: Sequence
) -> Callable[[], None]:
    """An epoch for every client as in other libraries: client objects, each with a `DataLoader` and an optimizer."""
    sets = [torch.utils.data.TensorDataset(x, y) for x, y in zip(xs, ys, strict=True)]
    loaders = [torch.utils.data.DataLoader(examples, batch_size, shuffle=True) for examples in sets]
    optimizers = [torch.optim.SGD(network.parameters(), lr=RATE) for network in networks]
    criterion = torch.nn.CrossEntropyLoss()

    def train() -> None:
        for network, loader, optimizer in zip(networks, loaders, optimizers, strict=True):
            network.train()
            for x, y in loader:
                optimizer.zero_grad()
                criterion(network(x), y.flatten()).backward()
                optimizer.step()

    return train


LOOPS = {"fastest": fastest_loop, "dataloader": dataloader_loop}


def best_of_threads(
    torch, one_round: Callable[[], float], threads: Sequence[int], repeats: int
) -> float:
    """Median seconds of a round with the fastest number of threads."""
    best = np.inf
    for count in threads:
        torch.set_num_threads(count)
        one_round()
        best = min(best, float(np.median([one_round() for _ in range(repeats)])))
    return best


def fedem_rows(settings: Settings, torch) -> list[dict]:
    """FedEM's round on its synthetic data, K=300, M=3, against PyTorch's ordinary loop and its fastest form."""
    from experiments import fedem_in_torch as peers

    federation = data.synthetic(300, test_examples=1)
    model = models.make("logistic", (150,), "classification", 2)
    sgd = optax.chain(
        optax.add_decayed_weights(peers.DECAY), optax.sgd(peers.RATE, momentum=peers.MOMENTUM)
    )
    solver = LocalTraining(sgd, batch_size=peers.BATCH).bind(model)
    fedem = method.get("fedem")()
    repeats = settings.repeats

    def ours(plan: ExecutionPlan, trace: Path | None = None) -> float:
        experiment = timing.build(fedem, federation, model, solver, plan, keep_optimizer=True)
        return timing.median_seconds(timing.compile_rounds(experiment, trace=trace), repeats)

    def theirs(form: Callable) -> float:
        one_round = form(*peers.client_data(federation), fedem.components)
        components = torch.randn(151, fedem.components) / 150**0.5

        def timed() -> float:
            nonlocal components
            begin = time.perf_counter()
            components = one_round(components)
            return time.perf_counter() - begin

        return best_of_threads(torch, timed, threads_of_torch(), repeats)

    ordinary = theirs(peers.ordinary)
    fused = min(map(theirs, (peers.Fused, peers.FusedOverClients)))
    plan, single = plans(settings)
    own = ours(plan, trace_folder(settings, "fedem"))
    alone = ours(single)
    title = "FedEM, K=300, M=3, against"
    return [
        entry(f"{title} an ordinary loop", own, ordinary, alone, 3.0),
        entry(f"{title} the fastest form", own, fused, alone, 3.0),
    ]


def time_friends(settings: Settings) -> dict:
    """FedeRiCoFriends' round against a Local round with the same full-batch Adam step; MLP 784-64-10, 20 examples."""
    federation = data.random_pixels(1000, 20, (28, 28, 1), 10, 0)
    model = models.make("mlp", (28, 28, 1), "classification", 10, hidden=(64,))
    solver = LocalTraining(optax.adam(0.01)).bind(model)
    plan = settings.make(Execution).make_plan()
    seconds = {}
    for name in ("local", "federico_friends"):
        experiment = timing.build(method.get(name)(), federation, model, solver, plan)
        dispatch = timing.compile_rounds(experiment, trace=trace_folder(settings, name))
        seconds[name] = timing.median_seconds(dispatch, settings.repeats)
    held = method.get("federico_friends")().neighbors + 1
    return {
        "local_ms": 1e3 * seconds["local"],
        "friends_ms": 1e3 * seconds["federico_friends"],
        "ratio": seconds["federico_friends"] / seconds["local"],
        "held": held,
        "target": 1.15 * held,
    }


def require_torch() -> Any:
    """PyTorch, or a usage error that says how to install it."""
    try:
        import torch
    except ImportError as error:
        raise FlagError("torch is missing: pip install -e '.[benchmark]'") from error
    return torch


def benchmark_figure(rows: Sequence[dict]) -> Figure:
    """Plots the speedup of a round over the PyTorch loop, one point per workload."""
    ratios = [row["ratio"] for row in rows]
    places = [float(place) for place in range(len(rows))]
    limits = len(rows) - 0.4, -0.6
    equal = Series((1.0, 1.0), limits, color=GRAY)
    points = Series(ratios, places, kind="points", symbol="circle", size=8)
    names = [
        (place, f"{row['workload']}, {row['ratio']:.1f} x")
        for place, row in zip(places, rows, strict=True)
    ]
    axis = Axis("speedup over a PyTorch loop over clients")
    return draw(
        [Panel(axis, Axis(ticks=names, limits=limits), [equal, points])], (8, 0.6 * len(rows) + 1.2)
    )


def run(settings: Settings) -> None:
    """The command."""
    settings.refuse("client_store", "all clients are in every round")
    settings.check_out()
    torch = require_torch()
    out = Path(settings.out)
    rows = [row_of(settings, torch, work) for work in WORKLOADS] + fedem_rows(settings, torch)
    friends = time_friends(settings)
    config = {
        "flags": dict(sorted(settings.values.items())),
        "command": build.command(),
    } | describe.environment()
    files.write_json(
        out / "benchmark.json", {**config, "local_sgd": rows, "federico_friends": friends}
    )
    report.save(benchmark_figure(rows), out / "benchmark.png")
    show(rows, settings.make(Execution).make_plan().num_devices)
    if settings.roofline:
        show_rooflines(rows)
    print(
        f"FedeRiCoFriends' round, M=3, K=1000, MLP 784-64-10, full batches of 20: {friends['friends_ms']:.0f} ms, "
        f"Local's {friends['local_ms']:.0f} ms: {friends['ratio']:.2f} x; target: at most 1.15 (M + 1) = "
        f"{friends['target']:.1f} x"
    )
    print(f"figures: {out / 'benchmark.json'}, {out / 'benchmark.png'}")


def plans(settings: Settings) -> tuple[ExecutionPlan, ExecutionPlan]:
    """The plan from the flags, and a plan for one device."""
    execution = settings.make(Execution)
    alone = dataclasses.replace(execution, devices=1, model_devices=1, exchange="auto")
    return execution.make_plan(), alone.make_plan()


def threads_of_torch() -> list[int]:
    """Numbers of threads for timing PyTorch."""
    return sorted({1, os.cpu_count() or 1})


def row_of(settings: Settings, torch: Any, work: Workload) -> dict:
    """Times for a workload: ours, PyTorch's, and ours on one device."""
    federation = clients_of(work)
    repeats = settings.repeats
    plan, single = plans(settings)
    theirs = time_torch(torch, work, federation, threads_of_torch(), repeats)
    ours = time_ours(work, federation, plan, repeats, trace_folder(settings, work.title))
    row = entry(work.title, ours, theirs, time_ours(work, federation, single, repeats), work.target)
    if settings.roofline:
        batch = [
            part[0, : work.batch_size] for part in (federation.train.x[...], federation.train.y)
        ]
        least = roofline.measure(plan, model_of(work), batch, work.num_clients, work.steps)
        print(
            f"  at least {least.least_ms:.1f} ms: {100 * least.least_ms / (1e3 * ours):.0f} % of the round"
        )
        row |= {"roofline": least._asdict() | {"least_ms": least.least_ms}}
    if settings.loop == "fastest":
        return row
    loaded = time_torch(torch, work, federation, threads_of_torch(), repeats, settings.loop)
    print(f"  with data loaders {1e3 * loaded:.1f} ms, {loaded / ours:.2f} x")
    return row | {"dataloader_ms": 1e3 * loaded, "dataloader_ratio": loaded / ours}


def entry(title: str, ours: float, theirs: float, alone: float, target: float) -> dict:
    """Makes and prints a table row from seconds: ours, PyTorch's, and ours on one device."""
    row = {
        "workload": title,
        "pfljax_ms": 1e3 * ours,
        "torch_ms": 1e3 * theirs,
        "ratio": theirs / ours,
    }
    print(
        f"{title}: {row['pfljax_ms']:.1f} ms, PyTorch {row['torch_ms']:.1f} ms, {row['ratio']:.2f} x; "
        f"all devices against one: {alone / ours:.2f} x"
    )
    return row | {"target": target, "one_device_ms": 1e3 * alone, "devices_gain": alone / ours}


def show(rows: Sequence[dict], num_devices: int) -> None:
    """Prints the table."""
    table = Table(title=f"a round, {os.cpu_count() or 1} cores, {num_devices} XLA device(s)")
    heads = [
        "workload",
        "pfljax, ms",
        "PyTorch loop, ms",
        "speedup",
        "target",
        "one device, ms",
        "gain",
    ]
    for head in heads + ["data loaders, ms", "speedup"] * any(
        "dataloader_ms" in row for row in rows
    ):
        table.add_column(head, justify="left" if head == "workload" else "right")
    for row in rows:
        cells = [
            f"{row['pfljax_ms']:.1f}",
            f"{row['torch_ms']:.1f}",
            f"{row['ratio']:.2f} x",
            f"{row['target']:.1f} x",
        ]
        cells += [f"{row['one_device_ms']:.1f}", f"{row['devices_gain']:.2f} x"]
        if "dataloader_ms" in row:
            cells += [f"{row['dataloader_ms']:.1f}", f"{row['dataloader_ratio']:.2f} x"]
        table.add_row(row["workload"], *cells)
    Console(width=140).print(table)


def show_rooflines(rows: Sequence[dict]) -> None:
    """Prints the times of local SGD rounds next to their lower bounds."""
    table = Table(
        title="lower bound of a round: products, updates and reading models from memory, each measured alone"
    )
    parts = {
        "products": "products_ms",
        "updates": "update_ms",
        "memory": "memory_ms",
        "at least": "least_ms",
    }
    rates = {
        "GFLOP": "gflop",
        "GFLOP/s": "gflops",
        "peak": "peak_gflops",
        "update GB/s": "update_gb",
    }
    rates |= {"memory GB/s": "memory_gb"}
    for head in ("workload", "round, ms", *parts, "share", *rates):
        table.add_column(head, justify="left" if head == "workload" else "right")
    for row in rows:
        if least := row.get("roofline"):
            cells = [f"{least[name]:.1f}" for name in parts.values()]
            share = f"{100 * least['least_ms'] / row['pfljax_ms']:.0f} %"
            rest = [f"{least[name]:.1f}" for name in rates.values()]
            table.add_row(row["workload"], f"{row['pfljax_ms']:.1f}", *cells, share, *rest)
    Console(width=160).print(table)


COMMAND = launch.Command(__doc__, define, run, keep_compiled=False)

if __name__ == "__main__":
    launch.main(COMMAND)
