"""Rounds by a compiler's estimate, with CPU devices in place of a target's."""

import json

import jax
import pytest
from commands import call

from experiments import pods
from pfljax.cli.estimate import on_cpu
from pfljax.planner import targets
from pfljax.planner.targets import Chip, Target


@pytest.mark.slow
def test_a_row_for_each_exchange_and_an_entry(monkeypatch, tmp_path):
    chip = Chip(1 << 30, 1e12, 1e11, 1e10)
    monkeypatch.setattr(targets, "find", lambda name: Target(name, jax.devices()[:2], chip, {}))
    words = (
        "--networks=mlp",
        "--targets=tpu:v5e:1x2",
        "--num_clients=1,2",
        "--methods=local",
        f"--out={tmp_path}",
    )
    out = call(pods.COMMAND, *words)
    # 1 client is left out
    assert [row.split(" MLP")[0] for row in out.splitlines()] == ["Local training"]
    rows = json.loads((tmp_path / "pods.json").read_text())[
        "mlp tpu:v5e:1x2 2 local vmap device float32"
    ]
    entry = json.loads((tmp_path / "entry.json").read_text())
    assert len(rows) == len(entry["rows"]) == 1 and rows[0]["milliseconds"] > 0
    assert call(pods.COMMAND, *words) == out


@pytest.mark.long
def test_a_table_of_methods_tells_what_does_not_compile(monkeypatch, tmp_path):
    """With a network in Linen and in NNX; FedIT needs adapters."""
    chip = Chip(1 << 30, 1e12, 1e11, 1e10)
    monkeypatch.setattr(targets, "find", lambda name: Target(name, jax.devices()[:1], chip, {}))
    words = (
        "--networks=small,small_nnx",
        "--targets=tpu:v5e:1x1",
        "--num_clients=2",
        "--methods=local,fedit",
    )
    call(pods.COMMAND, *words, "--plans=map", "--table=methods", f"--out={tmp_path}")
    entry = json.loads((tmp_path / "entry.json").read_text())
    assert [column["head"] for column in entry["columns"]] == [
        f"{pods.NETWORKS[name].title}, v5e 1x1, K=2, map" for name in ("small", "small_nnx")
    ]
    sizes = {row["name"]: row["cells"] for row in entry["rows"]}
    assert all("B / 0 B" in cell for cells in sizes.values() for cell in cells), sizes
    case = pods.Case("small", "tpu:v5e:1x1", "2", "ditto", "map", "device", "float32")
    monkeypatch.setattr(pods, "run_of", lambda *_: 1 / 0)
    (found,) = pods.compiled(case, targets.find(case.target), 20, ["gather"])
    assert pods.cell([found]) == found["failed"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("given", [{}, {"model_devices": 2}])
def test_the_devices_of_a_plan(given):
    class Settings(dict):
        __getattr__ = dict.__getitem__

    assert on_cpu(Settings(given)) == given.get("model_devices", 1)
