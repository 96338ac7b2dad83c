"""The command compare and `pfljax.compare` are one engine: the same study gives the same files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest
from commands import call, rows_of

import pfljax as pfl
from pfljax.cli import compare
from pfljax.folder import files
from pfljax.settings import own_files

METRIC = """
import jax.numpy as jnp

def confidence(outputs, y):
    return outputs.max(axis=-1).mean()
"""
MODEL = pfl.models.MLP(hidden=(4,))


def sgd(rate: float = 1.0, **options: Any) -> pfl.LocalTraining:
    """The optimizer of the preset of digits."""
    return pfl.LocalTraining(optax.sgd, rate, keep_optimizer=True, **options)


def digits(validation_fraction: float = 0.0) -> Callable[[int], pfl.Federation]:
    """The clients of each split of digits."""

    def clients(split: int) -> pfl.Federation:
        splits = {
            "train_examples": 12,
            "test_examples": 20,
            "validation_fraction": validation_fraction,
        }
        return pfl.data.digits(num_clients=4, seed=split, **splits)

    return clients


def sine(split: int) -> pfl.Federation:
    """The clients of each split of a regression."""
    return pfl.data.sine(num_clients=3, seed=split, validation_fraction=0.25)


class Case(NamedTuple):
    """A study on the command line and in Python.

    Attributes:
        flags: The command's flags.
        methods: The methods.
        clients: A function of the split.
        local: Local training.
        options: Further arguments of `compare`.
        model: The network.
        code: The command's exit code.
    """

    flags: str
    methods: list
    clients: Callable[[int], pfl.Federation]
    local: pfl.LocalTraining
    options: dict[str, Any]
    model: Any = MODEL
    code: int = 0


RATE = "--learning_rate=1"
TWO_RATES = {"tune": [0.1, 1.0], "tune_widen": 1}
CASES = {
    "seeds": Case(
        f"--methods=local,fedavg {RATE}", [pfl.Local(), pfl.FedAvg()], digits(), sgd(), {}
    ),
    "splits and seeds, a reference": Case(
        f"--methods=local,fedavg --splits=2,3 --reference=local {RATE}",
        [pfl.Local(), pfl.FedAvg()],
        digits(),
        sgd(),
        {"splits": [2, 3], "reference": "local"},
    ),
    "tuned rates": Case(
        "--methods=local,fedavg --tune=0.1,1 --tune_widen=1",
        [pfl.Local(), pfl.FedAvg()],
        digits(0.25),
        sgd(),
        TWO_RATES,
    ),
    "tuned rates and hyperparameters, seeds of their own": Case(
        "--methods=fedprox --tune=0.1,1 --tune_widen=1 --tune_hyperparameters --tune_seeds=7",
        [pfl.FedProx()],
        digits(0.25),
        sgd(),
        {**TWO_RATES, "tune_hyperparameters": True, "tune_seeds": [7]},
    ),
    "tuned on splits": Case(
        "--methods=fedavg --tune=0.1,1 --tune_widen=1 --splits=2,3,4",
        [pfl.FedAvg()],
        digits(0.25),
        sgd(),
        {**TWO_RATES, "splits": [2, 3, 4]},
    ),
    "validation examples stay out": Case(
        "--methods=fedavg --tune=0.1,1 --tune_widen=1 --keep_validation",
        [pfl.FedAvg()],
        digits(0.25),
        sgd(),
        {**TWO_RATES, "keep_validation": True},
    ),
    "a method reads validation examples": Case(
        "--methods=fedfomo,local --partition_groups=2 --tune=0.1,1 --tune_widen=1 --nokeep_optimizer",
        [pfl.methods.FedFomo(), pfl.Local()],
        digits(0.2),
        pfl.LocalTraining(optax.sgd),
        TWO_RATES,
    ),
    "unseen clients": Case(
        f"--methods=fedavg,ditto --unseen=0.25 --participation=0.5 {RATE}",
        [pfl.FedAvg(), pfl.Ditto()],
        digits(),
        sgd(),
        {"unseen": 0.25, "participation": 0.5},
    ),
    "a method fails": Case(
        f"--methods=local,fedavgm --fedavgm.server_learning_rate=1e38 --reference=local {RATE}",
        [pfl.Local(), pfl.methods.FedAvgM(server_learning_rate=1e38)],
        digits(),
        sgd(),
        {"reference": "local"},
        code=1,
    ),
    "regression": Case(
        "--dataset=sine --num_clients=3 --methods=fedavg,local --validation_fraction=0.25 --optimizer=adam "
        "--learning_rate=0.01 --nokeep_optimizer --model=mlp",
        [pfl.FedAvg(), pfl.Local()],
        sine,
        pfl.LocalTraining(optax.adam, 0.01),
        {},
    ),
    "metrics": Case(
        f"--methods=fedavg --metrics=f1,own.py:confidence {RATE}",
        [pfl.FedAvg()],
        digits(),
        sgd(),
        {"metrics": ["f1", "own.py:confidence"]},
    ),
    "private clients": Case(
        "--methods=fedavg --client_privacy_clip_norm=1 --client_privacy_noise_multiplier=2 "
        f"--client_privacy_noise_seed=3 --participation=0.5 {RATE}",
        [pfl.FedAvg()],
        digits(),
        sgd(),
        {
            "client_privacy": pfl.ClientPrivacy(clip_norm=1.0, noise_multiplier=2.0, noise_seed=3),
            "participation": 0.5,
        },
    ),
    "private gradients": Case(
        f"--methods=fedavg --privacy_clip_norm=1 --privacy_noise_multiplier=2 --privacy_noise_seed=3 {RATE}",
        [pfl.FedAvg()],
        digits(),
        sgd(privacy=pfl.Privacy(noise_multiplier=2.0, clip_norm=1.0, noise_seed=3)),
        {},
    ),
    "the reference fails": Case(
        f"--methods=local,fedavgm --fedavgm.server_learning_rate=1e38 --reference=fedavgm {RATE}",
        [pfl.Local(), pfl.methods.FedAvgM(server_learning_rate=1e38)],
        digits(),
        sgd(),
        {"reference": "fedavgm"},
        code=1,
    ),
    "all methods fail": Case(
        f"--methods=fedavgm --fedavgm.server_learning_rate=1e38 {RATE}",
        [pfl.methods.FedAvgM(server_learning_rate=1e38)],
        digits(),
        sgd(),
        {},
        code=1,
    ),
    "tuning fails": Case(
        "--methods=local,fedavgm --fedavgm.server_learning_rate=1e38 --tune=0.1,1 --tune_widen=0",
        [pfl.Local(), pfl.methods.FedAvgM(server_learning_rate=1e38)],
        digits(0.25),
        sgd(),
        {"tune": [0.1, 1.0], "tune_widen": 0},
        code=1,
    ),
    "a clock": Case(
        f"--methods=fedavg,local --clock --target=0.1 {RATE}",
        [pfl.FedAvg(), pfl.Local()],
        digits(),
        sgd(),
        {"clock": pfl.Clock(), "target": 0.1},
    ),
    "weighted classes, stopped early": Case(
        f"--methods=fedavg --class_weights=inverse --patience=1 --batch_size=5 --epochs=2 {RATE}",
        [pfl.FedAvg()],
        digits(),
        sgd(batch_size=5, epochs=2, class_weights="inverse"),
        {"stop": pfl.patience(1)},
    ),
}
QUICK = ("tuned rates", "a method fails")
PARAMS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", PARAMS)
def test_the_command_and_python_write_the_same_table(name, tmp_path, monkeypatch):
    """table.csv is equal to the byte, and so are all runs' scores, rows and what they are told."""
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(METRIC)
    options = dict(case.options)
    if own := [each for each in options.get("metrics", ()) if ":" in each]:
        named = {each.rpartition(":")[2]: own_files.load("metrics", each) for each in own}
        options["metrics"] = {"f1": pfl.api.METRICS["f1"], **named}
    common = "--seeds=0,1 --rounds=3 --eval_every=1 --hidden=4 --out=command"
    if "dataset" not in case.flags:
        common += " --num_clients=4 --train_examples=12 --test_examples=20"
    call(compare.COMMAND, *case.flags.split(), *common.split(), code=case.code)
    arguments = {"rounds": 3, "seeds": [0, 1], "eval_every": 1, "out": "python", **options}
    table = pfl.compare(case.methods, case.clients, case.model, case.local, **arguments)

    assert Path("command/table.csv").read_bytes() == Path("python/table.csv").read_bytes()
    assert bool(table.failures) == (case.code == 1)
    folders = sorted(
        path.parent.relative_to("python") for path in Path("python").glob("*/*/summary.json")
    )
    assert folders == sorted(
        path.parent.relative_to("command") for path in Path("command").glob("*/*/summary.json")
    )
    for folder in folders:
        assert scores(Path("python") / folder) == scores(Path("command") / folder)
    for ours, theirs in zip(rows_of(Path("python")), rows_of(Path("command")), strict=True):
        del ours["seconds_per_round"], theirs["seconds_per_round"]
        for row in (*ours["seeds"], *theirs["seeds"]):
            del row["seconds"]
        assert ours == theirs


def scores(folder: Path) -> list[dict]:
    """A run's rows, without measured seconds, and its scores by client."""
    rows = files.read_jsonl(folder / "metrics.jsonl")
    arrays = files.read_npz(folder / "results.npz")
    found = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    return [*found, {name: np.asarray(value).tolist() for name, value in arrays.items()}]
