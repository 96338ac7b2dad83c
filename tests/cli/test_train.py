"""The entry point train: mistakes are one line, and a run leaves what it should."""

import json
import sys
import warnings

import numpy as np
import outcomes
import pytest
from commands import call, one_line

from pfljax.cli import train
from pfljax.cli.flags import Optimizer
from pfljax.cli.settings import parse
from pfljax.folder import files
from pfljax.training import describe

SMALL = [
    "--num_clients=4",
    "--rounds=4",
    "--eval_every=2",
    "--hidden=4",
    "--federico_friends.neighbors=1",
    "--plan=map",
]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Commands run in a folder of their own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def npz(tmp_path_factory):
    """Writes npz files: (name, arrays) -> path."""
    folder = tmp_path_factory.mktemp("npz")

    def write(name, **arrays):
        np.savez(folder / f"{name}.npz", **arrays)
        return str(folder / f"{name}.npz")

    return write


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method=federiko"], ["--method=federiko", "federico"]),
        (["--method=zzz"], ["--method=zzz", "local", "fedavg"]),
        (["--num_clients=1700", "--federico_friends.neighbors=1"], ["--num_clients=1700"]),
        (
            ["--num_clients=4", "--federico_friends.neighbors=4"],
            ["--federico_friends.neighbors=4", "0 to 3"],
        ),
        (["--participation=0.25", "--num_clients=8"], ["--federico_friends.neighbors=3", "0 to 1"]),
        (["--method=local", "--federico.epsilon=0.5"], ["--federico.epsilon", "local"]),
        (
            ["--dataset=sine", "--method=local", "--augment=crop_flip"],
            ["--augment=crop_flip", "images"],
        ),
        (["--dataset=mnist"], ["--dataset=mnist", "tfds:"]),
        (["--model=encoder"], ["--model=encoder", "accepted for texts", "--data_text"]),
        (["--width=8"], ["--width", "the model is mlp"]),
        (["--unseen=1"], ["--unseen=1"]),
        (["--resume"], ["--resume", "--out"]),
        (
            ["--momhead.momentum=.5"],
            ["--momhead.momentum: ", "no method momhead is known", "--method=FILE.py:NAME"],
        ),
        (
            ["--dito.strength=1"],
            ["--dito.strength: ", "no method dito is known; did you mean ditto?"],
        ),
        (["--fedavg.strength=1"], ["--fedavg.strength: ", "accepted: no hyperparameter of fedavg"]),
        (["--ditto.x=1"], ["--ditto.x: ", "did you mean --ditto.mu?"]),
    ],
    ids=lambda value: (
        "_".join(value) if isinstance(value, list) and value[0].startswith("-") else ""
    ),
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, flags, words):
    line = one_line(call(train.COMMAND, *flags, code=2))
    for word in words:
        assert word in line
    assert not list(tmp_path.iterdir())  # nothing has been begun


def test_mistakes_in_a_file_are_named(npz, tmp_path):
    x = np.zeros((40, 3), np.float32)
    cases = [(npz("words", x=x, y=np.array([b"a"] * 40)), ["y is", "y.astype(str)"])]
    for path, words in cases:
        line = one_line(call(train.COMMAND, "--dataset=npz", f"--data_file={path}", *SMALL, code=2))
        assert f"--data_file={path}" in line
        for word in words:
            assert word in line, line
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_told_before_anything_is_done(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    line = one_line(call(train.COMMAND, "--tracker=tensorboard", *SMALL, code=2))
    assert line == "--tracker=tensorboard: needs tensorboardX: pip install 'pfljax[tensorboard]'"


@pytest.mark.parametrize(
    ("flags", "own", "said"),
    [
        ([], True, "the data set's own"),
        (
            ["--test_fraction=0.5"],
            False,
            "drawn from each client's examples; the data set's own are not used",
        ),
    ],
)
def test_a_file_says_which_examples_are_for_testing(npz, flags, own, said):
    """Classes have names here; of each client's ten examples three are for testing, or half."""
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    y = np.array(["dog", "cat"])[np.arange(40) % 2]
    is_test = np.arange(40) % 10 >= 7
    path = npz("tests", x=x, y=y, client=np.arange(40) // 10, is_test=is_test)
    words = [
        "--dataset=npz",
        f"--data_file={path}",
        "--method=local",
        "--rounds=1",
        "--hidden=4",
        *flags,
    ]
    run, _ = outcomes.trained(words)
    assert describe.surroundings(run.experiment) == [("test examples", said)]
    assert run.clients.test.size.tolist() == [3 if own else 5] * 4
    config = run.experiment.config
    assert config["flags"]["official_test"] is own and config["data"]["class_names"] == [
        "cat",
        "dog",
    ]


def test_a_likely_mistake_is_one_line_on_the_command_line(npz):
    path = npz("single", x=np.ones((9, 3)), y=np.arange(9) % 2, client=np.arange(9) // 2)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        said = call(
            train.COMMAND, "--dataset=npz", f"--data_file={path}", "--num_clients=5", code=2
        ).splitlines()
    assert said[0].startswith(
        "warning: client: 1 of 5 clients have a single example and are left out; a client needs"
    )
    assert said[1:] == [
        "error: --num_clients=5: single has 4 clients with at least two examples; accepted: 1 to 4"
    ]


def test_a_data_set_that_is_not_prepared_says_how_to(tmp_path):
    # TFDS encodes images with TensorFlow
    for name, extra in (("mnist", "prepare"), ("iris", "tfds")):
        line = one_line(
            call(train.COMMAND, f"--dataset=tfds:{name}", f"--data_dir={tmp_path}", code=2)
        )
        assert (
            f"tfds:{name}" in line and f"pfljax[{extra}]" in line and "download_and_prepare" in line
        )


@pytest.mark.slow
@pytest.mark.pages
def test_a_run_leaves_its_results_and_is_not_overwritten(tmp_path, monkeypatch):
    out = tmp_path / "run"
    printed = call(train.COMMAND, *SMALL, f"--out={out}", "--tracker=tensorboard")
    assert (
        printed.splitlines()[0] == "federico_friends on digits, label_groups: 4 clients, 4 rounds"
    )
    assert printed.splitlines()[1].split() == ["defaults", "digits.flags"]
    names = {path.name for path in out.iterdir()}
    assert {
        "config.json",
        "results.npz",
        "metrics.jsonl",
        "summary.json",
        "collaboration.npz",
        "checkpoints",
    } <= names
    assert "report.html" in names and list((out / "figures").glob("*.png"))
    assert len(list((out / "tensorboard").glob("events.out.tfevents.*"))) == 1
    flags = files.read_json(out / "config.json")["flags"]
    assert (
        flags["federico_friends.neighbors"] == 1
        and flags["train_examples"] == 15
        and flags["method"] == "federico_friends"
    )
    before = files.read_json(out / "summary.json")
    assert before["last"]["round"] == 4

    line = one_line(call(train.COMMAND, *SMALL, f"--out={out}", code=2))
    assert f"--out={out}" in line and "resume" in line
    line = one_line(
        call(train.COMMAND, *SMALL, f"--out={out}", "--resume", "--learning_rate=0.5", code=2)
    )
    assert line.startswith("--resume: ") and "--learning_rate was 0.3 and is 0.5" in line
    assert files.read_json(out / "summary.json") == before

    monkeypatch.setenv("PATH", "")  # without git a run goes on as well
    call(
        train.COMMAND,
        *SMALL,
        f"--out={out}",
        "--resume",
        "--rounds=6",
        "--fedem.components=2",
        code=2,
    )
    call(train.COMMAND, *SMALL, f"--out={out}", "--resume", "--rounds=6")
    assert files.read_json(out / "config.json")["git_commit"] is None
    rows = files.read_jsonl(out / "metrics.jsonl")
    assert [row["round"] for row in rows] == [0, 2, 4, 6]
    assert files.read_json(out / "summary.json")["last"]["round"] == 6


@pytest.mark.slow
def test_planned_rounds_bound_a_run_and_are_no_setting_of_methods_that_do_not_read_them(tmp_path):
    line = one_line(
        call(train.COMMAND, *SMALL, f"--out={tmp_path / 'run'}", "--planned_rounds=3", code=2)
    )
    assert line == "--planned_rounds=3: accepted: 4, the number of rounds that are trained, or more"
    call(train.COMMAND, *SMALL, f"--out={tmp_path / 'run'}", "--planned_rounds=9")
    call(train.COMMAND, *SMALL, f"--out={tmp_path / 'run'}", "--resume", "--rounds=6")
    assert files.read_json(tmp_path / "run" / "summary.json")["last"]["round"] == 6
    floco = [*SMALL[:-2], "--method=floco", "--plan=map", f"--out={tmp_path / 'floco'}"]
    call(train.COMMAND, *floco, "--planned_rounds=6")
    line = one_line(
        call(train.COMMAND, *floco, "--resume", "--rounds=6", "--planned_rounds=7", code=2)
    )
    assert (
        line.startswith("--planned_rounds: ")
        and "was planned for 6 rounds, on which floco depends; now 7" in line
    )
    call(train.COMMAND, *floco, "--resume", "--rounds=6")


def schedule(*words):
    settings = parse(train.define, words)
    return settings.make(Optimizer).schedule(settings.rounds)


def test_rates_fall_at_half_and_at_three_quarters_of_the_rounds():
    def rates(rounds):
        return [
            float(schedule("--lr_schedule=multistep", f"--rounds={rounds}")(number))
            for number in range(rounds)
        ]

    np.testing.assert_allclose(rates(8), [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01], rtol=1e-5)
    assert rates(1) == [1]


def test_rates_may_fall_every_round():
    falling = schedule("--lr_schedule=exponential", "--lr_decay=0.9")
    np.testing.assert_allclose(
        [float(falling(number)) for number in range(3)], [1, 0.9, 0.81], rtol=1e-6
    )
    assert schedule() is None


@pytest.mark.long
def test_more_rounds_are_another_run_where_rates_fall_by_them(tmp_path):
    flags = [*SMALL, f"--out={tmp_path / 'run'}", "--lr_schedule=multistep"]
    call(train.COMMAND, *flags)
    assert "--rounds was 4 and is 6" in one_line(
        call(train.COMMAND, *flags, "--resume", "--rounds=6", code=2)
    )


def test_clients_that_diverge_are_dropped_unless_told_otherwise():
    for words, expected in (([], "drop"), (["--faults_on_divergence=stop"], "stop")):
        run, _ = outcomes.trained([*SMALL, *words])
        assert run.experiment.faults.on_divergence == expected


@pytest.mark.long
def test_a_diverging_run_stops_with_the_round_and_the_client(tmp_path):
    out = tmp_path / "run"
    learning = [
        "--method=local",
        "--optimizer=sgd",
        "--learning_rate=30",
        "--rounds=200",
        "--eval_every=1",
    ]
    line = one_line(
        call(train.COMMAND, "--dataset=sine", "--num_clients=3", *learning, f"--out={out}", code=1)
    )
    assert "round " in line and "client " in line and str(out) in line
    rows = files.read_jsonl(out / "metrics.jsonl")
    stopped = int(line.split("round ")[1].split(":")[0])
    assert [row["round"] for row in rows] == list(range(stopped)) and rows


MODEL = """
import flax.linen as nn

class Small(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.relu(nn.Dense(3)(x.reshape(len(x), -1))))
"""


@pytest.mark.slow
def test_a_model_of_one_s_own_comes_from_its_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    small = [flag for flag in SMALL if not flag.startswith("--hidden")]
    call(train.COMMAND, *small, f"--model={path}:Small", f"--out={tmp_path / 'run'}")
    summary = files.read_json(tmp_path / "run" / "summary.json")
    assert summary["parameters"] == 64 * 3 + 3 + 3 * 10 + 10
    line = one_line(call(train.COMMAND, *small, f"--model={path}:Big", code=2))
    assert line.startswith(f"--model={path}:Big: ") and "has no Big" in line


RANDOM = """
from flax import nnx

class Net(nnx.Module):
    def __init__(self, num_classes=10, *, rngs):
        self.head = nnx.Linear(64, num_classes, rngs=rngs)

    def __call__(self, x):
        return self.head(x.reshape(x.shape[0], -1))

class Required(Net):
    def __init__(self, num_classes, *, rngs):
        super().__init__(num_classes, rngs=rngs)

class Streams(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)

def function(rngs):
    return Net(rngs=rngs)

def fails(num_classes):
    return num_classes / 0

def three(a, b, c):
    return a
"""


def test_networks_of_random_streams_come_from_a_file_as_in_python(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(RANDOM)

    def flags(name):
        return ["--method=fedavg", f"--model={path}:{name}", f"--out={tmp_path / 'run'}"]

    for name in ("Net", "Required", "Streams", "function"):
        assert outcomes.outcome(train.COMMAND, flags(name)) == (None, ""), name  # would train
    for name, why in (
        ("fails", "raised ZeroDivisionError: division by zero"),
        ("three", "raised TypeError: three()"),
    ):
        line = outcomes.refused(train.COMMAND, flags(name))
        assert (
            line.startswith(f"--model={path}:{name}: {why}")
            and "or a function of num_classes, rngs or both" in line
        )


def test_the_scores_of_unseen_clients_are_printed(capsys):
    scores = {
        "accuracy": 0.5,
        "accuracy_bottom_decile": 0.25,
        "accuracy_min": 0.125,
        "loss": 1.5,
        "f1": 0.75,
    }
    summary = {
        "task": "classification",
        "metrics": ["f1"],
        "method": "local",
        "dataset": "digits",
        "scored": "own",
    }
    summary |= {
        "last": scores | {"round": 9},
        "best": scores | {"round": 3, "selected_by": "train_loss"},
    }
    unseen = {
        "accuracy": 0.375,
        "accuracy_bottom_decile": 0.25,
        "accuracy_min": 0.125,
        "loss": 2.5,
        "f1": 0.0625,
    }
    for privacy in (None, {"epsilon": 2.0, "delta": 1e-5}):
        train.show(summary | {"privacy": privacy, "unseen": None})
        assert "unseen" not in capsys.readouterr().out
        train.show(summary | {"privacy": privacy, "unseen": unseen})
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "unseen" in line]
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        expected = ["last, on unseen clients", "9", "37.5 %", "25.0 %", "12.5 %", "2.5000", "0.062"]
        assert cells == expected + [""] * (privacy is not None)


NETWORKS = """
import flax.linen as nn

class Deep(nn.Module):
    outputs: int | None = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(nn.relu(nn.Dense(4)(nn.relu(nn.Dense(3)(x.reshape(len(x), -1))))))

both = {"deep": Deep(), "deeper": nn.Sequential([Deep(8), nn.Dense(4), nn.Dense(10)])}
"""


@pytest.mark.long
def test_several_networks_come_as_a_list_or_from_a_file(tmp_path):
    small = ["--num_clients=4", "--rounds=2", "--eval_every=2", "--plan=map"]
    call(train.COMMAND, *small, "--method=local", "--model=linear,mlp", f"--out={tmp_path}/list")
    plan = dict(files.read_json(tmp_path / "list" / "summary.json")["plan"])
    assert plan["networks"].startswith("linear: ") and "mlp: " in plan["networks"]
    path = tmp_path / "mine.py"
    path.write_text(NETWORKS)
    call(
        train.COMMAND, *small, "--method=fedproto", f"--model={path}:both", f"--out={tmp_path}/file"
    )
    assert "deep: " in dict(files.read_json(tmp_path / "file" / "summary.json")["plan"])["networks"]
    line = one_line(call(train.COMMAND, *small, "--method=fedavg", "--model=linear,mlp", code=2))
    assert line.startswith("--model: differs between clients, and what this method sends")
    line = one_line(call(train.COMMAND, *small, "--method=local", "--model=mlp,mlp", code=2))
    assert (
        line == "--model=mlp,mlp: accepted: a list of different networks, or the name of one family"
    )


def test_the_command_itself_ends_with_one_line(process):
    line = one_line(process("train", "--federico_friends.epsilon=2", code=2))
    assert "--federico_friends.epsilon=2" in line


def test_the_kind_of_a_file_is_found_on_the_command_line(tmp_path):
    """A table whose column marks the last of each client's five examples; its flags are not those of other kinds."""
    pytest.importorskip("pyarrow")
    rows = [f"{i},{i % 2},{'abc'[i // 5]},{'test' if i % 5 == 4 else 'train'}" for i in range(15)]
    (tmp_path / "own.csv").write_text("\n".join(["size,label,who,part", *rows]))
    words = [
        "--dataset=file",
        "--data_file=own.csv",
        "--data_client=who",
        "--data_test=part",
        "--hidden=4",
    ]
    run, printed = outcomes.trained([*words, "--method=local", "--rounds=1"])
    assert printed.splitlines()[0] == "local on own, natural: 3 clients, 1 rounds"
    flags = run.experiment.config["flags"]
    assert flags["dataset"] == "csv" and flags["official_test"] is True
    assert run.clients.test.size.tolist() == [1] * 3
    assert one_line(call(train.COMMAND, *words, "--data_stride=2", code=2)).startswith(
        "--data_stride: does not apply"
    )
    line = one_line(call(train.COMMAND, *words, "--data_label=lab", code=2))
    assert line == "--data_label=lab: own.csv has no such column; did you mean label?"


@pytest.mark.slow
def test_labels_of_texts_are_predicted_by_a_network_that_reads_tokens(tmp_path):
    texts = ["good day", "bad day", "good sea", "bad sun", "a good one", "a bad one"] * 8
    lines = [f"{'äx'[k % 2]},{text},{'good' in text}" for k, text in enumerate(texts)]
    (tmp_path / "texts.csv").write_text("\n".join(["author,text,is_good", *lines]))
    columns = ["--data_client=author", "--data_text=text", "--data_label=is_good"]
    data = ["--dataset=csv", "--data_file=texts.csv", *columns]
    sizes = ["--width=16", "--depth=1", "--heads=2", "--rounds=20"]
    call(train.COMMAND, *data, *sizes, "--method=fedavg", "--out=run")
    summary = files.read_json(tmp_path / "run" / "summary.json")
    assert summary["last"]["accuracy"] == 1
    line = one_line(call(train.COMMAND, *data, "--hidden=4", code=2))
    assert "--hidden" in line and "the model is encoder" in line


def test_shapes_of_files_are_lists_on_the_command_line(tmp_path):
    """Two users with four lists of six numbers each."""
    (tmp_path / "leaf" / "train").mkdir(parents=True)
    users = {user: {"x": [[i + 0.5] * 6 for i in range(4)], "y": [0, 1, 0, 1]} for user in "ab"}
    content = {"users": [*users], "num_samples": [4, 4], "user_data": users}
    (tmp_path / "leaf" / "train" / "all.json").write_text(json.dumps(content))
    words = ["--dataset=file", "--data_file=leaf", "--method=local", "--rounds=1", "--hidden=4"]
    run, printed = outcomes.trained([*words, "--data_shape=2,3"])
    assert printed.splitlines()[0] == "local on leaf, natural: 2 clients, 1 rounds"
    assert run.clients.inputs.shape[:2] == (2, 3)
    line = one_line(call(train.COMMAND, *words, "--data_shape=2,2", code=2))
    assert line == "--data_shape=2,2: examples have 6 numbers; accepted: a shape of as many"


def test_a_drift_is_that_of_the_flags():
    words = ["--drift=leave@3,labels@1", "--drift_share=0.5"]
    run, _ = outcomes.trained([*SMALL, *words])
    changes = [(one.round, one.change, one.share) for one in run.experiment.drift]
    assert changes == [(1, "labels", 0.5), (3, "leave", 0.5)]
    assert [len(clients) for clients in run.experiment.phases.changed] == [2, 2]
    plain, _ = outcomes.trained(SMALL)
    assert plain.experiment.phases is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--drift=labels@4"], ["--drift=labels@4", "rounds before the last one, 4"]),
        (["--drift=label@2"], ["--drift=label@2", "CHANGE@ROUND, such as labels@40"]),
        (["--drift_share=0.5"], ["--drift_share", "accepted with --drift"]),
    ],
)
def test_a_drift_that_cannot_be_is_refused(flags, words):
    line = one_line(call(train.COMMAND, *SMALL, *flags, code=2))
    assert all(word in line for word in words), line
