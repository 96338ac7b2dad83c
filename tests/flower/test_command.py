"""The app that `pfljax flower` writes, and what it refuses."""

import importlib.util

import numpy as np
import pytest
from commands import call, one_line

import pfljax as pfl
from pfljax.cli import flower

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
    ):
        with pytest.raises(pfl.ArgumentError, match=named):
            read(config, run.clients)


def test_what_an_app_cannot_have_is_refused_in_a_line(tmp_path):
    out = tmp_path / "app"
    assert "--faults_dropout" in refused(out, "--faults_dropout=0.5") or not out.exists()
    assert "nothing is trained here" in refused(out, "--resume")
    assert "a node is one client" in refused(out, "--plan=vmap")
    assert refused().startswith("OUT: expected a new folder")
    out.mkdir()
    assert "exists" in refused(out)
    assert list(out.iterdir()) == []
