"""Rounds on TPUs that nobody here has, as their compiler estimates them: memory, collectives and time. Nothing is run.

    python -m experiments.pods
    python -m experiments.pods --targets=tpu:v5e:2x2 --num_clients=64,1024 --networks=mlp

Clients train for one epoch of 20 examples in batches of 10, with plan vmap; FedeRiCo in lockstep with its neighbors.
Needs `pip install 'pfljax[tpu-target]'` and Python 3.13. It writes OUT/pods.json after every program, and continues
where it stopped; entry.json is an entry of the ledger.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import platform
import subprocess
from pathlib import Path

import jax
import numpy as np
import optax
from absl import flags

from experiments.ledger.entries import Column, Entry, Row, text
from pfljax import Run, models
from pfljax.cli import launch
from pfljax.cli.parsing import Group
from pfljax.cli.plan import on_cpu
from pfljax.cli.settings import Settings
from pfljax.contract import method
from pfljax.contract.host import readable
from pfljax.data import Federation
from pfljax.exchange import targets
from pfljax.folder import files
from pfljax.local.training import LocalTraining
from pfljax.stores.planning import Row as Found
from pfljax.stores.planning import choices, prepare

EXAMPLES, BATCH = 20, 10
NETWORKS = {
    "mlp": ("MLP 784-200-10", (28, 28, 1), models.MLP(hidden=(200,))),
    "cnn": ("CNN 3 x 128", (32, 32, 3), models.CNN(channels=(128, 128, 128))),
}
HEADS = ["network", "chips", "clients", "arguments", "temporaries", "collectives", "ms a round", "of it collectives"]


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    add = Group("Training", registry)
    add.several("algorithms", ["local", "fedavg", "fedem", "federico"], "methods")
    add.several("networks", list(NETWORKS), "networks", list(NETWORKS))
    add.several("targets", ["tpu:v5e:2x2", "tpu:v5e:8x8", "tpu:v5e:16x16"], "devices")
    add.several(
        "num_clients", ["64", "1024", "8192"], "numbers of clients K; those below the devices are left out", int
    )
    add.add("out", str, "runs/pods", "folder")
    for name in ("coordinator", "num_processes", "process_id", "profile"):
        add.add(name, str, None, "not used")


def federation(network: str, num_clients: int) -> Federation:
    """Clients with the shapes of a data set; only shapes matter."""
    shape = NETWORKS[network][1]
    x = np.zeros((num_clients * EXAMPLES, *shape), np.uint8)
    y = np.arange(len(x)) % 10
    return Federation.from_arrays(x, y, client=np.repeat(np.arange(num_clients), EXAMPLES), standardize=False)


def estimated(name: str, network: str, clients: Federation, target: targets.Target) -> list[Found]:
    """A row for each exchange of plan vmap."""
    local = LocalTraining(optax.sgd(0.1), batch_size=BATCH)
    experiment = Run(method.get(name)(), clients, NETWORKS[network][2], local).experiment.with_rounds(1)
    found = []
    for chunk, exchange in choices(experiment, target):
        if chunk == 0:
            row, compiling = prepare(experiment, target, chunk, exchange)
            found.append(compiling() if compiling else row)
    return found


def run(settings: Settings) -> None:
    """Runs the command."""
    path = Path(settings.out) / "pods.json"
    kept = files.read_json(path) if path.exists() else {}
    numbers = settings.numbers("num_clients", int)
    for network, place, num in itertools.product(settings.networks, settings.targets, numbers):
        target = targets.find(place)
        if num < len(target.devices) or num % len(target.devices):
            continue
        clients = None
        for name in settings.algorithms:
            key = f"{network} {place} {num} {name}"
            if key not in kept:
                clients = clients or federation(network, num)
                rows = estimated(name, network, clients, target)
                kept[key] = [dataclasses.asdict(row) for row in rows]
                files.write_json(path, kept)
            for row in kept[key]:
                shown = line(key, row)
                print(shown.title, *shown.cells, row["why"], flush=True)
    files.write_text(path.with_name("entry.json"), text(entry(kept)))


def entry(kept: dict[str, list[dict]]) -> Entry:
    """The ledger's entry of all rows."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    names = list(dict.fromkeys(key.split()[-1] for key in kept))
    versions = {"Python": platform.python_version(), "jax": jax.__version__}
    return Entry(
        "A round by the compiler's estimate, plan vmap: bytes of one chip, milliseconds",
        "python -m experiments.pods",
        asked.stdout.strip()[:10],
        None,
        datetime.date.today().isoformat(),
        f"none: compiled on {os.cpu_count()} CPU cores",
        versions,
        names,
        [Column(head) for head in HEADS],
        [line(key, row) for key, rows in kept.items() for row in rows],
    )


def line(key: str, row: dict) -> Row:
    """A row of the table."""
    network, place, num, name = key.split()
    title = method.get(name).info.title.partition(" (")[0].partition(",")[0]
    title += f", {row['exchange']}" if row["exchange"] else ""
    sizes = [row[f"{part}_bytes"] for part in ("arguments", "temporaries", "collectives")]
    told = ["does not fit" if value is None else readable(value) for value in sizes]
    times = ["", ""]
    if row["milliseconds"] is not None:
        share = 100 * row["collectives_milliseconds"] / row["milliseconds"]
        times = [f"{row['milliseconds']:.3g}", f"{share:.0f} %"]
    cells = [NETWORKS[network][0], place.removeprefix("tpu:").replace(":", " "), f"{int(num):,}", *told, *times]
    return Row(f"{key} {row['exchange']}".strip(), title, cells)


COMMAND = launch.Command(__doc__, define, run, devices=on_cpu)

if __name__ == "__main__":
    launch.main(COMMAND)
