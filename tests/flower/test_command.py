"""The app that `pfljax flower` writes, and what it refuses."""

import importlib.util
import json

import jax
import numpy as np
import pandas as pd
import pytest
from commands import call, one_line

import pfljax as pfl
from pfljax.cli import flower
from pfljax.flower.node import as_in_run

pytest.importorskip("flwr")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "all.npz"
    rng = np.random.default_rng(2)
    client = np.repeat([0, 1], [8, 9])
    np.savez(path, x=rng.normal(size=(17, 3)), y=np.arange(17) % 2, client=client)
    return path


def refused(*words):
    return one_line(call(flower.COMMAND, *words, code=2))


def test_an_app_has_the_run_and_no_example(file, tmp_path):
    out = tmp_path / "app"
    flags = ["--dataset=npz", f"--data_file={file}", "--method=fedavg", "--rounds=2", "--hidden=4"]
    assert "fedavg for 2 clients" in call(flower.COMMAND, out, *flags)
    names = ["client_app.py", "pyproject.toml", "server_app.py", "task.py"]
    assert sorted(path.name for path in out.iterdir()) == names

    spec = importlib.util.spec_from_file_location("task_of_test", out / "task.py")
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    assert task.FLAGS["rounds"] == 2 and task.FLAGS["method"] == "fedavg"
    run = task.make_run()
    assert run.clients.num_clients == 2 and not np.any(run.clients.train.x)

    # A node reads its own file, or its client of a file with several.
    read = flower.reader(task.FLAGS)
    one = read({"partition-id": 1, "data": str(file), "client": 1}, run.clients)
    assert one.num_clients == 1 and int(one.train.size[0] + one.test.size[0]) == 9
    for config, named in (
        ({"partition-id": 0}, "the node has no data"),
        ({"partition-id": 0, "data": str(file)}, "has 2 clients"),
        ({"partition-id": 0, "data": "/nowhere.npz"}, "no such file"),
        ({"partition-id": 0, "data": str(file), "client": 5}, "client=5: accepted: 0 to 1"),
    ):
        with pytest.raises(pfl.ArgumentError, match=named):
            read(config, run.clients)


def load(folder, name="task"):
    """A module of an app, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_{folder.name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def table(tmp_path):
    """Two clinics; the columns of the first one's own files are changed in the tests."""
    frame = pd.DataFrame(
        {
            "heat": np.arange(12.0),
            "ward": ["A", "B", "C"] * 4,
            "rain": np.arange(12.0) % 5,
            "outcome": ["ill", "well"] * 6,
            "clinic": ["north"] * 6 + ["south"] * 6,
            "is_test": [False, False, False, False, True, True] * 2,
        }
    )
    frame.to_csv(tmp_path / "all.csv", index=False)
    return frame


TABLE = ["--dataset=csv", "--data_label=outcome", "--data_client=clinic", "--data_test=is_test"]
TABLE += ["--data_categorical=ward", "--hidden=4", "--rounds=2", "--method=fedavg"]


def test_a_table_of_a_node_has_the_columns_of_the_app(table, tmp_path):
    """Whatever their order, with or without the clients' column, also if a category is missing."""
    out = tmp_path / "app"
    call(flower.COMMAND, out, *TABLE, f"--data_file={tmp_path}/all.csv")
    task = load(out)
    run = task.make_run()
    names = ("heat", "ward=A", "ward=B", "ward=C", "rain")
    assert run.clients.feature_names == names
    read = flower.reader(task.FLAGS)
    north = table[table.clinic == "north"]
    path = tmp_path / "north.csv"

    def x_of(frame):
        frame.to_csv(path, index=False)
        one = as_in_run(read({"partition-id": 0, "data": str(path)}, run.clients), run.clients)
        assert one.feature_names == names and one.class_names == ("ill", "well")
        x = np.concatenate([np.asarray(split.x)[0] for split in (one.train, one.test)])
        return x[np.argsort(x[:, 0])].tolist()

    expected = [[0, 1, 0, 0, 0], [1, 0, 1, 0, 1], [2, 0, 0, 1, 2]]
    expected += [[3, 1, 0, 0, 3], [4, 0, 1, 0, 4], [5, 0, 0, 1, 0]]
    assert x_of(north) == expected
    assert x_of(north[["rain", "is_test", "heat", "outcome", "ward", "clinic"]]) == expected
    assert x_of(north.drop(columns="clinic").assign(more=1.5)) == expected
    assert x_of(north[north.ward != "B"]) == [expected[row] for row in (0, 2, 3, 5)]
    # C is in a test example only.
    assert x_of(north.drop(2)) == [expected[row] for row in (0, 1, 3, 4, 5)]

    for frame, line in (
        (north.drop(columns="rain"), "data.features=rain: north.csv has no such column"),
        (north.drop(columns="ward"), "data.categorical=ward: north.csv has no such column"),
        (north.assign(rain="much"), "data.features: rain in north.csv; accepted: columns of num"),
        (north.assign(outcome="dead"), "data: has classes that training does not know: dead"),
        (table.assign(clinic="north").iloc[:0], "data.file=.*north.csv: has no rows"),
    ):
        with pytest.raises(pfl.ArgumentError, match=f"^{line}"):
            x_of(frame)
    with pytest.warns(UserWarning, match="has categories that training does not know: ward=Z"):
        assert x_of(north.assign(ward="Z"))[0] == [0, 0, 0, 0, 0]


def test_a_node_reads_the_task_of_the_app(tmp_path):
    """Targets that happen to be whole numbers on a node are no classes."""
    frame = pd.DataFrame({"heat": np.arange(8.0), "price": np.arange(8) + 0.5, "who": [0, 1] * 4})
    frame.to_csv(tmp_path / "all.csv", index=False)
    out = tmp_path / "app"
    flags = ["--dataset=csv", "--data_label=price", "--data_client=who", "--method=fedavg"]
    call(flower.COMMAND, out, *flags, f"--data_file={tmp_path}/all.csv", "--rounds=1")
    task = load(out)
    run = task.make_run()
    frame[frame.who == 0].assign(price=[2, 1, 0, 1]).to_csv(tmp_path / "0.csv", index=False)
    config = {"partition-id": 0, "data": str(tmp_path / "0.csv")}
    one = as_in_run(flower.reader(task.FLAGS)(config, run.clients), run.clients)
    assert one.task == "regression" and one.train.y.dtype == np.float32


def test_examples_of_other_types_are_refused(file, tmp_path):
    out = tmp_path / "app"
    flags = ["--dataset=npz", f"--data_file={file}", "--method=fedavg", "--rounds=2", "--hidden=4"]
    call(flower.COMMAND, out, *flags)
    task = load(out)
    run = task.make_run()
    np.savez(tmp_path / "0.npz", x=np.arange(12).reshape(4, 3), y=[0, 1, 0, 1])
    config = {"partition-id": 0, "data": str(tmp_path / "0.npz")}
    one = flower.reader(task.FLAGS)(config, run.clients)  # whole numbers may be tokens
    with pytest.raises(pfl.ArgumentError, match=r"^data: has examples of int32, expected float32"):
        as_in_run(one, run.clients)


NETWORK = """
import flax.linen as nn
from widths_of_app import WIDTH


class Network(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.Dense(WIDTH)(x))


def right(outputs, y):
    return (outputs.argmax(axis=-1) == y).mean()
"""


def test_files_of_the_user_are_in_the_app(file, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "network.py").write_text(NETWORK)
    (own / "widths_of_app.py").write_text("WIDTH = 6\n")
    out = tmp_path / "app"
    flags = ["--dataset=npz", f"--data_file={file}", "--method=fedavg", "--rounds=2", "--json"]
    flags += [f"--model={own}/network.py:Network", f"--metrics=f1,{own}/network.py:right"]
    printed = json.loads(call(flower.COMMAND, out, *flags))
    files = ["client_app.py", "network.py", "pyproject.toml", "server_app.py", "task.py"]
    files.append("widths_of_app.py")
    assert printed["files"] == files == sorted(path.name for path in out.iterdir())
    assert printed["num_clients"] == 2 and printed["method"] == "fedavg"

    # The app needs nothing of the folder that it came from.
    for path in own.iterdir():
        path.unlink()
    run = load(out).make_run()
    shapes = jax.tree.map(lambda leaf: leaf.shape[1:], run.train(1, progress=False).state.models)
    assert shapes["Dense_0"]["kernel"] == (6, 2)
    assert set(run.experiment.metrics) == {"f1", "right"}


def test_a_file_of_the_user_cannot_replace_one_of_the_app(file, tmp_path):
    (tmp_path / "task.py").write_text(
        NETWORK.replace("from widths_of_app import WIDTH", "WIDTH = 2")
    )
    flags = ["--dataset=npz", f"--data_file={file}", "--method=fedavg", "--rounds=2"]
    out = tmp_path / "app"
    line = refused(out, *flags, f"--model={tmp_path}/task.py:Network")
    assert line == "--model=task.py: the app has another file of this name"
    assert not out.exists()


def test_texts_are_refused(tmp_path):
    frame = pd.DataFrame({"said": ["a b", "b c"] * 4, "label": [0, 1] * 4, "who": [0, 0, 1, 1] * 2})
    frame.to_csv(tmp_path / "all.csv", index=False)
    flags = ["--dataset=csv", f"--data_file={tmp_path}/all.csv", "--data_client=who"]
    line = refused(tmp_path / "app", *flags, "--data_text=said", "--method=fedavg")
    assert line.startswith("--data_text=said: accepted in an app: no texts")


def test_what_an_app_cannot_have_is_refused_in_a_line(tmp_path):
    out = tmp_path / "app"
    assert "--faults_dropout" in refused(out, "--faults_dropout=0.5") or not out.exists()
    assert "nothing is trained here" in refused(out, "--resume")
    assert "a node is one client" in refused(out, "--plan=vmap")
    assert refused().startswith("OUT: expected a new folder")
    out.mkdir()
    assert "exists" in refused(out)
    assert list(out.iterdir()) == []
