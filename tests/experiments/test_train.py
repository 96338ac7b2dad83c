"""The entry point train: mistakes are one line, and a run leaves what it should."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from absl.testing import flagsaver

from experiments import common, train
from pfljax.training import files

SMALL = ["--num_clients=4", "--rounds=4", "--eval_every=2", "--hidden=4", "--federico.neighbors=1", "--plan=map"]


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Runs the command in this process: (its flags) -> (exit code, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "set_up_devices", lambda *_: None)  # tests have theirs

    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["train", *flags])
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as end:
            common.main(train.run)
        return end.value.code or 0, capsys.readouterr().err

    return call


@pytest.fixture(scope="module")
def npz(tmp_path_factory):
    """Writes npz files: (name, arrays) -> path."""
    folder = tmp_path_factory.mktemp("npz")

    def write(name, **arrays):
        np.savez(folder / f"{name}.npz", **arrays)
        return str(folder / f"{name}.npz")

    return write


def one_line(error):
    """The text of a single error line."""
    lines = error.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Traceback" not in error
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--algorithm=federiko"], ["--algorithm=federiko", "federico"]),
        (["--algorithm=zzz"], ["--algorithm=zzz", "local", "fedavg"]),
        (["--num_clients=1700", "--federico.neighbors=1"], ["--num_clients=1700"]),
        (["--num_clients=4", "--federico.neighbors=4"], ["--federico.neighbors=4", "0 to 3"]),
        (["--participation=0.25", "--num_clients=8"], ["--federico.neighbors=3", "0 to 1"]),
        (["--federico.epsilon=1.5"], ["--federico.epsilon=1.5", "[0, 1]"]),
        (["--federico.epsilon=-0.1"], ["--federico.epsilon=-0.1", "[0, 1]"]),
        (["--federico.beta=0"], ["--federico.beta=0"]),
        (["--federico.tracking=median"], ["federico.tracking", "ema"]),
        (["--algorithm=local", "--federico.epsilon=0.5"], ["--federico.epsilon", "local"]),
        (["--fedavg_plus.tune_epochs=-1", "--algorithm=fedavg_plus"], ["--fedavg_plus.tune_epochs=-1"]),
        (["--learning_rate=0"], ["--learning_rate=0"]),
        (["--participation=0"], ["--participation=0"]),
        (["--participation=1.5"], ["--participation=1.5"]),
        (["--rounds=0"], ["rounds"]),
        (["--model=transformer"], ["--model=transformer", "mlp"]),
        (["--hidden=4,x"], ["--hidden=4,x"]),
        (["--model=cnn", "--channels=4,4,4,4"], ["--model=cnn", "16 x 16"]),
        (["--partition=alphabetical"], ["--partition=alphabetical", "label_groups"]),
        (["--dataset=mnist"], ["--dataset=mnist", "tfds:"]),
        (["--dataset=npz"], ["--data_file"]),
        (["--dataset=npz", "--data_file=nowhere.npz"], ["--data_file=nowhere.npz"]),
        (["--unseen_clients=1"], ["--unseen_clients=1"]),
        (["--resume"], ["--resume", "--out"]),
        (["--round=3"], ["round"]),
        (["rounds=3"], ["rounds=3"]),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) and value[0].startswith("-") else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(call, tmp_path, flags, words):
    code, error = call(*flags)
    line = one_line(error)
    assert code == 2
    for word in words:
        assert word in line
    assert not list(tmp_path.iterdir())  # nothing has been begun


def test_mistakes_in_a_file_are_named(call, npz, tmp_path):
    x, y = np.zeros((40, 3), np.float32), np.arange(40) % 2
    bad = x.copy()
    bad[7, 1] = np.nan
    cases = [
        (npz("no_y", x=x), ["lacks y"]),
        (npz("no_x", y=y), ["lacks x"]),
        (npz("nan", x=bad, y=y), ["NaN", "row 7"]),
        (npz("labels", x=x, y=y - 1), ["y is -1"]),
        (npz("short", x=x, y=y[:-1]), ["does not fit"]),
        (npz("words", x=x, y=np.array(["a"] * 40)), ["y is"]),
    ]
    for path, words in cases:
        code, error = call("--dataset=npz", f"--data_file={path}", *SMALL)
        line = one_line(error)
        assert code == 2 and f"--data_file={path}" in line
        for word in words:
            assert word in line, line
    assert not list(tmp_path.iterdir())


def test_a_data_set_that_is_not_prepared_says_how_to(call, tmp_path):
    code, error = call("--dataset=tfds:mnist", f"--data_dir={tmp_path}")
    line = one_line(error)
    assert code == 2 and "--dataset=tfds:mnist" in line and "download_and_prepare" in line


def test_a_run_leaves_its_results_and_is_not_overwritten(call, tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert call(*SMALL, f"--out={out}")[0] == 0
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "results.npz", "metrics.jsonl", "summary.json", "collaboration.npz", "checkpoints"} <= names
    assert "report.html" in names and list((out / "figures").glob("*.png"))
    flags = files.read_json(out / "config.json")["flags"]
    assert flags["federico.neighbors"] == 1 and flags["train_examples"] == 15 and flags["algorithm"] == "federico"
    before = files.read_json(out / "summary.json")
    assert before["last"]["round"] == 4

    code, error = call(*SMALL, f"--out={out}")
    assert code == 2 and f"--out={out}" in one_line(error) and "--resume" in error
    code, error = call(*SMALL, f"--out={out}", "--resume", "--learning_rate=0.5")
    assert code == 2 and "--learning_rate" in one_line(error)
    assert files.read_json(out / "summary.json") == before

    monkeypatch.setenv("PATH", "")  # without git a run goes on as well
    assert call(*SMALL, f"--out={out}", "--resume", "--rounds=6")[0] == 0
    assert files.read_json(out / "config.json")["git_commit"] is None
    rows = files.read_jsonl(out / "metrics.jsonl")
    assert [row["round"] for row in rows] == [2, 4, 6]
    assert files.read_json(out / "summary.json")["last"]["round"] == 6


def test_rates_fall_at_half_and_at_three_quarters_of_the_rounds(monkeypatch):
    def falling(rounds):
        monkeypatch.setattr(common, "FLAGS", SimpleNamespace(rounds=rounds))
        return common.SCHEDULES["multistep"]()

    rates = lambda rounds: [float(falling(rounds)(number)) for number in range(rounds)]
    np.testing.assert_allclose(rates(8), [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01], rtol=1e-5)
    assert rates(1) == [1]


def test_rates_may_fall_every_round(monkeypatch):
    monkeypatch.setattr(common, "FLAGS", SimpleNamespace(lr_decay=0.9))
    rates = [float(common.SCHEDULES["exponential"]()(number)) for number in range(3)]
    np.testing.assert_allclose(rates, [1, 0.9, 0.81], rtol=1e-6)


def test_more_rounds_are_another_run_where_rates_fall_by_them(call, tmp_path):
    flags = [*SMALL, f"--out={tmp_path / 'run'}", "--lr_schedule=multistep"]
    assert call(*flags)[0] == 0
    code, error = call(*flags, "--resume", "--rounds=6")
    assert code == 2 and "--rounds was 4 and is 6" in one_line(error)


def test_a_diverging_run_stops_with_the_round_and_the_client(call, tmp_path):
    out = tmp_path / "run"
    learning = ["--algorithm=local", "--optimizer=sgd", "--learning_rate=30", "--rounds=200", "--eval_every=1"]
    code, error = call("--dataset=sine", "--num_clients=3", *learning, f"--out={out}")
    line = one_line(error)
    assert code == 1 and "round " in line and "client " in line and str(out) in line
    rows = files.read_jsonl(out / "metrics.jsonl")
    stopped = int(line.split("round ")[1].split(":")[0])
    assert [row["round"] for row in rows] == list(range(1, stopped)) and rows


def test_the_command_itself_ends_with_one_line(tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--federico.epsilon=2"],
        cwd=Path(__file__).parents[2],
        env={"PATH": "", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2 and process.stdout == ""
    assert "--federico.epsilon=2" in one_line(process.stderr)
