"""`pfljax estimate`: what it prints and writes, with CPU devices in place of a target's, and what it refuses."""

import json

import jax
import pytest
from commands import call, one_line

from pfljax.cli import estimate
from pfljax.planner import targets
from pfljax.planner.targets import Chip, Target

SMALL = ("--method=local", "--num_clients=4", "--train_examples=5", "--hidden=4", "--rounds=1000")


@pytest.fixture
def here(monkeypatch):
    """CPU devices for any target."""
    chip = Chip(1 << 30, 1e12, 1e11, 1e10)
    monkeypatch.setattr(targets, "find", lambda name: Target(name, jax.devices()[:1], chip, {}))


@pytest.mark.slow
def test_it_recommends_flags_and_writes_all_figures(here, tmp_path):
    out = call(
        estimate.COMMAND, "--target=tpu:v5e:1x1", *SMALL, f"--json={tmp_path / 'estimate.json'}"
    )
    found = json.loads((tmp_path / "estimate.json").read_text())
    assert (
        f"recommended: --plan={found['recommended']['plan']}; about" in out
        and "1000 rounds (an estimate)" in out
    )
    assert [row["plan"] for row in found["rows"]] == ["vmap", "map"] and found[
        "target"
    ] == "tpu:v5e:1x1"
    for row in found["rows"]:
        assert (
            row["temporaries_bytes"] >= 0
            and row["milliseconds"] > 0
            and row["collectives_bytes"] == 0
        )
        assert row["hours"] == pytest.approx(1000 * row["milliseconds"] / 3.6e6)
    # without a file, it is all that is on standard output
    printed = json.loads(call(estimate.COMMAND, "--target=tpu:v5e:1x1", *SMALL, "--json"))
    for row in (*printed["rows"], *found["rows"]):
        assert row.pop("compile_seconds") >= 0  # measured
    assert printed == found


@pytest.mark.long
def test_several_methods_have_a_table_each_and_hours_in_all(here, tmp_path):
    words = (*SMALL[1:], "--methods=fedavg,local", f"--json={tmp_path / 'estimate.json'}")
    out = call(estimate.COMMAND, "--target=tpu:v5e:1x1", *words)
    found = json.loads((tmp_path / "estimate.json").read_text())
    assert [each["method"] for each in found["estimates"]] == ["fedavg", "local"] and out.count(
        "recommended: "
    ) == 2
    assert found["hours"] == pytest.approx(sum(each["hours"] for each in found["estimates"]))
    assert f"all 2 methods, one seed each: about {3600 * found['hours']:.3g} s (an estimate)" in out


def test_hours_in_all_need_all_methods(here, monkeypatch, tmp_path):
    small = Chip(100, 1e12, 1e11, 1e10)  # bytes that no method fits into
    monkeypatch.setattr(targets, "find", lambda name: Target(name, jax.devices()[:1], small, {}))
    words = (*SMALL[1:], "--methods=local,fedavg", f"--json={tmp_path / 'estimate.json'}")
    out = call(estimate.COMMAND, "--target=tpu:v5e:1x1", *words)
    assert "all 2 methods, one seed each: no total" in out and "recommended" not in out
    assert json.loads((tmp_path / "estimate.json").read_text())["hours"] is None


def test_mistakes_are_one_line(tmp_path):
    line = one_line(call(estimate.COMMAND, *SMALL, "--target=tpu:v9:2x2", code=2))
    assert line.startswith("--target=tpu:v9:2x2: accepted: tpu:NAME:SHAPE with v5e, v5p, v6e")
    line = one_line(call(estimate.COMMAND, *SMALL, "--plan=map", code=2))
    assert line == "--plan: does not apply here: all plans are compared"
    line = one_line(call(estimate.COMMAND, *SMALL, "--methods=fedavg", code=2))
    assert line == "--method: does not apply here: --methods has the methods"
    line = one_line(call(estimate.COMMAND, *SMALL, f"--out={tmp_path / 'out'}", code=2))
    assert (
        line == "--out: does not apply here: nothing is trained" and not (tmp_path / "out").exists()
    )
