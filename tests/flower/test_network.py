"""A written app on a SuperLink and three SuperNodes, with files of their own, one of which is killed on the way."""

import json

import jax
import numpy as np
import optax
import pytest
from commands import call
from flower_network import Network, wait_until

import pfljax as pfl
from pfljax.cli import flower

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow
ROUNDS = 3
SIZES = (9, 12, 16)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The clients' examples: a file of all, and one of each client."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(5)
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    x = rng.normal(size=(len(client), 4)).astype(np.float32) * [1, 5, 0.2, 1] + [0, 3, 1, 0]
    y = (x[:, 0] + 0.1 * x[:, 1] > 0.4).astype(np.int32)
    is_test = np.arange(len(client)) % 3 == 0
    np.savez(folder / "all.npz", x=x, y=y, client=client, is_test=is_test)
    for number in range(len(SIZES)):
        own = client == number
        np.savez(folder / f"{number}.npz", x=x[own], y=y[own], is_test=is_test[own])
    return folder


def kept_round(path):
    """The last round that a node has trained; -1: none."""
    if not path.exists():
        return -1
    with np.load(path) as stored:
        return json.loads(str(stored["pfljax.values"]))["round"]


@pytest.mark.parametrize("tls", [False, True])
def test_a_written_app_on_a_network_equals_the_simulation(tls, files, tmp_path):
    app = tmp_path / "app"
    flags = ["--method=ditto", "--dataset=npz", f"--data_file={files}/all.npz", "--hidden=5"]
    flags += ["--optimizer=sgd", "--learning_rate=0.1", f"--rounds={ROUNDS}", "--standardize"]
    call(flower.COMMAND, app, *flags)

    keep = tmp_path / "keep"
    out = tmp_path / "out"
    patience = "start=1800.0 rejoin=1200.0"
    with Network(tmp_path / "network", tls=tls) as network:
        nodes = []
        for number in range(3):
            config = f'partition-id={number} data="{files}/{number}.npz" keep="{keep}"'
            nodes.append(network.start_node(number, config))
        run_config = f'out="{out}" {patience}'
        started = network.call("flwr", "run", app, "test", "--run-config", run_config)
        assert started.returncode == 0, started.stdout + started.stderr

        # The node of client 1 dies after its first round, and comes back with what it kept.
        file = keep / "client-1.npz"
        wait_until(lambda: kept_round(file) >= 0, 1200, network.logs)
        network.kill(nodes[1])
        network.start_node(1, f'partition-id=1 data="{files}/1.npz" keep="{keep}"')
        wait_until((out / "summary.json").exists, 1800, network.logs)
    assert network.remaining() == []

    # The simulation, on all clients' examples together.
    with np.load(files / "all.npz") as stored:
        clients = pfl.Federation.from_arrays(
            stored["x"], stored["y"], client=stored["client"], is_test=stored["is_test"]
        )
    local = pfl.LocalTraining(optimizer=optax.sgd, learning_rate=0.1)
    simulation = pfl.Simulation(
        pfl.Ditto(), clients, pfl.models.MLP(hidden=(5,)), local, rounds=ROUNDS
    )
    state = simulation.init(jax.random.fold_in(jax.random.key(0), 0))
    for _ in range(ROUNDS):
        state, _ = simulation.step(jax.random.fold_in(jax.random.key(0), 1), state)
    scores = simulation.evaluate(state)

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, ROUNDS]
    assert rows[-1]["absent"] == []
    with np.load(out / "results.npz") as results:
        np.testing.assert_allclose(results["loss_test"][-1], scores["test"]["loss"], atol=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(state.models)
    with np.load(out / "server.npz") as models:
        for path, leaf in leaves:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            np.testing.assert_allclose(models[name], leaf, atol=1e-5)
