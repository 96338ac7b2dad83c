"""--json: standard output has one JSON object, with the numbers of the run's files, or nothing; exit codes."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pfljax as pfl
from pfljax import cli
from pfljax.cli import compare as compare_command
from pfljax.cli import json_output, train, workers
from pfljax.cli.settings import parse
from pfljax.folder import files

ROOT = Path(__file__).parents[2]
SMALL = ("--num_clients=3", "--rounds=4", "--eval_every=2", "--hidden=4")
DIVERGING = (
    "--dataset=sine",
    "--num_clients=3",
    "--optimizer=sgd",
    "--learning_rate=30",
    "--rounds=200",
    "--eval_every=1",
    "--faults_on_divergence=stop",
)


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def run(folder, *words):
    """`python -m pfljax` in a folder: its exit code and what it wrote."""
    command = [sys.executable, "-m", "pfljax", *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )


def no_constant(name):
    """Refuses NaN and infinity, which Python's parser accepts although they are not JSON."""
    raise ValueError(f"{name} is not JSON")


def read(done):
    """The only thing on the standard output of a command that succeeded."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout, parse_constant=no_constant)


def read_strictly(path):
    return json.loads(path.read_text(), parse_constant=no_constant)


@pytest.mark.slow
def test_train_prints_the_numbers_of_its_folder(tmp_path):
    """Those of summary.json, results.npz, metrics.jsonl and the Python API; what it says goes to standard error."""
    done = run(tmp_path, "train", *SMALL, "--method=ditto", "--metrics=f1", "--out=run", "--json")
    content = read(done)
    assert "ditto on digits, label_groups: 3 clients, 4 rounds" in done.stderr
    assert "report: run/report.html" in done.stderr

    summary = read_strictly(tmp_path / "run" / "summary.json")
    sizes = [client["n_test"] for client in summary["per_client"]]
    for name in ("per_client", "plan"):
        del summary[name]
    seconds = content["seconds"]  # the page is drawn after the file is written
    assert seconds.pop("page") > 0
    assert content == {"out": "run", "report": "run/report.html", **summary}
    assert content["never_trained"]["score"] is None  # NaN in Python: all clients were trained

    rows = files.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["round"] for row in rows] == [0, 2, 4]
    assert rows[-1] == content["last"]
    results = files.read_npz(tmp_path / "run" / "results.npz")
    for score in ("accuracy", "loss"):
        mean = np.average(results[f"{score}_test"][-1], weights=sizes)
        assert content["last"][score] == pytest.approx(mean, rel=1e-5)
    assert content["last"]["accuracy_min"] == pytest.approx(results["accuracy_test"][-1].min())

    result = pfl.load(tmp_path / "run")
    assert (content["last"]["accuracy"], content["last"]["loss"]) == (result.accuracy, result.loss)
    assert content["num_clients"] == len(result.per_client_accuracy) == 3


@pytest.mark.slow
def test_compare_prints_the_rows_of_its_table(tmp_path):
    words = ("--methods=local,fedavg", "--seeds=0,1", "--reference=local", "--out=table")
    content = read(run(tmp_path, "compare", *SMALL, *words, "--json"))
    rows = read_strictly(tmp_path / "table" / "table.json")
    assert [row["method"] for row in content["rows"]] == ["local", "fedavg"]
    for row, in_file in zip(content["rows"], rows, strict=True):
        left_out = in_file.keys() - row.keys()
        assert left_out <= {*compare_command.LARGE} and row.keys() <= in_file.keys()
        assert row == {name: in_file[name] for name in row}
        lasts = [
            read_strictly(tmp_path / "table" / row["method"] / f"seed-{seed}" / "summary.json")
            for seed in (0, 1)
        ]
        accuracies = [summary["last"]["accuracy"] for summary in lasts]
        assert row["score_mean"] == pytest.approx(np.mean(accuracies))
        assert row["score_std"] == pytest.approx(np.std(accuracies, ddof=1))
    paths = {name: str(Path("table") / name) for name in ("table.json", "report.html")}
    assert (content["out"], content["table"]) == ("table", paths["table.json"])
    assert content["report"] == paths["report.html"] and (tmp_path / content["report"]).exists()
    assert content["finished"] and content["score"] == "accuracy" and content["higher_is_better"]

    # A process that leaves runs to others has no table.
    words = ("--methods=local,fedavg", "--seeds=2,3", "--out=shared", "--cells=1/2")
    assert read(run(tmp_path, "compare", *SMALL, *words, "--json")) == {
        "out": "shared",
        "finished": False,
    }


NOISY = """
import os
import subprocess

import pfljax as pfl

print("printed while the file is loaded")


@pfl.author.method
class Noisy(pfl.methods.FedAvg):
    "Noisy: a method that prints."

    def build(self, problem):
        print("printed")
        os.write(1, b"written to the descriptor")
        subprocess.run(["echo", "written by another process"])
        return super().build(problem)
"""


@pytest.mark.slow
def test_what_a_method_prints_is_not_on_standard_output(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "json.flags").write_text("--json\n")
    for flag in ("--json", "-json", "--json=-", "--flagfile=json.flags"):
        done = run(tmp_path, "methods", "noisy.py:Noisy", flag)
        (entry,) = read(done)["methods"]
        assert entry["name"] == "noisy" and entry["topology"] == "shared"
        assert entry["file"] == str(tmp_path / "noisy.py") and entry["paper"] is None
        for text in ("while the file", "printed\n", "to the descriptor", "another process"):
            assert text in done.stderr


@pytest.mark.slow
def test_json_may_be_a_file(tmp_path):
    done = run(tmp_path, "methods", "ditto", "--json=new/methods.json")
    assert (done.returncode, done.stdout) == (0, "")
    (entry,) = read_strictly(tmp_path / "new" / "methods.json")["methods"]
    assert entry == pfl.methods.describe("ditto")
    done = run(tmp_path, "methods", "ditto", "--json=new/methods.json/no/folder.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --json=") and "cannot be written to" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("train", "--json", "--rounds=0"), 2, "error: --rounds=0: accepted: "),
        (("train", "--json", "--no_such_flag"), 2, "error: --no_such_flag: unknown flag"),
        (("train", "--json", "--method=nobody"), 2, "error: --method=nobody: unknown method"),
        (("trian", "--json"), 2, "error: trian: unknown command"),
        (("methods", "nobody", "--json"), 2, "error: --methods=nobody: unknown method"),
        (("scaling", "--json"), 2, "error: --json: unknown flag"),
        (("train", "--json", "--method=local", *DIVERGING), 1, "error: "),
        (("compare", "--json", "--methods=local", "--seeds=0", *DIVERGING), 1, "error: "),
    ],
)
def test_what_fails_has_its_exit_code_and_nothing_on_standard_output(tmp_path, words, code, said):
    done = run(tmp_path, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr and "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_has_nothing_on_standard_output(tmp_path, number):
    accept = (
        "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a background job ignores it
    )
    code = f"import signal; {accept}; from pfljax.cli import main; main()"
    words = [*SMALL, "--rounds=1000000", "--method=local", "--out=run", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", *words],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "metrics.jsonl").exists():  # rounds are trained
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (128 + number, "")
    assert number + 128 in cli.EXIT_CODES
    assert "--resume continues from the last checkpoint" in err


def test_exit_codes_are_in_every_help(capsys):
    docs = (ROOT / "docs" / "howto" / "programs.md").read_text()
    for words in (["--help"], ["train", "--help"], ["methods", "--json", "--help"]):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert not end.value.code
        out = capsys.readouterr().out
        for code, text in cli.EXIT_CODES.items():
            assert f"\n  {code:<4} {text}." in out
            assert f"| {code} | {text} |" in docs


def test_what_json_cannot_hold_is_null_or_plain():
    out = io.StringIO()
    content = {
        "nan": math.nan,
        "infinite": [math.inf, -np.inf, np.float32("nan")],
        "array": np.array([1.5, np.nan]),
        "count": np.int64(3),
        "inner": {"nan": np.nan, "text": "é"},
    }
    json_output.write(content, parse(train.define, ["--json"]), out)
    assert out.getvalue().count("\n") == 1
    assert json.loads(out.getvalue(), parse_constant=no_constant) == {
        "nan": None,
        "infinite": [None, None, None],
        "array": [1.5, None],
        "count": 3,
        "inner": {"nan": None, "text": "é"},
    }


@pytest.mark.parametrize("file", [".", "/", "/dev/null", "folder"])
def test_only_files_are_replaced(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(pfl.ArgumentError, match=f"^json={file}: is no file; accepted: a new or"):
        json_output.check(parse(train.define, [f"--json={file}"]))
    (tmp_path / "old.json").write_text("{}")
    for accepted in ("old.json", "new.json", "new/folder/new.json", "-", ""):
        json_output.check(parse(train.define, [f"--json={accepted}"]))
    assert not (tmp_path / "new").exists()


def test_workers_print_no_object(tmp_path):
    settings = parse(compare_command.define, ["--workers=2", "--json", f"--out={tmp_path}"])
    for command in workers.commands_of(settings):
        words = command[command.index("compare") + 1 :]
        assert not json_output.is_requested(words)
        assert parse(compare_command.define, words).json == ""
