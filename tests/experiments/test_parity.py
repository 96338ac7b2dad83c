"""The comparison with other libraries' code, with made-up peers in NumPy: FedAvg as a loop, right and wrong."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import pfljax as pfl
from experiments.parity import __main__ as command
from experiments.parity import shared
from experiments.parity.shared import Apart, Cell, Snapshot
from pfljax.contract import tree
from pfljax.contract.errors import RunError

SIZES = (10, 20)


def gradient(w, x, y):
    """The mean cross entropy's gradient for a network with one hidden layer of ReLUs."""
    (a, b), (c, d) = w
    hidden = np.maximum(x @ a + b, 0)
    scores = hidden @ c + d
    slope = np.exp(scores - scores.max(axis=1, keepdims=True))
    slope = (slope / slope.sum(axis=1, keepdims=True) - np.eye(10)[y]) / len(y)
    back = (slope @ c.T) * (hidden > 0)
    return (x.T @ back, back.sum(axis=0)), (hidden.T @ slope, slope.sum(axis=0))


def local(w, x, y, rate):
    """Epochs of SGD on a client's examples, in order."""
    for first in [*range(0, len(y), shared.BATCH)] * shared.EPOCHS:
        slopes = gradient(w, x[first : first + shared.BATCH], y[first : first + shared.BATCH])
        w = tuple(
            (a - rate * da, b - rate * db) for (a, b), (da, db) in zip(w, slopes, strict=True)
        )
    return w


def average(models, weights):
    """The weighted mean of models."""

    def mean(layer, leaf):
        return np.average([model[layer][leaf] for model in models], axis=0, weights=weights)

    return tuple((mean(layer, 0), mean(layer, 1)) for layer in (0, 1))


def fedavg(rate=shared.RATE, weigh=len, start=0.0):
    """Plays FedAvg as a loop, with a learning rate, weights of clients, and a shift of the start."""

    def play(task, on_round):
        layers = [task.start[f"Dense_{number}"] for number in (0, 1)]
        w = tuple(
            (np.float64(layer["kernel"]) + start, np.float64(layer["bias"])) for layer in layers
        )
        data = [task.arrays(client) for client in range(len(SIZES))]

        def snapshot():
            named = {
                f"Dense_{n}": {"kernel": np.float32(a), "bias": np.float32(b)}
                for n, (a, b) in enumerate(w)
            }
            (a, b), (c, d) = w
            right = [
                (np.maximum(x @ a + b, 0) @ c + d).argmax(axis=1) == y
                for x, y in (p["test"] for p in data)
            ]
            return Snapshot({"global": named}, float(np.concatenate(right).mean()))

        while True:
            on_round(snapshot)
            trained = [local(w, *part["train"], rate) for part in data]
            w = average(trained, [weigh(part["train"][1]) for part in data])

    return play


def cell(play, **options):
    return Cell(
        pfl.FedAvg(),
        lambda state: {"global": tree.first(state.models)},
        play,
        sizes=SIZES,
        **options,
    )


@pytest.mark.slow
def test_equal_methods_agree_up_to_rounding():
    found = shared.measure(cell(fedavg()), [1, 3])
    assert [row["rounds"] for row in found["rows"]] == [1, 3]
    assert all(row["difference"] < 1e-6 < 1e-3 < row["moved"] for row in found["rows"])
    assert all(row["accuracy"] == row["accuracy_of_peer"] for row in found["rows"])
    assert found["seconds"] > 0 and found["seconds_of_peer"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"rate": 0.11}, {"weigh": lambda y: 1}])
def test_a_wrong_peer_is_far_away(wrong):
    assert shared.measure(cell(fedavg(**wrong)), [1])["rows"][0]["difference"] > 1e-4


@pytest.mark.parametrize(
    ("play", "said"),
    [
        (fedavg(start=1e-3), "initial parameters differ by 0.001"),
        pytest.param(
            lambda task, on_round: on_round(lambda: Snapshot({}, 0.0)),
            "different parameters",
            marks=pytest.mark.slow,
        ),
        (
            lambda task, on_round: on_round(lambda: Snapshot({"global": {"x": np.ones(2)}}, 0.0)),
            "different parameters",
        ),
        (lambda task, on_round: None, "the peer played -1 rounds"),
    ],
)
def test_what_cannot_be_compared_is_refused(play, said):
    with pytest.raises(RunError, match=said):
        shared.measure(cell(play), [1])


def test_clients_have_their_sizes_and_five_classes_as_often():
    federation = shared.digits((20, 40))
    assert np.asarray(federation.train.size).tolist() == [20, 40]
    counts = [
        np.bincount(np.asarray(federation.train.y[k, : 20 * (k + 1)]), minlength=10)
        for k in range(2)
    ]
    assert counts[0].tolist() == [4] * 5 + [0] * 5 and counts[1].tolist() == [0] + [8] * 5 + [0] * 4


def call(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["parity", *map(str, flags)])
    command.main()


def test_results_are_kept(monkeypatch, tmp_path, capsys):
    known = {"FedAvg": cell(fedavg(), note="a hyperparameter"), "Other": Apart("it has no server")}
    monkeypatch.setattr(command, "cells_of", lambda peer, folder: known)
    sign = tmp_path / command.PEERS["pfllib"][2]
    sign.parent.mkdir(parents=True)
    sign.touch()
    flags = ["--peer=pfllib", f"--peer_folder={tmp_path}", f"--out={tmp_path / 'out'}"]
    call(monkeypatch, *flags, "--rounds=1")
    first = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert first["cells"]["Other"] == {"note": "", "differs": "it has no server"}
    assert first["cells"]["FedAvg"]["rows"][0]["difference"] < 1e-6
    assert "| FedAvg |" in (tmp_path / "out" / "parity.md").read_text()
    known["FedAvg"] = cell(lambda task, on_round: pytest.fail("measured twice"))
    call(monkeypatch, *flags, "--rounds=1")
    for wrong, said in (
        ("--rounds=2", "choose a new folder"),
        ("--methods=Else", "accepted: FedAvg; Other"),
    ):
        with pytest.raises(SystemExit):
            call(monkeypatch, *flags, "--rounds=1", wrong)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("peer", command.PEERS)
def test_a_folder_that_is_no_checkout_is_one_line(peer, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, f"--peer={peer}", f"--peer_folder={tmp_path}")
    said = capsys.readouterr().err.splitlines()[-1]
    _, repository, sign = command.PEERS[peer]
    assert (
        f"--peer_folder={tmp_path}: accepted: a checkout of {repository}, which has {sign}" in said
    )


SCRIPT = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Subset
from utils.options import args_parser
from utils.train_utils import get_data, get_model

args, net = args_parser(), get_model(None)
train, test, of_train, of_test = get_data(args)
for number in range(args.epochs):
    print("a round")
    trained = []
    for client in np.random.choice(range(args.num_users), args.num_users, replace=False):
        own = get_model(None)
        own.load_state_dict(net.state_dict())
        descent = torch.optim.SGD(own.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.wd)
        np.random.shuffle(of_train[client])
        for x, y in DataLoader(Subset(train, of_train[client]), batch_size=args.bs, shuffle=True):
            descent.zero_grad()
            torch.nn.functional.cross_entropy(own(x), y).backward()
            descent.step()
        trained.append(own.state_dict())
    net.load_state_dict({name: sum(each[name] for each in trained) / len(trained) for name in trained[0]})
"""


def of_script(folder, monkeypatch, **hyperparameters):
    """FedAvg by a made-up script of authors, with momentum 0.5 and weight decay 0.01, beside ours."""
    pytest.importorskip("torch")
    authors = importlib.import_module("experiments.parity.authors")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("utils.options", "utils.train_utils"):
        monkeypatch.setitem(sys.modules, name, None)  # and after the test as before
    (folder / "main.py").write_text(SCRIPT)
    options = {"lr": shared.RATE, "bs": shared.BATCH, "momentum": 0.5, "wd": 0.01}
    play = authors.playing(
        folder,
        authors.run_script,
        folder / "main.py",
        lambda script: {"global": authors.converted(script["net"].parameters())},
        lambda script: [script["net"]] * 2,
        authors.TwoLayers,
        **options,
    )
    local = {"epochs": 1, "optimizer": authors.heavy(**hyperparameters)}

    def mine(state):
        return {"global": tree.first(state.models)}

    return Cell(pfl.FedAvg(), mine, play, sizes=(20, 20), local=local)


@pytest.mark.slow
def test_a_script_of_authors_is_played_quietly_and_in_order(tmp_path, monkeypatch, capsys):
    here = Path.cwd()
    found = shared.measure(of_script(tmp_path, monkeypatch, momentum=0.5, decay=0.01), [1, 2])
    assert found["rows"][1]["difference"] < 1e-6 < 1e-3 < found["rows"][1]["moved"]
    assert found["rows"][1]["accuracy"] == found["rows"][1]["accuracy_of_peer"]
    assert Path.cwd() == here and not capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    "hyperparameters", [{"momentum": 0.4, "decay": 0.01}, {"momentum": 0.5, "decay": 0.1}]
)
def test_another_optimizer_than_the_script_has_is_far_away(hyperparameters, tmp_path, monkeypatch):
    assert (
        shared.measure(of_script(tmp_path, monkeypatch, **hyperparameters), [2])["rows"][0][
            "difference"
        ]
        > 1e-4
    )
