"""The command compare: cells that are kept, replicates in one kernel, tuning."""

import errno
import shutil

import html_pages
import numpy as np
import pytest
from commands import call, flags_of, one_line, refused, rows_of

from pfljax.api import comparison, study, tuning
from pfljax.cli import build, compare
from pfljax.cli.settings import parse
from pfljax.contract.errors import ArgumentError
from pfljax.folder import files, planned
from pfljax.report import terms, watching
from pfljax.settings.method import METHODS


def test_of_all_methods_those_that_need_classes_are_left_out_of_a_regression(tmp_path):
    settings = parse(compare.define, ["--dataset=sine"]).with_defaults([])
    said = []
    options = build.table_options(settings, {name: name for name in ("local", "fedrod", "fedavg")})
    one_round = study.Study(1, say=said.append)
    arranged = comparison.arranged(**options, study=one_round, leave_out=True)
    assert list(arranged.entries) == ["local", "fedavg"]
    assert said == ["left out: fedrod: needs classes"]
    with pytest.raises(ArgumentError, match="method=fedrod: needs classes"):
        comparison.arranged(**options, study=one_round).check()


@pytest.mark.long
def test_a_cell_that_has_lost_its_checkpoints_starts_over_and_says_so(tmp_path):
    flags = ["--methods=fedavg", "--seeds=3", "--hidden=4", f"--out={tmp_path}"]
    call(compare.COMMAND, *flags, "--rounds=2")
    for path in (tmp_path / "fedavg" / "seed-3" / "checkpoints" / "2").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert "no intact checkpoint is left; starting over at round 0" in call(
        compare.COMMAND, *flags, "--rounds=3"
    )
    assert rows_of(tmp_path)[0]["method"] == "fedavg"


@pytest.mark.slow
@pytest.mark.pages
def test_a_row_is_the_mean_over_its_cells(tmp_path):
    flags = ["--methods=fedavg", "--seeds=3,4", "--rounds=2", "--hidden=4", "--unseen=0.25"]
    flags.append("--eval_clients=5")
    printed = call(compare.COMMAND, *flags, f"--out={tmp_path}")
    (row,) = rows_of(tmp_path)
    summaries = [
        files.read_json(tmp_path / "fedavg" / f"seed-{seed}" / "summary.json") for seed in (3, 4)
    ]
    last = [summary["last"]["accuracy"] for summary in summaries]
    mean = np.mean(last)
    std = np.std(last, ddof=1)
    assert (row["score_mean"], row["score_std"], row["runs"]) == pytest.approx((mean, std, 2))
    assert row["unseen_mean"] == pytest.approx(
        np.mean([summary["unseen"]["accuracy"] for summary in summaries])
    )
    assert (tmp_path / "table.png").stat().st_size > 5000
    table = (tmp_path / "table.md").read_text()
    page = html_pages.read(tmp_path / "report.html")
    assert f"report: {tmp_path / 'report.html'}" in printed
    assert "mean ± sample deviation (runs) over seeds 3, 4" in page.text
    assert f"{100 * mean:.1f} ± {100 * std:.1f} (2)" in table
    for seed in (3, 4):
        link = f"fedavg/seed-{seed}/report.html"
        assert link in page.links and (tmp_path / link).exists()
    assert "unseen clients" in table and "a sample of 5 of 12 clients" in table


@pytest.mark.slow
def test_tuning_takes_the_best_point_and_keeps_the_scores(tmp_path):
    flags = [
        "--methods=fedprox",
        "--seeds=3,4",
        "--rounds=10",
        "--hidden=4",
        "--optimizer=sgd",
        f"--out={tmp_path}",
    ]
    tuning = [
        "--tune=0.000001,0.00001,0.3",
        "--tune_hyperparameters",
        "--tune_widen=0",
        "--replicate=vmap",
    ]
    printed = call(compare.COMMAND, *flags, *tuning)
    grid = METHODS["fedprox"].__dataclass_fields__["mu"].metadata["grid"]
    kept = files.read_json(tmp_path / "fedprox" / "tuning.json")
    assert (
        len(kept["scores"]) == 3 * len(grid) and kept["settings"]["--validation_fraction"] == 0.25
    )
    best = kept["grid"][int(np.argmax(kept["scores"]))]
    # on the table's splits
    assert best["learning_rate"] == 0.3 and kept["trials"] == [[1000, 3], [1001, 4]]
    used = flags_of(tmp_path / "fedprox", seed=4)
    assert (used["validation_fraction"], used["learning_rate"]) == (0.25, 0.3)
    assert used["fedprox.mu"] == best["hyperparameters"]["mu"]
    (row,) = rows_of(tmp_path)
    mu = best["hyperparameters"]["mu"]
    table = (tmp_path / "table.md").read_text()
    mark = " (edge)" * (mu in (min(grid), max(grid)))
    assert row["tuned"] == f"learning rate 0.3 (edge), mu {mu:g}{mark}" and row["tuned"] in table
    assert row["at_edge"] == ["learning_rate"] + ["mu"] * bool(mark) and terms.AT_EDGE in table
    # Neither scores nor cells are made again, and scores of another grid are not taken.
    assert "already tuned" not in printed and "tuning.json: already tuned" in call(
        compare.COMMAND, *flags, *tuning
    )
    line = one_line(call(compare.COMMAND, *flags, "--tune=0.3,0.5", "--tune_widen=0", code=2))
    assert (
        line.startswith("--rerun: ")
        and "tuning.json has scores of something else (settings, grid changed)" in line
    )

    # A hyperparameter on the command line is not tuned.
    def hyperparameters_of(*given):
        return build.tuned_hyperparameters(
            parse(compare.define, [*flags, *tuning, *given]), "fedprox"
        )

    assert (hyperparameters_of("--fedprox.mu=1"), hyperparameters_of()) == ({}, {"mu": grid})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--seeds=0,1", [(1000, 0), (1001, 1)]),
        ("--seeds=0,1,2,3,4", [(1000, 0), (1001, 1), (1002, 2)]),
        ("--seeds=1000,5", [(1001, 5), (1002, 1000)]),  # the default never overlaps
        ("--seeds=0,1 --tune_seeds=7,8,9", [(7, 0), (8, 1), (9, 0)]),
        ("--seeds=0 --splits=3,4 --tune_seeds=7,8", [(7, 3), (8, 4)]),
        ("--seeds=0 --splits=3,4,5", [(1000, 3), (1000, 4), (1000, 5)]),
    ],
)
def test_rates_are_chosen_on_other_seeds_than_those_of_the_table(flags, expected):
    settings = parse(compare.define, ["--tune", *flags.split()])
    seeds, splits, given = (
        settings.numbers(name, int) for name in ("seeds", "splits", "tune_seeds")
    )
    assert (
        tuning.trials_on(comparison.tuning_seeds(seeds, given), splits or None, seeds) == expected
    )


def test_groups_that_are_told_are_not_tuned():
    def hyperparameters_of(*flags):
        return build.tuned_hyperparameters(
            parse(compare.define, ["--tune_hyperparameters", *flags]), "ifca"
        )

    assert hyperparameters_of("--tell_groups") == {} and list(hyperparameters_of()) == ["clusters"]


@pytest.mark.long
def test_a_method_that_diverges_leaves_the_others_their_table(tmp_path):
    flags = ["--dataset=sine", "--num_clients=3", "--rounds=10", "--eval_every=5", "--seeds=0"]
    names = "--methods=fedavg,fedavgm,local"
    line = one_line(
        call(
            compare.COMMAND,
            names,
            "--fedavgm.server_learning_rate=1e30",
            *flags,
            f"--out={tmp_path}",
            code=1,
        )
    )
    assert "fedavgm failed: " in line and "is not finite" in line and "local" not in line
    rows = rows_of(tmp_path)
    assert [row["method"] for row in rows] == ["fedavg", "fedavgm", "local"]
    assert [("failed" in row, row["runs"]) for row in rows] == [(False, 1), (True, 0), (False, 1)]
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert (
        lines[2].startswith("fedavgm,failed,-")
        and rows[1]["failed"] in (tmp_path / "table.md").read_text()
    )


@pytest.mark.long
@pytest.mark.pages
def test_methods_are_compared_with_a_reference_in_pairs_of_splits(tmp_path):
    flags = ["--methods=local,fedavg", "--splits=0,1", "--seeds=3,4", "--rounds=1", "--hidden=4"]
    printed = call(compare.COMMAND, *flags, "--reference=local", f"--out={tmp_path}")
    local, fedavg = rows_of(tmp_path)
    assert [(seed["split"], seed["seed"]) for seed in local["seeds"]] == [
        (0, 3),
        (0, 4),
        (1, 3),
        (1, 4),
    ]
    accuracies = [
        np.reshape([seed["accuracy"] for seed in row["seeds"]], (2, 2)) for row in (fedavg, local)
    ]
    gains = np.subtract(*accuracies).mean(axis=1)  # by split
    assert fedavg["difference"] == pytest.approx(gains.mean()) and (
        fedavg["unit"],
        fedavg["units"],
    ) == ("split", 2)
    half = 12.706 * abs(gains[0] - gains[1]) / 2  # a deviation of |a - b| / sqrt(2), over sqrt(2)
    assert fedavg["difference_high"] == pytest.approx(gains.mean() + half, abs=1e-3)
    assert (fedavg["wins"], fedavg["losses"]) == ((gains > 0).sum(), (gains < 0).sum()) and local[
        "p"
    ] is None
    text = f"{100 * gains.mean():+.1f} ["
    page = html_pages.read(tmp_path / "report.html")
    assert "over local" in printed and all(
        text in each for each in (printed, (tmp_path / "table.md").read_text(), page.text)
    )
    assert "Intervals are over 2 splits, each with the mean over its seeds" in printed.replace(
        "\n", " "
    )
    assert "Differences" in page.sections and "Intervals are over 2 splits" in page.text


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison of one cell after 4 rounds, and its flags."""
    out = tmp_path_factory.mktemp("finished")
    flags = ["--dataset=sine", "--num_clients=3", "--eval_every=2", "--seeds=0", "--methods=local"]
    call(compare.COMMAND, *flags, "--rounds=4", f"--out={out}")
    return out, flags


FILES = ("summary.json", "metrics.jsonl", "results.npz", "collaboration.npz", "config.json")


def test_the_runs_are_listed_before_they_begin_and_say_their_rounds(finished):
    out, _ = finished
    (run,) = watching.watched([out])
    assert planned.read(out) == {out / "local" / "seed-0": 4}
    assert (run.title, run.name, run.state, run.done, run.rounds) == (
        "local",
        "seed-0",
        "finished",
        4,
        4,
    )
    assert [*run.curve] == [0, 2, 4] and run.score == "loss" and run.pace > 0


def harmed(out, name, harm):
    """What is wrong with a cell after harm to a file."""
    path = out / "local" / "seed-0" / name
    content = path.read_bytes()
    path.unlink() if harm == "gone" else path.write_bytes(
        content[: len(content) // 2] if harm == "cut" else b""
    )
    return f"{name} is missing" if harm == "gone" else f"{name} is not what the run wrote"


@pytest.mark.parametrize("harm", ["cut", "empty", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_of_a_cell_is_found(finished, tmp_path, name, harm):
    shutil.copytree(finished[0], tmp_path / "out")
    assert harmed(tmp_path / "out", name, harm) == study.damage(
        tmp_path / "out" / "local" / "seed-0"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "harm"), [("results.npz", "gone"), ("summary.json", "cut")])
def test_a_damaged_cell_is_run_again_and_said_so(finished, tmp_path, name, harm):
    out, flags = finished
    shutil.copytree(out, tmp_path / "out")
    what = harmed(tmp_path / "out", name, harm)
    printed = call(compare.COMMAND, *flags, "--rounds=4", f"--out={tmp_path / 'out'}")
    assert f"3 clients, 4 rounds, running again: {what}" in printed
    assert "finished before" not in printed

    def scores(folder):
        return [(row["score_mean"], row["best_mean"], row["curve_mean"]) for row in rows_of(folder)]

    assert str(scores(tmp_path / "out")) == str(scores(out))
    assert "already finished" in call(
        compare.COMMAND, *flags, "--rounds=4", f"--out={tmp_path / 'out'}"
    )


@pytest.mark.slow
def test_a_cell_without_a_manifest_is_kept_if_it_can_be_read(finished, tmp_path):
    out, flags = finished
    shutil.copytree(out, tmp_path / "out")
    folder = tmp_path / "out" / "local" / "seed-0"
    (folder / "manifest.json").unlink()  # as an earlier version left it
    assert "already finished" in call(
        compare.COMMAND, *flags, "--rounds=4", f"--out={tmp_path / 'out'}"
    )
    assert "already has 4 rounds" in call(
        compare.COMMAND, *flags, "--rounds=3", f"--out={tmp_path / 'out'}", code=2
    )
    assert study.damage(folder) == "" == study.damage(tmp_path / "nothing")
    rows = (folder / "metrics.jsonl").read_text()
    for content, wrong in (
        (rows.splitlines()[0], "lacks rows"),
        ("", "lacks rows"),
        (rows[:-9], "cannot be read"),
    ):
        (folder / "metrics.jsonl").write_text(content)
        assert study.damage(folder) == f"metrics.jsonl {wrong}"


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--methods=local,fedsgd9", "unknown method"),
        ("--ditto.mu=1", "not a hyperparameter of this run's methods"),
        ("--reference=ditto", "a method of the table: local, fedavg"),
        ("--tune_seeds=1,7", "accepted: other seeds than those of the table, 0, 1, 2"),
        ("--tune_widen=2", "accepted with --tune, or with --tune_hyperparameters"),
        ("--tell_groups", "accepted for clients in known groups of two or more"),
        ("--learning_rates=ditto:0.1", "for this run's methods"),
    ],
)
def test_mistakes_are_one_line(tmp_path, flag, word):
    also = ["--tune"] * flag.startswith("--tune_seeds") + ["--partition=dirichlet"] * (
        flag == "--tell_groups"
    )
    line = refused(compare.COMMAND, tmp_path / "out", *also, flag)
    assert line.startswith(flag.split("=")[0]) and word in line


def test_a_table_keeps_its_runs_and_is_replaced_only_on_demand(finished, tmp_path):
    """Methods and seeds may be added to a study's folder; another study is refused, before anything is written."""
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    before = (out / "table.json").read_bytes()
    flags = ["--dataset=sine", "--num_clients=3", "--eval_every=2", "--rounds=4", f"--out={out}"]
    for other in (["--methods=fedavg", "--seeds=0"], ["--methods=local", "--seeds=1"]):
        line = one_line(call(compare.COMMAND, *flags, *other, code=2))
        assert line.startswith(f"--out={out}: has a table with other runs, such as local/seed-0")
        assert line.endswith("accepted: a new folder, or --rerun=changed to replace the table")
    assert (out / "table.json").read_bytes() == before and not (out / "fedavg").exists()
    assert planned.read(out) == {out / "local" / "seed-0": 4}

    printed = call(compare.COMMAND, *flags, "--methods=fedavg,local", "--seeds=0")
    assert "local/seed-0: already finished" in printed
    assert [row["method"] for row in rows_of(out)] == ["fedavg", "local"]
    call(compare.COMMAND, *flags, "--methods=local", "--seeds=0", "--rerun=changed")
    assert [row["method"] for row in rows_of(out)] == ["local"]


def test_a_full_disk_is_named_with_the_file(finished, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)

    def full(path, rows):
        files.write_atomically(path, no_space)

    def no_space(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_csv", full)
    line = one_line(call(compare.COMMAND, *finished[1], "--rounds=4", f"--out={out}", code=1))
    assert line == f"{out / 'table.csv'}: No space left on device"
    assert not list(out.glob("*.tmp"))


def test_the_arguments_of_a_command_are_those_of_python(tmp_path):
    """With the preset's values, which flags override."""
    words = [
        "--methods=local,fedavg",
        "--epochs=2",
        "--seeds=4,5",
        "--rounds=7",
        f"--out={tmp_path}",
    ]
    given = compare.arguments(parse(compare.define, words))
    assert [title for title, _ in given["methods"]] == ["local", "fedavg"]
    assert given["local"].epochs == 2 and given["local"].keep_optimizer
    assert given["learning_rates"] == {"local": 0.1, "fedavg": 1.0}
    assert (given["seeds"], given["rounds"], given["splits"]) == ([4, 5], 7, None)
    assert given["clients"](4)[0].num_clients == 16
