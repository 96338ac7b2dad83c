"""Benchmarks pfljax on an accelerator: rates, rounds with every plan, and CIFAR-10, in under eight minutes.

    python -m experiments.accelerator
    python -m experiments.accelerator --parts=matmul,rounds --num_clients=100,1000
    python -m experiments.accelerator --parts=table1 --data_file=CIFAR10.npz

It writes OUT/accelerator.json and accelerator.md after every measurement, so that no result is lost; the same command
continues where it stopped. After --seconds no further measurement starts. It needs jax with its plugin, flax, optax,
orbax, scikit-learn, matplotlib and rich, and no network. The parts, in this order:
    matmul   the rate of a large matrix product
    rounds   seconds of a round of Local by model, K and plan, compile time, the share of the rate of `matmul`, and on a
             device of a known kind what `pfljax estimate` estimates of the same round
    forms    the same rounds with XLA's own convolutions, and with stacked clients' patches as on a GPU
    methods  FedeRiCoFriends' round over Local's
    profile  where the time of FedeRiCoFriends' round goes
    table1   FedeRiCo's Table 1 on CIFAR-10 at the paper's size, with 4 label groups, its runs stacked in one kernel
"""

from __future__ import annotations

import functools
import math
import os
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from experiments import timing
from experiments.federico import table1
from pfljax import data, models
from pfljax.api.measuring import dispatcher
from pfljax.cli import launch
from pfljax.cli.flags import RUNS, define_devices
from pfljax.cli.parsing import Group
from pfljax.cli.settings import FlagError, Settings, parse
from pfljax.contract.errors import RunError
from pfljax.exchange.plan import ExecutionPlan, Plan, make_plan
from pfljax.exchange.pools import place
from pfljax.folder import files
from pfljax.local.training import LocalTraining
from pfljax.models import Model
from pfljax.models.rewriting import use_forms
from pfljax.planner import planning as estimating
from pfljax.planner import profiling, targets
from pfljax.planner.targets import Target
from pfljax.run import memory
from pfljax.run.compiled import Compiled
from pfljax.run.experiment import Experiment
from pfljax.settings import method
from pfljax.training import compiling

PARTS = ("matmul", "rounds", "forms", "methods", "profile", "table1")
# `pfljax estimate`'s names of TPUs, by the names that JAX has for them
TPUS = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"}
TPUS |= {"TPU v6 lite": "v6e", "TPU v6e": "v6e"}
EXAMPLES = 50
BATCH = 10
# results depend on these
KEPT = ("matmul_size", "repeats", "chunk", "devices", "table_rounds", "table_splits")
UNREAD = ("plan", "model_devices", "exchange", "client_store", "profile")


class Work(NamedTuple):
    """A model and the shape of an example."""

    model: str
    shape: tuple[int, ...]
    widths: tuple[int, ...] = ()

    def network(self) -> Model:
        """The model."""
        widths = {"hidden": self.widths, "channels": self.widths}
        return models.make(self.model, self.shape, "classification", 10, **widths)


WORK = {
    "mlp": Work("mlp", (28, 28, 1), (200,)),
    "cnn": Work("cnn", (32, 32, 3), (32, 64)),
    "cnn128": Work("cnn", (32, 32, 3), (128, 128, 128)),
    "resnet18": Work("resnet18", (32, 32, 3)),
}


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    define_devices(registry)
    registry.set_default("chunk", 100)
    add = Group(RUNS, registry)
    add.several("parts", PARTS, "parts to measure", PARTS)
    add.several("models", list(WORK), "models for the part rounds", list(WORK))
    add.several(
        "num_clients", ["100", "1000", "10000"], "numbers of clients K for the part rounds", int
    )
    add.add(
        "matmul_size", int, 8192, "width of the square matrices for the part matmul", at_least=8
    )
    add.add("repeats", int, 3, "number of timed rounds per measurement", at_least=1)
    add.add("seconds", float, 420, "time after which no further measurement starts")
    add.add(
        "data_file", str, None, "npz of CIFAR-10 for the part table1, which is skipped without it"
    )
    add.add("table_rounds", int, 150, "number of rounds for the part table1", at_least=1)
    add.several(
        "table_splits", ["0", "1", "2", "3", "4"], "splits for the part table1", int, at_least=0
    )
    add.add(
        "out",
        str,
        "runs/accelerator",
        "folder of accelerator.json and accelerator.md; existing results are kept",
    )


class Book:
    """The results so far, in OUT/accelerator.json: a dict by part, each a dict by title."""

    def __init__(self, settings: Settings):
        self.path = Path(settings.out) / "accelerator.json"
        self.end = time.monotonic() + settings.seconds
        about = {"device": device(), "settings": {flag: settings[flag] for flag in KEPT}}
        try:
            self.content: dict = (
                files.read_json(self.path) if self.path.exists() else about | {"parts": {}}
            )
            self.content["parts"].items()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise settings.error(
                "out", "has a damaged accelerator.json; choose a new folder"
            ) from error
        if any(self.content.get(what) != files.plain(value) for what, value in about.items()):
            raise settings.error(
                "out", "has results from another device or other settings; choose a new folder"
            )

    @property
    def left(self) -> float:
        """Seconds until no further measurement starts."""
        return self.end - time.monotonic()

    def measure(self, part: str, title: str, work: Callable[[], dict]) -> dict | None:
        """Runs a measurement, unless its result exists or time is up; one that does not fit in memory says why."""
        kept = self.content["parts"].setdefault(part, {})
        if title not in kept or "failed" in kept[title]:
            if self.left < 0:
                print(f"{part}, {title}: skipped, time is up")
                return None
            try:
                kept[title] = work()
            except (RunError, jax.errors.JaxRuntimeError) as error:
                kept[title] = {"failed": str(error).splitlines()[0]}
            files.write_json(self.path, self.content)
            files.write_text(self.path.with_suffix(".md"), self.markdown())
        print(f"{part}, {title}: {self.told(kept[title])}", flush=True)
        return kept[title]

    def told(self, figures: dict) -> str:
        """Results in one line, with the share of the device's rate if known."""
        rate = self.rate()

        def text(value):
            return f"{value:.4g}" if isinstance(value, float) else str(value)

        shown = {name: value for name, value in figures.items() if value is not None}
        if rate and "achieved_flops_per_second" in shown:
            shown["share_of_matmul_rate"] = shown["achieved_flops_per_second"] / rate
        if "estimated_seconds" in shown:
            shown["measured_over_estimated"] = (
                shown["seconds_per_round"] / shown["estimated_seconds"]
            )
        return ", ".join(f"{name.replace('_', ' ')} {text(value)}" for name, value in shown.items())

    def rate(self) -> float | None:
        """The measured rate of matrix products in FLOP/s, at the precision of training."""
        return self.content["parts"].get("matmul", {}).get("float32", {}).get("flops_per_second")

    def markdown(self) -> str:
        """All results as a table."""
        lines = [
            f"{self.content['device']}",
            "",
            "| part | what | figures |",
            "| --- | --- | --- |",
        ]
        for part, kept in self.content["parts"].items():
            lines += [
                f"| {part} | {title} | {self.told(figures)} |" for title, figures in kept.items()
            ]
        return "\n".join(lines) + "\n"


def device() -> str:
    """The machine and the versions."""
    kinds = ", ".join(sorted({found.device_kind for found in jax.local_devices()}))
    cores = f"{os.cpu_count()} CPU cores, jax {jax.__version__}"
    return f"{len(jax.local_devices())} x {kinds} ({jax.default_backend()}), {cores}"


def matmul(size: int, dtype: Any, repeats: int) -> dict:
    """FLOP/s of the product of two square matrices."""
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        product(a).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return {"flops_per_second": 2 * size**3 / float(np.median(seconds))}


def flops_of_a_step(model: Model, work: Work) -> float | None:
    """FLOPs of one mini-batch's gradient, counted by the compiler; None if it returns none."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((BATCH, *work.shape), jnp.float32)
    y = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    gradient = jax.grad(lambda params, x, y: model.loss(params, x, y).mean())
    cost = jax.jit(gradient).lower(params, x, y).cost_analysis()
    return (cost or {}).get("flops")


@functools.lru_cache(maxsize=1)
def clients_of(shape: tuple[int, ...], num_clients: int) -> data.Federation:
    """Random pixels, 50 examples per client."""
    return data.random_pixels(num_clients, EXAMPLES, shape, 10, 0)


def experiment(
    name: str, work: Work, num_clients: int, plan: str, settings: Settings
) -> Experiment:
    """A round of a method: every client trains for one epoch in batches of 10."""
    solver = LocalTraining(optax.sgd(0.1), batch_size=BATCH).bind(work.network())
    made = make_plan(plan, settings.chunk if plan == "chunk" else 0, settings.devices)
    federation = clients_of(work.shape, num_clients)
    return timing.build(method.get(name)(), federation, work.network(), solver, made)


def time_round(built: Experiment, repeats: int, flops: float | None = None) -> dict:
    """Compile time in seconds, seconds per round, and FLOP/s if the FLOPs of a mini-batch are known."""
    jax.clear_caches()
    federation = built.federation
    clients = place(built.problem.plan, federation.client_data, federation.num_clients)
    compiled = compiling.compile_to_fit(built, clients, 1)
    seconds = timing.median_seconds(dispatcher(built, compiled, clients), repeats)
    return estimate(built, compiled) | {
        "seconds_per_round": seconds,
        "compile_seconds": compiled.compile_seconds,
        "chunk": compiled.plan.chunk,
        "achieved_flops_per_second": flops
        and flops * (EXAMPLES // BATCH) * federation.num_clients / seconds,
        "temporaries_bytes": compiled.memory.temporaries,
    }


def target_of(plan: ExecutionPlan) -> Target | None:
    """The plan's devices as a target with their own memory; None: CPUs, or an unknown kind."""
    device = plan.device
    if device.platform == "tpu":
        chip = targets.TPUS.get(TPUS.get(device.device_kind, ""))
    else:
        words = device.device_kind.lower().replace("-", " ").split()
        chip = next((chip for name, chip in targets.GPUS.items() if name in words), None)
    if chip is None:
        return None
    options = {} if chip.clock else targets.UNTUNED
    chip = chip._replace(memory=memory.device_limit())
    return Target("here", list(plan.mesh.devices.flat), chip, options)


def estimate(built: Experiment, compiled: Compiled) -> dict:
    """What `pfljax estimate` says of the timed round: seconds and bytes; nothing on a device of unknown kind."""
    target = target_of(compiled.plan)
    if target is None:
        return {}
    (row,), _ = estimating.compiled_rows(built, target, [(compiled.plan.chunk, "")], math.inf)
    if row.milliseconds is None:
        return {}
    return {
        "estimated_seconds": row.milliseconds / 1e3,
        "estimated_temporaries_bytes": row.temporaries_bytes,
    }


def rounds(settings: Settings, book: Book) -> None:
    """The part rounds, smallest K first; skips measurements that would take over a third of the remaining time."""
    flops = {name: flops_of_a_step(WORK[name].network(), WORK[name]) for name in settings.models}
    before: dict[tuple[str, str], float] = {}  # seconds per client, by model and plan
    for num_clients in sorted(settings.numbers("num_clients", int)):
        for name in settings.models:
            # not auto, and not python, which compiles nothing
            for plan in typing.get_args(Plan)[1:-1]:

                def cell(num_clients=num_clients, name=name, plan=plan):
                    built = experiment("local", WORK[name], num_clients, plan, settings)
                    return time_round(built, settings.repeats, flops[name])

                title = f"{name}, K={num_clients}, {plan}"
                expected = before.get((name, plan), 0.0) * num_clients * (settings.repeats + 1)
                if expected and expected > book.left / 3:
                    print(f"rounds, {title}: skipped, it would take about {expected:.0f} s")
                    continue
                found = book.measure("rounds", title, cell) or {}
                if "seconds_per_round" in found:
                    before[name, plan] = found["seconds_per_round"] / num_clients


def forms(settings: Settings, book: Book) -> None:
    """The part forms."""
    num_clients = min(settings.numbers("num_clients", int))
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    for name in [name for name in settings.models if name != "mlp"]:  # which has none
        for plan in ("vmap", "map"):
            for form, source in (("native", None), ("patches", "cuda")):

                def cell(name=name, plan=plan, source=source):
                    with use_forms(platform, source):
                        built = experiment("local", WORK[name], num_clients, plan, settings)
                        return time_round(built, settings.repeats)

                book.measure("forms", f"{name}, K={num_clients}, {plan}, {form}", cell)


def methods(settings: Settings, book: Book) -> None:
    """The part methods."""
    num_clients = min(settings.numbers("num_clients", int))
    for name in settings.models:
        times = {}
        for title in ("local", "federico_friends"):

            def cell(title=title, name=name):
                return time_round(
                    experiment(title, WORK[name], num_clients, "auto", settings), settings.repeats
                )

            times[title] = book.measure("methods", f"{title}, {name}, K={num_clients}", cell) or {}
        seconds = [times[title].get("seconds_per_round") for title in times]
        if all(seconds):
            book.measure(
                "methods",
                f"federico_friends / local, {name}",
                lambda s=seconds: {"ratio": s[1] / s[0]},
            )


def profile(settings: Settings, book: Book) -> None:
    """The part profile."""

    def shares() -> dict:
        built = experiment(
            "federico_friends",
            WORK["cnn"],
            min(settings.numbers("num_clients", int)),
            "auto",
            settings,
        )
        clients = place(
            built.problem.plan, built.federation.client_data, built.federation.num_clients
        )
        compiled = compiling.compile_to_fit(built, clients, 1)
        trace = Path(settings.out) / "trace"
        dispatch = compiling.dispatcher(compiled, jax.random.key, clients)
        said = profiling.profiler(trace)(dispatch)
        return {"shares": said.removeprefix("profile: ")}

    book.measure("profile", "federico_friends, cnn", shares)


def cifar10(settings: Settings, book: Book) -> None:
    """The part table1: as many methods as time allows, with all runs of a method in one kernel."""
    if settings.data_file is None:
        print("table1: skipped, it needs --data_file")
        return
    names = ("local", "federico_friends", "fedavg", "fedavg_plus")
    for number, name in enumerate(names, 1):

        def runs(number=number) -> dict:
            out = Path(settings.out) / "table1"
            begin = time.perf_counter()
            words = {
                "data_file": settings.data_file,
                "size": "paper",
                "methods": ",".join(names[:number]),  # earlier results are kept
                "partition_groups": 4,
                "replicate": "vmap",
                "rounds": settings.table_rounds,
                "splits": ",".join(settings.table_splits),
                "seeds": "0,1,2",
                "out": out,
            }
            table1.run(parse(table1.define, [f"--{flag}={value}" for flag, value in words.items()]))
            cell = files.read_json(out / "table.json")[-1]["D4"]
            return {
                "accuracy_mean": cell["accuracy_mean"],
                "accuracy_std": cell["accuracy_std"],
                "published": cell["paper"],
                "runs": len(cell["accuracies"]),
                "seconds": time.perf_counter() - begin,
            }

        book.measure("table1", name, runs)


def run(settings: Settings) -> None:
    """The command."""
    for flag in UNREAD:
        settings.refuse(flag, "the parts determine it")
    if settings.data_file and not Path(settings.data_file).exists():
        raise FlagError.at("data_file", "no such file", settings.data_file)
    settings.check_out()
    book = Book(settings)
    print(book.content["device"])
    for part in PARTS:
        if part in settings.parts:
            run_part(part, settings, book)
    print(f"table: {book.path.with_suffix('.md')}, .json")


def run_part(part: str, settings: Settings, book: Book) -> None:
    """Runs one part."""
    if part == "matmul":
        for dtype in ("float32", "bfloat16"):
            size = settings.matmul_size
            book.measure(
                part, dtype, lambda dtype=dtype, size=size: matmul(size, dtype, settings.repeats)
            )
    else:
        parts = {
            "rounds": rounds,
            "forms": forms,
            "methods": methods,
            "profile": profile,
            "table1": cifar10,
        }
        parts[part](settings, book)


COMMAND = launch.Command(__doc__, define, run, keep_compiled=False)

if __name__ == "__main__":
    launch.main(COMMAND)
