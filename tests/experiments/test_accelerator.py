"""The accelerator kit, at toy sizes on a CPU."""

import json

import commands
import pytest

from experiments import accelerator
from pfljax import models

SMALL = ["--matmul_size=16", "--num_clients=2", "--models=mlp", "--repeats=1", "--chunk=2"]


def test_figures_are_kept_and_told(tmp_path):
    flags = [*SMALL, "--parts=matmul", f"--out={tmp_path}"]
    printed = commands.call(accelerator.COMMAND, *flags)
    first = json.loads((tmp_path / "accelerator.json").read_text())
    assert set(first["parts"]["matmul"]) == {"float32", "bfloat16"} and "cpu" in first["device"]
    assert (
        first["parts"]["matmul"]["float32"]["flops_per_second"] > 0
        and "| matmul | float32 |" in (tmp_path / "accelerator.md").read_text()
    )
    assert "flops per second" in printed
    commands.call(accelerator.COMMAND, *flags)
    assert json.loads((tmp_path / "accelerator.json").read_text()) == first  # measured once
    printed = commands.call(
        accelerator.COMMAND, *SMALL, "--parts=rounds", "--seconds=0", f"--out={tmp_path}"
    )
    assert "skipped, time is up" in printed


@pytest.mark.long
def test_all_parts_but_the_table_run(tmp_path):
    parts = "--parts=matmul,rounds,methods,profile"
    commands.call(accelerator.COMMAND, *SMALL, "--num_clients=5", parts, f"--out={tmp_path}")

    parts = json.loads((tmp_path / "accelerator.json").read_text())["parts"]
    assert set(parts["rounds"]) == {f"mlp, K=5, {plan}" for plan in ("vmap", "map", "chunk")}
    assert all(row["achieved_flops_per_second"] > 0 for row in parts["rounds"].values())
    assert "share of matmul rate" in (tmp_path / "accelerator.md").read_text()
    times = [
        parts["methods"][f"{name}, mlp, K=5"]["seconds_per_round"]
        for name in ("federico_friends", "local")
    ]
    assert parts["methods"]["federico_friends / local, mlp"]["ratio"] == pytest.approx(
        times[0] / times[1]
    )
    assert "compute" in parts["profile"]["federico_friends, cnn"]["shares"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--parts=matmul,nothing"], "--parts=matmul,nothing: accepted: matmul, rounds"),
        (["--models=vgg"], "--models=vgg: accepted: mlp"),
        (["--data_file=nowhere.npz"], "--data_file=nowhere.npz: no such file"),
        (["--num_clients=0"], "--num_clients"),
        (["--plan=map"], "--plan: does not apply here"),
    ],
)
def test_mistakes_are_one_line(flags, said, tmp_path):
    assert said in commands.refused(accelerator.COMMAND, tmp_path / "out", *SMALL, *flags)


def test_the_flops_of_a_step_are_those_of_its_matrix_products():
    work = accelerator.WORK["mlp"]
    model = models.make(work.model, work.shape, "classification", 10, hidden=work.widths)
    # Forward, the gradient of every matrix, and the gradient of every layer's input except the first's.
    products = 2 * accelerator.BATCH * (2 * 784 * 200 + 3 * 200 * 10)
    assert accelerator.flops_of_a_step(model, work) == pytest.approx(products, rel=0.05)
