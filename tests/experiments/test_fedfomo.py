"""The experiments of FedFomo's paper, small."""

import commands
import numpy as np
import pytest
from commands import flags_of, rows_of

from experiments.fedfomo import (
    figure1,
    figure3,
    figure5,
    figure9,
    paper,
    table1,
    table2,
    table3,
    table4,
)
from experiments.figures import hyperparameter_curves
from experiments.papers import Study, of_accuracies
from pfljax.cli import build, compare, tables
from pfljax.cli.settings import parse
from pfljax.data import embedding
from pfljax.data.sources import Source
from pfljax.evaluation import collaboration
from pfljax.folder import files
from pfljax.settings.method import METHODS

SMALL = ["--rounds=2", "--train_examples=20", "--hidden=4", "--devices=1", "--seeds=0"]


def call(module, *flags, code=0):
    """Runs a command, small; what it printed."""
    return commands.call(module.COMMAND, *SMALL, *flags, code=code)


@pytest.mark.long
def test_table1_has_a_column_for_each_number_of_clients(tmp_path):
    flags = [
        "--methods=local,fedfomo",
        "--fedfomo.neighbors=4",
        "--clients=6,20",
        f"--out={tmp_path / 'out'}",
    ]
    printed = call(table1, *flags)
    assert "6 clients" in printed and "20 clients" in printed and "Here: digits" in printed
    assert [row["method"] for row in rows_of(tmp_path / "out")] == ["local", "fedfomo"]
    few, many = (flags_of(tmp_path / "out" / f"clients-{n}" / "local") for n in (6, 20))
    assert (few["num_clients"], few["participation"], few["rounds"]) == (6, 1.0, 2)
    assert (many["num_clients"], many["participation"], many["rounds"]) == (20, 0.1, 10)
    # Digits' own settings and FedFomo's validation share, though the method of this cell needs none.
    assert (
        few["partition"] == "pathological"
        and few["lr_schedule"] == "exponential"
        and few["weight_decay"] == 1e-4
    )
    assert few["validation_fraction"] == 0.2


@pytest.mark.slow
def test_table3_deals_the_targets_and_says_what_differs(tmp_path):
    flags = [
        "--methods=fedavg,fedfomo",
        "--partition_groups=2",
        "--num_clients=6",
        f"--out={tmp_path / 'out'}",
    ]
    printed = call(table3, *flags)
    assert "for orientation only" in printed and "EMD" in printed
    rows = rows_of(tmp_path / "out")
    assert [row["method"] for row in rows] == ["fedavg", "fedfomo, n=5", "fedfomo, n=10"]
    for row, name in zip(rows, ("fedavg", "fedfomo-n5", "fedfomo-n10"), strict=True):
        run = tmp_path / "out" / "shuffled" / name / "seed-0"
        summary = files.read_json(run / "summary.json")
        assert row["shuffled"]["accuracy_mean"] == pytest.approx(summary["last"]["accuracy_mean"])
        assert f"{100 * summary['last']['accuracy_mean']:.1f}" in printed
        assert summary["per_client"][0]["target"] in (0, 1)
    # and its own
    assert flags_of(tmp_path / "out" / "shuffled" / "fedfomo-n10")["fedfomo.neighbors"] == 9
    again = call(table3, *flags)
    assert again.count("already finished") == 3


@pytest.mark.long
def test_table4_states_the_ledger_beside_the_accuracy(tmp_path):
    flags = [
        "--methods=fedavg",
        "--sigmas=0,1.5",
        "--privacy_delta=1e-4",
        "--partition_groups=2",
        "--num_clients=6",
        f"--out={tmp_path / 'out'}",
    ]
    printed = call(table4, *flags)
    without, noisy = rows_of(tmp_path / "out")
    assert without["epsilon"] == [None] and "∞" in printed
    summary = files.read_json(tmp_path / "out" / "sigma-1.5" / "fedavg" / "seed-0" / "summary.json")
    privacy = summary["privacy"]
    assert noisy["epsilon"] == [privacy["epsilon"]] and f"{privacy['epsilon']:.2f}" in printed
    assert (
        privacy["noise_multiplier"] == 1.5
        and privacy["clip_norm"] == 1.0
        and privacy["delta"] == 1e-4
    )
    assert (
        len(privacy["epsilon_per_client"]) == 6
        and max(privacy["epsilon_per_client"]) == privacy["epsilon"]
    )
    config = flags_of(tmp_path / "out" / "sigma-0" / "fedavg")
    # JSON knows no infinity
    assert config["privacy_noise_multiplier"] == 0 and config["privacy_clip_norm"] is None


@pytest.mark.long
def test_figures_sweep_their_hyperparameters(tmp_path):
    own = ["--partition_groups=2", "--num_clients=6"]
    flags = [*own, "--epsilons=1", "--downloads=2", f"--out={tmp_path / 'three'}"]
    call(figure3, *flags)
    found = rows_of(tmp_path / "three")
    assert [(line["panel"], line["value"]) for line in found] == [("epsilon", 1.0), ("models", 2)]
    assert found[0]["epochs"] == [0, 5, 10] and found[0]["curve"][-1] == pytest.approx(
        found[0]["accuracy_mean"]
    )
    assert flags_of(tmp_path / "three" / "epsilon-1")["fedfomo.epsilon"] == 1.0
    assert flags_of(tmp_path / "three" / "models-2")["fedfomo.neighbors"] == 1  # beside its own
    assert (tmp_path / "three" / "figure3.png").stat().st_size > 5000
    call(figure9, *own, "--shares=0.2,0.8", f"--out={tmp_path / 'nine'}")
    assert [line["value"] for line in rows_of(tmp_path / "nine")] == [0.2, 0.8]
    few, many = (
        files.read_json(tmp_path / "nine" / f"validation-{share}" / "seed-0" / "summary.json")
        for share in ("0.2", "0.8")
    )
    assert few["per_client"][0]["n_train"] > many["per_client"][0]["n_train"]


@pytest.mark.long
def test_figure1_has_a_line_for_each_method_over_the_numbers_of_distributions(tmp_path):
    flags = [
        "--methods=local,fedfomo",
        "--distributions=2,3",
        "--train_examples=20",
        "--hidden=4",
        "--devices=1",
    ]
    printed = commands.call(figure1.COMMAND, *flags, "--num_clients=20", f"--out={tmp_path}")
    points = [(point["method"], point["value"]) for point in rows_of(tmp_path)]
    assert points == [
        (row, number) for row in ("local", "fedfomo, n=5", "fedfomo, n=10") for number in (2, 3)
    ]
    config = flags_of(tmp_path / "fedfomo-n5-partition_groups-3")
    assert (config["partition_groups"], config["fedfomo.neighbors"], config["participation"]) == (
        3,
        4,
        0.1,
    )
    assert config["rounds"] == 30 and "20 clients, 10% of them a round" in printed
    assert (tmp_path / "figure1.png").stat().st_size > 5000
    assert parse(figure1.define, []).num_clients == 100


@pytest.mark.long
def test_figure5_draws_affinities_and_accuracy_by_noise(tmp_path):
    printed = call(figure5, "--sigmas=0,1", "--methods=fedfomo", f"--out={tmp_path}")
    assert "71.6 (epsilon ∞)" in printed and "71.3 (epsilon 6.89)" in printed  # the paper's Table 4
    assert [(point["sigma"], point["method"]) for point in rows_of(tmp_path)] == [
        (0, "fedfomo"),
        (1, "fedfomo"),
    ]
    assert (tmp_path / "figure5.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("module", "flags", "stands"),
    [
        (table1, ["--clients=15"], True),
        (table1, ["--clients=20"], False),
        (table1, ["--clients=15", "--partition_classes=3"], False),
        pytest.param(table2, [], True, marks=pytest.mark.slow),  # latent groups are found first
        pytest.param(table2, ["--num_clients=100"], False, marks=pytest.mark.slow),
        (table2, ["--partition=iid"], False),
        (table3, [], True),
        (table3, ["--partition_groups=2"], False),
        (table3, ["--targets=own"], False),
        (table4, ["--num_clients=20"], False),
    ],
)
def test_the_paper_s_values_stand_beside_its_setting_only(monkeypatch, module, flags, stands):
    shown = []
    cell = {"epsilon": [None], "unaccounted": None, "earth_movers_distance": 1.0}
    monkeypatch.setattr(
        Study, "accuracies", lambda study, *_: cell | of_accuracies([0.5] * len(study.trials))
    )
    monkeypatch.setattr(Study, "print_differences", lambda *arguments: None)
    monkeypatch.setattr(
        tables, "write", lambda title, heads, body, *rest: shown.extend(map(str, body))
    )
    call(module, "--methods=fedavg", *flags)
    assert (shown[0].count("'-'") == 0) == stands


def test_curves_are_drawn_over_epochs_and_the_last_points_beside_them():
    lines = [
        {
            "title": "a",
            "value": 0.2,
            "epochs": [5, 10],
            "curve": [0.1, 0.4],
            "accuracy_mean": 0.4,
            "accuracy_std": 0.1,
        },
        {
            "title": "b",
            "value": 0.8,
            "epochs": [5, 10],
            "curve": [0.2, 0.3],
            "accuracy_mean": 0.3,
            "accuracy_std": 0,
        },
    ]
    for figure in (
        hyperparameter_curves({"hyperparameter": lines}, "epochs"),
        figure9.curves_and_last(lines, "share"),
    ):
        drawn = [line.get_xydata().tolist() for line in figure.axes[0].lines]
        assert drawn == [[[5, 0.1], [10, 0.4]], [[5, 0.2], [10, 0.3]]]
        assert figure.axes[0].get_xlabel() == "local epochs so far"
    assert figure.axes[1].lines[0].get_xydata().tolist() == [[0.2, 0.4], [0.8, 0.3]]


def test_the_figure_of_privacy_has_the_paper_s_values_as_crosses():
    common = {"method": "a", "accuracy_std": 0.0}
    points = [
        common
        | {"sigma": 0.0, "epsilon_text": "∞", "accuracy_mean": 0.9, "paper": (np.inf, 71.56)},
        common | {"sigma": 1.0, "epsilon_text": "8.1", "accuracy_mean": 0.7, "paper": None},
    ]
    affinity = np.array([[1.0, 3.0, -2.0], [0.5, 1.0, 0.0], [0.0, -1.0, 1.0]])
    figure = figure5.privacy_figure({"sigma 0": (affinity, np.array([1, 0, 1]))}, points)
    matrix, *_, right = figure.axes
    # clients by group: 1, 0, 2; their own left out
    shown = np.ma.filled(matrix.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(
        shown, [[np.nan, 0.5, 0.0], [3.0, np.nan, -2.0], [-1.0, 0.0, np.nan]]
    )
    drawn = [line.get_xydata().tolist() for line in right.lines]
    assert [[0, 0.9], [1, 0.7]] in drawn and any(
        np.allclose(line, [[0, 0.7156]]) for line in drawn if line
    )
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["1\n8.1", "0\n∞"]


@pytest.mark.parametrize(
    ("module", "flag", "word"),
    [
        (table1, "--clients=x", "whole numbers of 1 or more"),
        (table2, "--distributions=0", "whole numbers of 1 or more"),
        (table2, "--preset=svhn", "cifar100"),
        (table3, "--targets=dealt", "own, shuffled"),
        (table3, "--embedding=resnet", "vgg11"),
        (table4, "--sigmas=-1", "0 or more"),
        (table4, "--privacy_clip_norm=0", "above 0"),
        (figure1, "--partition_groups=5", "--distributions sets its values"),
        (figure3, "--methods=fedavg", "accepted: fedfomo"),
        (figure5, "--methods=fedavg", "lists with fedfomo"),
        (figure9, "--shares=0.2,1", "below 1"),
        (figure9, "--validation_fraction=0.5", "--shares sets its values"),
        (table2, "--partition_groups=5", "--distributions sets its values"),
        (table1, "--participation=0.5", "columns set it"),
    ],
)
def test_mistakes_are_one_line(tmp_path, module, flag, word):
    error = call(module, flag, f"--out={tmp_path / 'out'}", code=2)
    (line,) = error.strip().splitlines()
    assert line.startswith("error: ") and flag.split("=")[0].strip("-") in line and word in line
    assert not (tmp_path / "out").exists()


def test_ten_distributions_of_cifar10_are_its_classes():
    settings = parse(table2.define, [])
    cifar10 = Source(
        np.zeros((2, 32, 32, 3)), np.zeros(2, np.int32), None, None, 10, "classification", "cifar10"
    )

    def made(number):
        return build.build_partition(
            settings.replace(partition_groups=number), cifar10, 0
        ).embedding

    assert made(10) is embedding.classes
    assert isinstance(made(5), embedding.Embedding) and made(5).name == "vgg11"


def test_the_paper_s_rows_are_methods_here():
    tables = [
        *paper.TABLE1.values(),
        *paper.TABLE2.values(),
        *paper.TABLE3.values(),
        *paper.TABLE4.values(),
    ]
    for table in tables:
        assert {title.split(",")[0] for title in table} <= METHODS.keys()
    assert paper.TABLE2["cifar10"]["fedfomo, n=10"][5] == (85.534, 0.53)
    assert paper.TABLE2["cifar100"]["local"][10] == (41.26, 1.31)


@pytest.mark.parametrize(
    "path", sorted(paper.PAPER.presets.glob("*.flags")), ids=lambda path: path.stem
)
def test_presets_are_those_of_the_appendix(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    name, _, method = path.stem.partition("-")
    assert name in paper.PAPER.names and (not method or method in METHODS)
    if method:
        return
    values = dict(line.removeprefix("--").split("=") for line in lines if line.startswith("--"))
    expected = {
        "model": "mcmahan_cnn",
        "weight_decay": 1e-4,
        "epochs": 5,
        "lr_decay": 0.99,
        "rounds": 20,
    }
    expected["learning_rate"] = 0.01 if path.stem == "mnist" else 0.1
    assert values.get("augment", "none") == ("none" if path.stem == "mnist" else "crop_flip")
    for name, value in expected.items():
        assert values[name] == value or np.isclose(float(values[name]), value)


@pytest.mark.parametrize(
    ("preset", "dataset", "data", "head"),
    [
        (None, "digits", "mnist", "paper, MNIST"),
        ("cifar10", "npz", "cifar10", "paper, CIFAR-10"),
        ("cifar100", "npz", "cifar100", "paper"),  # of which Table 1 has nothing
        (None, "tfds:svhn_cropped", None, "paper"),
    ],
)
def test_values_of_other_data_do_not_stand_in_their_place(preset, dataset, data, head):
    settings = parse(table1.define, []).replace(preset=preset, dataset=dataset)
    values = paper.PAPER.values(settings, paper.TABLE1, "mnist")
    assert values.data == data and values.head == head and bool(values.by_row) == (head != "paper")


@pytest.mark.slow
def test_on_digits_it_does_what_it_is_for(tmp_path):
    """Above FedAvg and FedProx and not below Local; and clients find their own group."""
    flags = [
        "--partition=latent",
        "--num_clients=15",
        "--partition_groups=5",
        "--seeds=0",
        f"--out={tmp_path}",
    ]
    commands.call(
        compare.COMMAND, "--methods=fedfomo,fedavg,fedprox,local", "--fedfomo.neighbors=5", *flags
    )
    scores = {row["method"]: row["score_mean"] for row in rows_of(tmp_path)}
    assert scores["fedfomo"] > max(scores["fedavg"], scores["fedprox"]) + 0.1
    assert scores["fedfomo"] >= scores["local"]
    found = files.read_npz(tmp_path / "fedfomo" / "seed-0" / "collaboration.npz")
    assert (
        collaboration.top_affinities(found["affinity"][-1], found["group"], found["group"]) >= 0.8
    )


@pytest.mark.long
def test_on_digits_with_shuffled_targets_it_leads_those_that_share_no_examples(tmp_path):
    flags = ["--methods=fedavg,fedprox,per_fedavg,fedfomo", "--seeds=0,1", f"--out={tmp_path}"]
    commands.call(table3.COMMAND, "--fedfomo.neighbors=5", *flags)
    *others, ours = [row["shuffled"]["accuracy_mean"] for row in rows_of(tmp_path)]
    assert ours > max(others) + 0.05
