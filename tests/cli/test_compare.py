"""The command compare: cells that are kept, replicates in one kernel, tuning."""

import shutil
import sys

import numpy as np
import pytest
from commands import call, flags_of, one_line, refused, rows_of

from pfljax.api import Point, study
from pfljax.cli import compare, sweep
from pfljax.cli.build import Trial
from pfljax.cli.settings import parse
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import METHODS
from pfljax.folder import files


@pytest.mark.slow
def test_seeds_in_one_kernel_are_kept_one_by_one(tmp_path):
    """On the command's own data and settings, but for few rounds, and with two seeds in one kernel."""
    flags = ["--seeds=0,1", "--rounds=2", "--hidden=4", f"--out={tmp_path}"]
    printed = call(compare.COMMAND, "--algorithms=local,fedfomo", "--replicate=vmap", *flags)
    assert printed.splitlines()[0].split() == ["defaults", "digits-validated.flags"]
    assert [row["algorithm"] for row in rows_of(tmp_path)] == ["local", "fedfomo"]
    config = flags_of(tmp_path / "local", seed=1)
    assert (config["num_distributions"], config["train_examples"], config["validation_fraction"]) == (5, 25, 0.2)
    plan = files.read_json(tmp_path / "local" / "seed-0" / "summary.json")["plan"]
    assert any("replicates" in name for name, _ in plan)
    # Finished cells are kept, one by one.
    again = ["--algorithms=local,fedfomo", "--seeds=1", *flags[1:]]
    printed = call(compare.COMMAND, *again)
    assert printed.count("already finished") == 2 and "2 of 2 methods done: fedfomo" in printed
    # Other settings are another study.
    line = one_line(call(compare.COMMAND, *again, "--learning_rate=0.5", code=2))
    assert "--learning_rate was 0.3 and is 0.5" in line


def test_of_all_methods_those_that_need_classes_are_left_out_of_a_regression(capsys):
    read = lambda names: parse(compare.define, ["--dataset=sine", f"--algorithms={names}"]).with_defaults([])
    assert sweep.able(read("all"), ["local", "fedrod", "fedavg"], Trial(0)) == ["local", "fedavg"]
    assert capsys.readouterr().out == "left out: fedrod: needs classes\n"
    with pytest.raises(ArgumentError, match="algorithm=fedrod: needs classes"):
        sweep.able(read("local,fedrod"), ["local", "fedrod"], Trial(0))


def test_a_cell_that_has_lost_its_checkpoints_starts_over_and_says_so(tmp_path):
    flags = ["--algorithms=fedavg", "--seeds=3", "--hidden=4", f"--out={tmp_path}"]
    call(compare.COMMAND, *flags, "--rounds=2")
    for path in (tmp_path / "fedavg" / "seed-3" / "checkpoints" / "2").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert "no intact checkpoint is left; starting over at round 0" in call(compare.COMMAND, *flags, "--rounds=3")
    assert rows_of(tmp_path)[0]["algorithm"] == "fedavg"


@pytest.mark.pages
def test_a_row_is_the_mean_over_its_cells(tmp_path):
    flags = ["--algorithms=fedavg", "--seeds=3,4", "--rounds=2", "--hidden=4", "--unseen_clients=0.25"]
    flags.append("--eval_clients=5")
    printed = call(compare.COMMAND, *flags, f"--out={tmp_path}")
    (row,) = rows_of(tmp_path)
    summaries = [files.read_json(tmp_path / "fedavg" / f"seed-{seed}" / "summary.json") for seed in (3, 4)]
    last = [summary["last"]["accuracy"] for summary in summaries]
    assert row["accuracy_mean"] == pytest.approx(np.mean(last)) and row["accuracy_std"] == pytest.approx(np.std(last))
    assert row["unseen_mean"] == pytest.approx(np.mean([summary["unseen"]["accuracy"] for summary in summaries]))
    assert (tmp_path / "table.png").stat().st_size > 5000
    table = (tmp_path / "table.md").read_text()
    page = (tmp_path / "report.html").read_text()
    assert f"report: {tmp_path / 'report.html'}" in printed and "mean ± std over seeds 3, 4" in page
    for seed in (3, 4):
        assert (
            f'href="fedavg/seed-{seed}/report.html"' in page and (tmp_path / f"fedavg/seed-{seed}/report.html").exists()
        )
    assert "unseen clients" in table and "a sample of 5 of 12 clients" in table


def test_tuning_takes_the_best_point_and_keeps_the_scores(tmp_path):
    flags = ["--algorithms=fedprox", "--seeds=3,4", "--rounds=3", "--hidden=4", "--optimizer=sgd", f"--out={tmp_path}"]
    tuning = ["--tune=0.000001,0.3", "--tune_knobs", "--replicate=vmap"]
    printed = call(compare.COMMAND, *flags, *tuning)
    grid = METHODS["fedprox"].__dataclass_fields__["mu"].metadata["grid"]
    kept = files.read_json(tmp_path / "fedprox" / "tuning.json")
    assert len(kept["scores"]) == 2 * len(grid) and kept["settings"]["--validation_fraction"] == 0.25
    best = kept["grid"][int(np.argmax(kept["scores"]))]
    assert best["learning_rate"] == 0.3
    used = flags_of(tmp_path / "fedprox", seed=4)
    assert (used["validation_fraction"], used["learning_rate"]) == (0.0, 0.3)
    assert used["fedprox.mu"] == best["knobs"]["mu"]
    (row,) = rows_of(tmp_path)
    assert (
        row["tuned"] == f"rate 0.3, mu {best['knobs']['mu']:g}" and row["tuned"] in (tmp_path / "table.md").read_text()
    )
    # Neither scores nor cells are made again, and scores of another grid are not taken.
    assert "already tuned" not in printed and "tuning.json: already tuned" in call(compare.COMMAND, *flags, *tuning)
    line = one_line(call(compare.COMMAND, *flags, "--tune=0.3,0.5", code=2))
    assert line.startswith("--rerun: ") and "tuning.json has scores of something else (settings, grid changed)" in line
    # A knob on the command line is not tuned.
    knobs_of = lambda *given: sweep.tuned_knobs(parse(compare.define, [*flags, *tuning, *given]), "fedprox")
    assert (knobs_of("--fedprox.mu=1"), knobs_of()) == ({}, {"mu": grid})


@pytest.mark.slow
def test_each_further_knob_is_tuned_at_the_best_of_what_came_before(tmp_path):
    flags = ["--algorithms=fedadam", "--seeds=3", "--rounds=2", "--hidden=4", "--optimizer=sgd", f"--out={tmp_path}"]
    call(compare.COMMAND, *flags, "--tune=0.1", "--tune_knobs", "--replicate=vmap")
    first, second = (files.read_json(tmp_path / "fedadam" / f"tuning{end}.json") for end in ("", "-tau"))
    grids = {name: field.metadata["grid"] for name, field in METHODS["fedadam"].__dataclass_fields__.items()}
    assert [point["knobs"] for point in first["grid"]] == [{"rate": rate} for rate in grids["rate"]]
    best = first["best"]["knobs"]["rate"]
    assert best == grids["rate"][int(np.argmax(first["scores"]))]
    assert [point["knobs"] for point in second["grid"]] == [{"rate": best, "tau": tau} for tau in grids["tau"]]
    used = flags_of(tmp_path / "fedadam", seed=3)
    assert (used["fedadam.rate"], used["fedadam.tau"]) == (best, second["best"]["knobs"]["tau"])
    settings = parse(compare.define, [*flags, "--tune=0.1", "--tune_knobs"])
    assert sweep.chosen(settings, "fedadam", tmp_path / "fedadam") == Point(0.1, second["best"]["knobs"])


def test_a_method_that_diverges_leaves_the_others_their_table(tmp_path):
    flags = ["--dataset=sine", "--num_clients=3", "--rounds=10", "--eval_every=5", "--seeds=0"]
    names = "--algorithms=fedavg,fedavgm,local"
    line = one_line(call(compare.COMMAND, names, "--fedavgm.rate=1e30", *flags, f"--out={tmp_path}", code=1))
    assert "fedavgm: " in line and "is not finite" in line and "local" not in line
    assert [row["algorithm"] for row in rows_of(tmp_path)] == ["fedavg", "local"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison of one cell after 4 rounds, and its flags."""
    out = tmp_path_factory.mktemp("finished")
    flags = ["--dataset=sine", "--num_clients=3", "--eval_every=2", "--seeds=0", "--algorithms=fedavg"]
    call(compare.COMMAND, *flags, "--rounds=4", f"--out={out}")
    return out, flags


FILES = ("summary.json", "metrics.jsonl", "results.npz", "collaboration.npz", "config.json")


def harmed(out, name, harm):
    """What is wrong with a cell after harm to a file."""
    path = out / "fedavg" / "seed-0" / name
    content = path.read_bytes()
    path.unlink() if harm == "gone" else path.write_bytes(content[: len(content) // 2] if harm == "cut" else b"")
    return f"{name} is missing" if harm == "gone" else f"{name} is not what the run wrote"


@pytest.mark.parametrize("harm", ["cut", "empty", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_of_a_cell_is_found(finished, tmp_path, name, harm):
    shutil.copytree(finished[0], tmp_path / "out")
    assert harmed(tmp_path / "out", name, harm) == study.damage(tmp_path / "out" / "fedavg" / "seed-0")


@pytest.mark.parametrize(("name", "harm"), [*zip(FILES, ["cut", "gone", "empty", "gone", "cut"], strict=True)])
def test_a_damaged_cell_is_run_again_and_said_so(finished, tmp_path, name, harm):
    out, flags = finished
    shutil.copytree(out, tmp_path / "out")
    what = harmed(tmp_path / "out", name, harm)
    printed = call(compare.COMMAND, *flags, "--rounds=4", f"--out={tmp_path / 'out'}")
    assert f"3 clients, 4 rounds, running again: {what}" in printed
    assert "finished before" not in printed
    scores = lambda folder: [(row["accuracy_mean"], row["best_mean"], row["curve_mean"]) for row in rows_of(folder)]
    assert str(scores(tmp_path / "out")) == str(scores(out))
    assert "already finished" in call(compare.COMMAND, *flags, "--rounds=4", f"--out={tmp_path / 'out'}")


def test_a_cell_without_a_manifest_is_kept_if_it_can_be_read(finished, tmp_path):
    out, flags = finished
    shutil.copytree(out, tmp_path / "out")
    folder = tmp_path / "out" / "fedavg" / "seed-0"
    (folder / "manifest.json").unlink()  # as an earlier version left it
    assert "already finished" in call(compare.COMMAND, *flags, "--rounds=4", f"--out={tmp_path / 'out'}")
    assert "already has 4 rounds" in call(compare.COMMAND, *flags, "--rounds=3", f"--out={tmp_path / 'out'}", code=2)
    assert study.damage(folder) == "" == study.damage(tmp_path / "nothing")
    rows = (folder / "metrics.jsonl").read_text()
    for content, wrong in ((rows.splitlines()[0], "lacks rows"), ("", "lacks rows"), (rows[:-9], "cannot be read")):
        (folder / "metrics.jsonl").write_text(content)
        assert study.damage(folder) == f"metrics.jsonl {wrong}"


def test_a_folder_with_more_rounds_is_refused_before_anything_is_run(finished, tmp_path):
    out, flags = finished
    flags = [*flags[:-1], "--algorithms=local,fedavg"]
    line = one_line(call(compare.COMMAND, *flags, "--rounds=3", f"--out={out}", code=2))
    assert line.startswith("--rounds=3: ") and line.endswith("fedavg/seed-0 already has 4 rounds; accepted: 4 or more")
    assert not (out / "local").exists()


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--replicate=all", "auto, vmap, no"),
        ("--seeds=0,x", "whole numbers of 0 or more"),
        ("--algorithms=local,fedsgd9", "unknown algorithm"),
        ("--ditto.strength=1", "not a knob of this run's methods"),
        ("--tune=0", "different numbers above 0"),
        ("--algorithms=", "different values"),
        ("--fedper.personal_layers=9", "0 to 2"),
        ("--text_stride=2", "--dataset=text"),
        ("--learning_rates=ditto:0.1", "for this run's methods"),
    ],
)
def test_mistakes_are_one_line(tmp_path, flag, word):
    also = ["--algorithms=local,fedper"] * flag.startswith("--fedper")
    line = refused(compare.COMMAND, tmp_path / "out", *also, flag)
    assert line.startswith(flag.split("=")[0]) and word in line


METHOD = '''
import dataclasses
from pfljax import FedAvg, knob, method

@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class Mine(FedAvg):
    """Mine (Me, 2026): FedAvg by another name."""
    strength: float = knob(0.5, above=0, help="of nothing")
'''


@pytest.mark.slow
def test_a_method_of_one_s_own_is_compared_from_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(METHOD)
    flags = ["--seeds=0", "--rounds=1", "--hidden=4", "--mine.strength=2", f"--out={tmp_path / 'out'}"]
    call(compare.COMMAND, f"--algorithms=fedavg,{tmp_path / 'mine.py'}:Mine", *flags)
    fedavg, mine = rows_of(tmp_path / "out")
    assert mine["algorithm"] == "mine" and flags_of(tmp_path / "out" / "mine")["mine.strength"] == 2.0
    assert mine["accuracy_mean"] == fedavg["accuracy_mean"]
