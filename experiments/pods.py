"""Rounds on TPUs and GPUs that nobody here has, as their compilers see them: memory, collectives, time. Runs nothing.

    python -m experiments.pods
    python -m experiments.pods --targets=tpu:v5e:2x2 --num_clients=64,1024 --networks=mlp
    python -m experiments.pods --targets=tpu:v5e:2x2 --num_clients=64 --networks=cnn --examples=60 \
        --methods=local,federico_friends --exchanges=gather --dtypes=float32,bfloat16
    python -m experiments.pods --targets=cuda:h100:4 --num_clients=16 --networks=small --methods=all \
        --plans=vmap,map,chunk --client_stores=device,host --table=methods

Clients train for one epoch of their part of the examples in batches of 10; FedeRiCoFriends in lockstep with its
neighbors. The networks `small` and `small_nnx` are one network in Linen and NNX; with LoRA for methods of adapters, and
with an attention layer for methods that need one.
--table=rounds has a row for each program, --table=methods a row for each method.
Needs `pip install 'pfljax[tpu-target]'` or `gpu-target`, and Python 3.13. It writes OUT/pods.json after every program,
and continues where it stopped; entry.json is an entry of the ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import nnx

from experiments.ledger.entries import Column, Entry, Row, text
from pfljax import Execution, Run, models
from pfljax.cli import launch
from pfljax.cli.estimate import on_cpu
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.contract.errors import ArgumentError
from pfljax.contract.host import readable
from pfljax.data import Federation
from pfljax.folder import files
from pfljax.local.training import LocalTraining
from pfljax.planner import targets
from pfljax.planner.planning import prepare
from pfljax.settings import method
from pfljax.training.choosing import choices

BATCH = 10
CHUNK = 2
PLANS = {"vmap": 0, "map": 1, "chunk": CHUNK}


class Work(NamedTuple):
    """A network, how it is called, and the shape of an example.

    Attributes:
        others: Make networks for methods that refuse this one.
        validation: Share of the examples for validation, which some methods need.
    """

    title: str
    shape: tuple[int, ...]
    network: Any
    others: tuple[Callable[[], Any], ...] = ()
    validation: float = 0.0


class Small(nnx.Module):
    """The network `small` in NNX."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


class Attending(nnx.Module):
    """A network with an attention layer, in which each row of an image is a token."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        rows = x.reshape(x.shape[0], 8, 8)
        return self.head((rows + self.attention(rows)).reshape(x.shape[0], -1))


def in_nnx(rngs: nnx.Rngs, kind: Any = Small) -> nnx.Module:
    """Makes a network."""
    return kind(rngs=rngs)


def adapted(linen: bool) -> models.Model:
    """The small network with its hidden layer frozen: LoRA and the last layer are trained."""
    if linen:
        module = models.MLP(hidden=(64,), outputs=10)
        names = ("Dense_0", "Dense_1")
        frozen = module.init(jax.random.key(0), jnp.zeros((1, 64)))
    else:
        module = in_nnx
        names = ("hidden", "head")
        frozen = in_nnx(nnx.Rngs(0))
    return models.Model(
        module, frozen=frozen, trainable=[models.adapters.lora(rank=2, where=names[0]), names[1]]
    )


def attending(linen: bool) -> Any:
    """A small network with attention."""
    return (
        models.ViT(width=16, depth=1, heads=2)
        if linen
        else functools.partial(in_nnx, kind=Attending)
    )


SMALL, SMALL_NNX = (
    (functools.partial(adapted, linen), functools.partial(attending, linen))
    for linen in (True, False)
)
NETWORKS = {
    "mlp": Work("MLP 784-200-10", (28, 28, 1), models.MLP(hidden=(200,))),
    "cnn": Work("CNN 3 x 128", (32, 32, 3), models.CNN(channels=(128, 128, 128))),
    "small": Work("MLP 64-64-10", (8, 8, 1), models.MLP(hidden=(64,)), SMALL, 0.2),
    "small_nnx": Work("MLP 64-64-10, NNX", (8, 8, 1), in_nnx, SMALL_NNX, 0.2),
}


class Case(NamedTuple):
    """What is compiled: words, which joined are its key in the results."""

    network: str
    target: str
    clients: str
    method: str
    plan: str
    store: Any
    dtype: str

    @property
    def place(self) -> str:
        """The devices, in words."""
        return self.target.partition(":")[2].replace(":", " ")

    @property
    def column(self) -> str:
        """The case without its method, as the head of a column."""
        plan = f"chunk of {CHUNK}" if self.plan == "chunk" else self.plan
        words = (NETWORKS[self.network].title, self.place, f"K={self.clients}", plan)
        return ", ".join([*words, *[f"{self.store} store"] * (self.store != "device")])


class Table(NamedTuple):
    """A table of all results: what it shows, its columns and its rows."""

    title: str
    columns: list[Column]
    rows: list[Row]


Kept = dict[str, list[dict]]  # by a case's key, a program for each exchange
HEADS = [
    "network",
    "computes in",
    "chips",
    "clients",
    "plan",
    "arguments",
    "temporaries",
    "collectives",
    "Mcycles",
]
HEADS += ["ms a round", "of it collectives"]


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    add = Group("Training", registry)
    add.several("methods", ["local", "fedavg", "fedem", "federico_friends"], "methods, or all")
    add.several("networks", ["mlp", "cnn"], "networks", list(NETWORKS))
    add.several("targets", ["tpu:v5e:2x2", "tpu:v5e:8x8", "tpu:v5e:16x16"], "devices")
    add.several(
        "num_clients",
        ["64", "1024", "8192"],
        "numbers of clients K; those below the devices are left out",
        int,
    )
    add.add("examples", int, 20, "examples of a client; a fifth is for testing", at_least=5)
    add.several("plans", ["vmap"], f"plans; a chunk has {CHUNK} clients", list(PLANS))
    add.several("exchanges", ["gather", "ring"], "how models of peers travel", ["gather", "ring"])
    add.several("client_stores", ["device"], "where clients are stored", ["device", "host", "disk"])
    add.several("dtypes", ["float32"], "what networks compute in", ["float32", "bfloat16"])
    add.add("table", str, "rounds", "rows of the table", choices=["rounds", "methods"])
    add.add("out", str, "runs/pods", "folder")
    for name in ("coordinator", "num_processes", "process_id", "profile"):
        add.add(name, str, None, "not used")


@functools.lru_cache(maxsize=1)
def federation(network: str, num_clients: int, examples: int) -> Federation:
    """Clients with the shapes of a data set; only shapes matter."""
    work = NETWORKS[network]
    x = np.zeros((num_clients * examples, *work.shape), np.uint8)
    y = np.arange(len(x)) % 10
    client = np.repeat(np.arange(num_clients), examples)
    return Federation.from_arrays(
        x, y, client=client, standardize=False, validation_fraction=work.validation
    )


def run_of(case: Case, examples: int) -> Run:
    """The run of a case, with the first network that the method does not refuse."""
    work = NETWORKS[case.network]
    chosen = method.get(case.method)()
    local = LocalTraining(optax.sgd, 0.1, batch_size=BATCH, dtype=case.dtype)
    clients = federation(case.network, int(case.clients), examples)

    def made(network):
        return Run(chosen, clients, network, local, execution=Execution(client_store=case.store))

    *tried, last = lambda: work.network, *work.others
    for network in tried:
        with contextlib.suppress(ArgumentError):
            return made(network())
    return made(last())


def compiled(
    case: Case, target: targets.Target, examples: int, exchanges: Sequence[str]
) -> list[dict]:
    """The programs of a case, one for each exchange; one that does not compile says why."""
    try:
        experiment = run_of(case, examples).experiment.with_rounds(1)
        plan = target.plan(0, "auto", experiment.problem.plan.model_devices)
        found = []
        for exchange in dict.fromkeys(exchange for _, exchange in choices(experiment, plan)):
            if exchange and exchange not in exchanges:
                continue
            row, compiling = prepare(experiment, target, PLANS[case.plan], exchange)
            found.append(dataclasses.asdict(compiling() if compiling else row))
        return found
    except Exception as error:  # whatever a method or a compiler says is a result
        return [{"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}]


def run(settings: Settings) -> None:
    """Runs the command."""
    path = Path(settings.out) / "pods.json"
    kept = files.read_json(path) if path.exists() else {}
    numbers = settings.numbers("num_clients", int)
    methods = list(method.METHODS) if settings.methods == ["all"] else settings.methods
    for network, place, num in itertools.product(settings.networks, settings.targets, numbers):
        target = targets.find(place)
        if num < len(target.devices) or num % len(target.devices):
            continue
        for words in itertools.product(
            methods, settings.plans, settings.client_stores, settings.dtypes
        ):
            case = Case(network, place, str(num), *words)
            key = " ".join(case)
            if key not in kept:
                kept[key] = compiled(case, target, settings.examples, settings.exchanges)
                files.write_json(path, kept)
                jax.clear_caches()
            for row in kept[key]:
                shown = line(case, row)
                print(shown.title, *shown.cells, row.get("why", ""), flush=True)
    table = {"rounds": by_rounds, "methods": by_methods}[settings.table](kept)
    names = list(dict.fromkeys(case.method for case in cases(kept)))
    files.write_text(path.with_name("entry.json"), text(entry(table, names)))


def cases(kept: Kept) -> list[Case]:
    """The cases of the results."""
    return [Case(*key.split()) for key in kept]


def entry(table: Table, methods: list[str]) -> Entry:
    """The ledger's entry of a table."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return Entry(
        table.title,
        "python -m experiments.pods",
        asked.stdout.strip()[:10],
        None,
        datetime.date.today().isoformat(),
        f"none: compiled on {os.cpu_count()} CPU cores",
        {"Python": platform.python_version(), "jax": jax.__version__},
        methods,
        table.columns,
        table.rows,
    )


def title_of(name: str) -> str:
    """A method's title without its abbreviations."""
    return method.get(name).info.title.partition(" (")[0].partition(",")[0]


def by_rounds(kept: Kept) -> Table:
    """A table with a row for each program."""
    rows = [
        line(case, row)
        for case, found in zip(cases(kept), kept.values(), strict=True)
        for row in found
    ]
    title = "A round by the compiler's estimate: bytes of one chip, loops weighed"
    return Table(title, [Column(head) for head in HEADS], rows)


def line(case: Case, row: dict) -> Row:
    """A row of the table of rounds."""
    exchange = row.get("exchange", "")
    title = title_of(case.method) + (f", {exchange}" if exchange else "")
    sizes = [row.get(f"{part}_bytes") for part in ("arguments", "temporaries", "collectives")]
    told = [
        row.get("failed", "does not fit") if value is None else readable(value) for value in sizes
    ]
    times = ["", "", ""]
    clock = targets.TPUS[case.target.split(":")[1]].clock if case.target[:3] == "tpu" else 0.0
    if row.get("milliseconds") is not None:
        share = 100 * row["collectives_milliseconds"] / row["milliseconds"]
        cycles = f"{row['compute_milliseconds'] * clock / 1e9:.3g}" if clock else ""
        times = [cycles, f"{row['milliseconds']:.3g}", f"{share:.0f} %"]
    what = [
        NETWORKS[case.network].title,
        case.dtype,
        case.place,
        f"{int(case.clients):,}",
        case.plan,
    ]
    return Row(" ".join([*case, exchange]).strip(), title, [*what, *told, *times])


def by_methods(kept: Kept) -> Table:
    """A table with a row for each method and a column for each network, target, plan and store."""
    found = {(case.method, case.column): kept[" ".join(case)] for case in cases(kept)}
    columns = list(dict.fromkeys(column for _, column in found))
    rows = [
        Row(name, title_of(name), [cell(found.get((name, column), [])) for column in columns])
        for name in dict.fromkeys(name for name, _ in found)
    ]
    title = "Temporaries / collectives of a round, bytes of one chip; where peers' models travel: gathered; in a ring"
    return Table(title, [Column(column) for column in columns], rows)


def cell(found: list[dict]) -> str:
    """The bytes of a case's programs, or what went wrong."""

    def size(row, part):
        return readable(row[f"{part}_bytes"])

    def wrong(row):
        return row.get("failed") or row["why"]

    return "; ".join(
        wrong(row) or f"{size(row, 'temporaries')} / {size(row, 'collectives')}" for row in found
    )


COMMAND = launch.Command(__doc__, define, run, devices=on_cpu)

if __name__ == "__main__":
    launch.main(COMMAND)
