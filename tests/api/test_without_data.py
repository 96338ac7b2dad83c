"""A run's folder stands alone: its scores, figures and predictions need no data."""

import shutil

import numpy as np
import optax
import pytest

import pfljax as pfl

RNG = np.random.default_rng(0)
X = RNG.normal(5, 3, size=(40, 2))
LABELS = np.array(["cat", "cow"])[np.arange(40) % 2]
NAMES = np.array(["east", "north", "south", "west"])[np.arange(40) % 4]
MODEL = pfl.models.MLP(hidden=(4,))
LOCAL = pfl.LocalTraining(optax.sgd, 0.1)


def federation(x=X, y=LABELS, client=NAMES):
    return pfl.Federation.from_arrays(x, y, client=client)


def run(clients, method=None, **options):
    return pfl.Run(method or pfl.Ditto(), clients, MODEL, LOCAL, **options)


KINDS = [
    pytest.param({}, LABELS, id="classes"),
    pytest.param({"eval_clients": 2}, X[:, 0] + X[:, 1], id="regression", marks=pytest.mark.long),
    pytest.param(
        {"execution": pfl.Execution(client_store="disk")}, LABELS, id="disk", marks=pytest.mark.long
    ),
    pytest.param(
        {"method": pfl.methods.FedEM(components=2)}, LABELS, id="mixture", marks=pytest.mark.long
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "y"), KINDS)
def test_scores_and_predictions_need_no_data(options, y, tmp_path):
    result = run(federation(y=y), **options).train(2, out=tmp_path, progress=False)
    loaded = pfl.load(tmp_path)
    assert loaded.history == result.history and repr(loaded) == repr(result)
    assert loaded.to_pandas().equals(result.to_pandas())
    assert loaded.plot_scores().axes and loaded.write_report().exists()
    np.testing.assert_allclose(loaded.predict(X), result.predict(X), atol=1e-6)
    np.testing.assert_allclose(loaded.predict(X, "west"), result.predict(X, "west"), atol=1e-6)
    with pytest.raises(pfl.ArgumentError, match=r"^clients: cannot .*load\(path, clients=...\)$"):
        _ = loaded.clients
    assert loaded.client_names.tolist() == ["east", "north", "south", "west"]
    assert pfl.load(tmp_path, clients=federation(y=y)).clients.num_clients == 4


def test_clients_of_a_file_at_a_path_are_made_again(tmp_path):
    lines = [
        f"{a:.3f},{b:.3f},{label},{name}"
        for (a, b), label, name in zip(X, LABELS, NAMES, strict=True)
    ]
    file = tmp_path / "table.csv"
    file.write_text("\n".join(["a,b,label,site", *lines]))
    clients = pfl.data.read(file, label="label", client="site")
    run(clients, pfl.Local()).train(1, out=tmp_path / "run", progress=False)
    loaded = pfl.load(tmp_path / "run")
    np.testing.assert_array_equal(loaded.clients.train.x, clients.train.x)
    assert loaded.client_names.tolist() == ["east", "north", "south", "west"]


@pytest.mark.slow
def test_other_data_are_refused_and_what_differs_is_named(tmp_path):
    run(federation()).train(2, out=tmp_path, progress=False)
    x = X.copy()
    x[6] = 0
    with pytest.raises(
        pfl.ArgumentError, match=r"^clients: expected the clients of the run, but x of .*south"
    ):
        pfl.load(tmp_path, clients=federation(x))
    with pytest.raises(pfl.ArgumentError, match="was run on other data: x of client south differs"):
        run(federation(x)).train(3, out=tmp_path, resume=True, progress=False)


@pytest.mark.long
def test_a_folder_of_an_earlier_version_has_its_scores(tmp_path):
    result = run(federation()).train(2, out=tmp_path / "now", progress=False)
    shutil.copytree(tmp_path / "now", tmp_path / "then")
    (tmp_path / "then" / "data.npz").unlink()
    loaded = pfl.load(tmp_path / "then")
    assert loaded.history == result.history and loaded.plot_per_client().axes
    for needs_clients in (loaded.to_pandas, lambda: loaded.predict(X)):
        with pytest.raises(pfl.ArgumentError, match=r"^clients: .*load\(path, clients=...\)$"):
            needs_clients()
    again = pfl.load(tmp_path / "then", clients=federation())
    np.testing.assert_allclose(again.predict(X), result.predict(X), atol=1e-6)


@pytest.mark.long
def test_a_share_held_out_of_training_is_held_out_again(tmp_path):
    clients = federation()
    training, unseen = pfl.data.split_unseen(clients, 0.25, 0)
    run(training, unseen=unseen).train(2, out=tmp_path, progress=False)
    loaded = pfl.load(tmp_path, clients=clients, unseen=0.25)
    assert loaded.clients.num_clients == 3
    assert pfl.load(tmp_path, clients=training, unseen=unseen).clients.num_clients == 3
    with pytest.raises(
        pfl.ArgumentError, match=r"^clients: .*the run had 3 clients, and these are"
    ):
        pfl.load(tmp_path, clients=clients)
