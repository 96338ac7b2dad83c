"""The experiments of FedeRiCo's paper, small."""

import csv

import commands
import numpy as np
import pytest
from commands import rows_of

from experiments.federico import (
    cells,
    figure1,
    figure3,
    figure4,
    figure5,
    figure6,
    figure7,
    figure10,
    paper,
    readings,
    table1,
    table4,
    unshared,
)
from experiments.federico.network import SmallCNN
from experiments.papers import of_accuracies
from pfljax import models
from pfljax.api import table
from pfljax.cli import build
from pfljax.cli.settings import parse
from pfljax.evaluation import collaboration
from pfljax.folder import files

SMALL = ["--rounds=2", "--eval_every=1", "--hidden=4", "--devices=1", "--splits=0", "--seeds=0"]


def test_the_paper_s_tables_show_federico_above_all_others():
    for data, rows in paper.TABLE1.items():
        for groups in paper.DISTRIBUTIONS:
            best = max(rows, key=lambda name: rows[name][groups][0])
            assert best == "federico", (data, groups)
            assert set(rows) == set(paper.METHODS)
    assert (
        max(paper.TABLE4["features"], key=lambda name: paper.TABLE4["features"][name][0])
        == "federico"
    )


@pytest.mark.parametrize("size", list(paper.SIZES))
@pytest.mark.parametrize("data", paper.PAPER.names)
def test_every_size_has_the_paper_s_settings(size, data, tmp_path):
    file = tmp_path / "data.npz"
    words = [f"--size={size}", f"--preset={data}"] + (
        [] if data == "digits" else [f"--data_file={file}"]
    )
    study = paper.start(parse(table1.define, words))
    own = study.settings
    assert (own.optimizer, own.learning_rate, own["fedem.components"]) == ("adam", 0.01, 4)
    assert own.num_clients == (10 if data == "features" else 8) and not own.partition_balanced
    assert (own["federico.neighbors"], own["federico.epsilon"], own["federico.beta"]) == (
        3,
        0.3,
        0.6,
    )
    assert study.paper.settings_of(own, "fedfomo").validation_fraction == 0.2
    # FedFomo alone gives up data
    assert study.paper.settings_of(own, "federico").validation_fraction == 0.0
    if size == "paper":
        runs = {"cifar10": 15, "cifar100": 3, "features": 3, "digits": 15}[data]
        assert len(study.trials) == runs and own.rounds == (400 if data == "features" else 150)
    if data == "cifar10":
        assert (own.train_examples, own.test_examples, own.batch_size) == (500, 125, 50)


@pytest.mark.slow
def test_table1_is_paired_by_split_and_seed(tmp_path):
    flags = [
        *SMALL,
        "--partition_groups=2",
        "--methods=local,federico",
        "--splits=3",
        "--seeds=0,1",
    ]
    printed = commands.call(table1.COMMAND, *flags, f"--out={tmp_path}")
    # the paper's, CIFAR-10 with two groups
    assert "40.1 ± 2.8" in printed and "56.6 ± 2.5" in printed
    local, federico, literal = rows_of(tmp_path)
    assert literal["method"] == paper.LITERAL and literal["D2"]["paper"] == federico["D2"]["paper"]
    accuracies = {}
    for name in ("local", "federico"):
        folders = [tmp_path / "D2" / name / f"split-3-seed-{seed}" for seed in (0, 1)]
        accuracies[name] = [
            files.read_json(out / "summary.json")["last"]["accuracy"] for out in folders
        ]
    assert local["D2"]["accuracies"] == accuracies["local"]
    assert federico["D2"]["paper"] == pytest.approx([0.5661, 0.0251])
    gains = 100 * np.subtract(accuracies["federico"], accuracies["local"])
    # Student's t of two seeds
    low, high = gains.mean() + np.array([-1, 1]) * 12.7062 * abs(gains[0] - gains[1]) / 2
    lead = f"{gains.mean():+.1f} [{low:+.1f}, {high:+.1f}] ({(gains > 0).sum()} of 2)"
    table = (tmp_path / "table.md").read_text()
    local = 100 * np.array(accuracies["local"])
    assert (
        lead in table
        and f"{local.mean():.1f} ± {abs(local[0] - local[1]) / np.sqrt(2):.1f} (2)" in table
    )
    assert (federico["D2"]["unit"], federico["D2"]["units"]) == ("seed", 2)
    assert 0 <= federico["D2"]["across"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("module", [table1, table4])
def test_tables_have_rows_of_the_listing_to_the_letter_and_of_friends(
    module, tmp_path, monkeypatch
):
    asked = []
    cell = of_accuracies([0.5]) | {
        "std_over_clients": 0.1,
        "parameters": 1,
        "within": 1,
        "across": 0,
    }

    def accuracies(study, row, out):
        asked.append((row, study.settings_of(row), out))
        return dict(cell)

    monkeypatch.setattr(paper, "accuracies", accuracies)
    monkeypatch.setattr(paper, "sharing", lambda study, out: collaboration.Sharing(1.0, 0.0))
    flags = ["--splits=0", "--seeds=0", "--partition_groups=3", f"--out={tmp_path}"]
    commands.call(module.COMMAND, *flags)
    titles = [*paper.METHODS, paper.LITERAL, paper.FRIENDS]
    assert [row.title for row, _, _ in asked] == titles
    assert [row["method"] for row in rows_of(tmp_path)] == titles
    (_, algorithm1, _), (_, literal, out), _ = asked[-3:]
    assert not algorithm1["federico.literal"] and literal["federico.literal"]
    assert out.name == "FedeRiCo-literal" and literal.partition_groups == 3
    assert [row.method for row, _, _ in asked[-3:]] == ["federico", "federico", paper.FRIENDS]
    published = [row.get("D3", row)["paper"] for row in rows_of(tmp_path)[-3:]]
    assert published[0] == published[1] is not None and published[2] is None  # ours is not theirs
    asked.clear()
    commands.call(module.COMMAND, *flags, "--federico.literal")
    # the row would be the same one
    assert [row.title for row, _, _ in asked] == [*paper.METHODS, paper.FRIENDS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        figure3,
        table4,
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in (figure4, figure5, figure6, figure7, figure10)
        ),
    ],
)
def test_the_other_commands_leave_a_table_and_figures(module, tmp_path):
    methods = ["--methods=local,federico"] if module is table4 else []
    commands.call(module.COMMAND, *SMALL, *methods, "--partition_groups=2", f"--out={tmp_path}")
    assert rows_of(tmp_path) and (tmp_path / "table.md").exists()
    if module is not table4:
        assert list(tmp_path.glob("figure*.png"))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("default", "friends"), marks=pytest.mark.long),
        pytest.param(tuple(readings.READINGS), marks=pytest.mark.long),
    ],
)
def test_readings_are_compared_on_splits_of_their_own(names, tmp_path, monkeypatch):
    monkeypatch.setattr(readings, "READINGS", {name: readings.READINGS[name] for name in names})
    flags = [
        "--rounds=2",
        "--eval_every=1",
        "--hidden=4",
        "--devices=1",
        "--seeds=0",
        f"--out={tmp_path}",
    ]
    commands.call(readings.COMMAND, *flags)
    rows = rows_of(tmp_path)
    assert [row["reading"] for row in rows] == 3 * list(readings.READINGS)
    assert {path.name for path in (tmp_path / "D4" / "local").iterdir()} == {
        f"split-{n}-seed-0" for n in range(5, 10)
    }
    assert all(len(row["gains"]) == 5 for row in rows)


@pytest.mark.long
def test_figure1_compares_the_letter_the_algorithm_and_friends_and_resumes(tmp_path):
    flags = ["--rounds=3", "--eval_every=3", "--devices=1", f"--out={tmp_path}"]
    commands.call(figure1.COMMAND, *flags)
    rows = rows_of(tmp_path)
    assert [row["run"] for row in rows] == ["literal", "federico", "federico_friends"]
    assert len({row["loss"] for row in rows}) == 3
    assert (tmp_path / "literal" / "figures" / "curve.png").exists()
    found = files.read_npz(tmp_path / "literal" / "curve.npz")
    np.testing.assert_allclose(found["truth"], np.sin(found["grid"]), atol=1e-6)
    num_clients = len(found["prediction"])
    assert found["prediction"].shape[1:] == found["reference"].shape == (400,)
    # Each client is drawn on its own share of the angles.
    np.testing.assert_array_equal(np.isfinite(found["prediction"]).sum(axis=1), 400 // num_clients)
    config = files.read_json(tmp_path / "literal" / "fedavg-0.01" / "config.json")["flags"]
    assert config["method"] == "fedavg" and config["learning_rate"] == pytest.approx(0.01)
    commands.call(figure1.COMMAND, *flags)
    assert rows_of(tmp_path) == rows


def test_splits_and_seeds_are_crossed():
    trials = build.trials_of(parse(table1.define, ["--splits=4,7", "--seeds=0,1"]))
    assert [(trial.data_seed, trial.seed) for trial in trials] == [(4, 0), (4, 1), (7, 0), (7, 1)]
    assert (
        trials[1].folder == "split-4-seed-1" and table.named(trials) == "seeds 0, 1 on splits 4, 7"
    )
    alone = build.trials_of(parse(table1.define, ["--seeds=5"]))
    assert [(trial.data_seed, trial.folder) for trial in alone] == [(5, "seed-5")]


@pytest.mark.parametrize(
    "flags", [["--splits=0,0"], ["--splits=-1"], ["--splits=a"], ["--seeds=1,1"]]
)
def test_splits_are_different_whole_numbers(flags, tmp_path):
    said = commands.call(table1.COMMAND, *flags, f"--out={tmp_path / 'out'}", code=2)
    assert (
        said.startswith(f"error: {flags[0]}: accepted: different whole numbers")
        and not (tmp_path / "out").exists()
    )


def test_the_small_network_is_as_small_as_it_says():
    model = models.build(SmallCNN, (32, 32, 3), "classification", 10)
    assert model.num_parameters == 5 * 5 * 3 * 16 + 16 + 3 * 3 * 16 * 32 + 32 + 5 * 5 * 32 * 10 + 10


def test_clients_that_share_nothing_have_labels_and_axes_of_their_own():
    x, y, _ = unshared.read(None)
    assert x.shape == (1797, 64) and np.square(x).mean() == pytest.approx(1, abs=1e-4)
    own, rotated = (
        unshared.clients_of(f"{kind}-20", (x, y, None))(3) for kind in ("own", "rotated")
    )
    assert own.train.size.tolist() == rotated.train.size.tolist() == [20] * 8
    known = {row.tobytes(): label for row, label in zip(x, y, strict=True)}
    for k in range(8):
        shown = zip(np.asarray(own.train.x[k]), np.asarray(own.train.y[k]), strict=True)
        pairs = {(known[row.tobytes()], int(label)) for row, label in shown}
        # one-to-one
        assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
    lengths = np.linalg.norm(np.asarray(rotated.train.x[0]), axis=1)
    everyone = np.linalg.norm(x, axis=1)
    assert all(np.abs(everyone - length).min() < 1e-3 for length in lengths)


def labels_by_image(federation, k):
    """A client's labels, by its images."""
    size = int(federation.train.size[k])
    x = np.asarray(federation.train.x[k])[:size]
    y = np.asarray(federation.train.y[k])[:size]
    return {row.tobytes(): label for row, label in zip(x, y, strict=True)}


@pytest.mark.parametrize("cell", cells.CELLS)
def test_every_cell_has_eight_clients_that_are_the_same_for_a_seed(cell):
    digits = cells.read(None)
    clients_of_seed = cells.clients_of(cell, digits)
    first, again = clients_of_seed(1), clients_of_seed(1)
    np.testing.assert_array_equal(first.train.y, again.train.y)
    assert first.num_clients == 8 and first.test.size.min() >= 10
    if cells.is_regression(cell):
        values = np.concatenate([np.ravel(first.test.y), np.ravel(first.train.y)])
        assert values.dtype == np.float32 and 0.5 < np.var(values) < 2


@pytest.mark.parametrize(("cell", "changed"), [("swap-2", 2), ("swap-4", 4), ("own-100", 10)])
def test_permuted_classes_are_the_client_s_own(cell, changed):
    x, y, client = cells.read(None)
    true = {row.tobytes(): label for row, label in zip(x, y, strict=True)}
    federation = cells.clients_of(cell, (x, y, client))(0)
    numbers = []
    for k in range(8):
        labels = labels_by_image(federation, k)
        pairs = {(true[image], label) for image, label in labels.items()}
        assert len(pairs) == len({label for label, _ in pairs})  # a function of the true label
        numbers.append(tuple(sorted(pairs)))
        assert sum(before != after for before, after in pairs) == changed
    assert len(set(numbers)) > 4


def test_noise_is_in_training_labels_of_every_second_client_only():
    x, y, client = cells.read(None)
    true = {row.tobytes(): label for row, label in zip(x, y, strict=True)}
    federation = cells.clients_of("noisy-40", (x, y, client))(0)
    for k in range(8):
        labels = labels_by_image(federation, k)
        wrong = np.mean([true[image] != label for image, label in labels.items()])
        assert 0.2 < wrong < 0.55 if k % 2 == 0 else wrong == 0
    test_x = np.asarray(federation.test.x).reshape(-1, 64)
    test_y = np.asarray(federation.test.y).ravel()
    assert all(true[row.tobytes()] == label for row, label in zip(test_x, test_y, strict=True))


@pytest.mark.long
def test_methods_are_compared_with_local_for_each_client(tmp_path, monkeypatch, capsys):
    flags = [
        "--cells=own-20",
        "--methods=local,federico",
        "--seeds=0,1",
        "--rounds=2",
        f"--out={tmp_path}",
    ]
    monkeypatch.setattr("sys.argv", ["unshared", *flags])
    unshared.main()
    heads, cells = csv.reader((tmp_path / "table.csv").read_text().splitlines())
    table = dict(zip(heads, cells, strict=True))
    assert table["cell"] == "own-20"

    def of(name, seed):
        return files.read_npz(tmp_path / "own-20" / name / f"seed-{seed}" / "results.npz")

    local, federico = (
        [100 * of(name, seed)["accuracy_test"][-1] for seed in (0, 1)]
        for name in ("local", "federico")
    )
    gain = np.mean(federico) - np.mean(local)
    losing = np.mean(np.subtract(federico, local) < -5)
    assert float(table["local"]) == pytest.approx(np.mean(local), abs=0.06)
    accuracy = table["federico"].split(", ", 1)[0]
    told = table["federico"]
    lost = f"{losing:.0%}"
    assert float(accuracy) == pytest.approx(np.mean(federico), abs=0.06)
    assert lost in told and float(told.split(", ")[1].split(" [")[0]) == pytest.approx(
        gain, abs=0.06
    )
    assert "own-20" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["unshared", "--cells=twins"])
    with pytest.raises(SystemExit) as error:
        unshared.main()
    assert error.value.code == 2 and "--cells=twins: accepted: own-20" in capsys.readouterr().err
