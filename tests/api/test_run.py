"""The Python API: what a user types, what comes back, and what is refused."""

import copy
import dataclasses
import sys
import types

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.api.result import frame_of
from pfljax.folder import files
from pfljax.report.run_data import over_rounds

LOCAL = pfl.LocalTraining(optax.adam(1e-2))
MODEL = pfl.models.MLP(hidden=())


@pytest.fixture(scope="module")
def clients():
    return pfl.data.digits(num_clients=6, partition=pfl.partitions.LabelGroups(groups=2), train_examples=8)


@pytest.fixture(scope="module")
def trained(clients, tmp_path_factory):
    """A run of 4 rounds in a folder, and its result."""
    out = tmp_path_factory.mktemp("api") / "run"
    run = pfl.Run(pfl.FedeRiCo(neighbors=2), clients, MODEL, LOCAL, seed=0)
    return run, run.train(rounds=4, eval_every=2, out=out)


@pytest.mark.slow
def test_a_result_tells_what_its_files_tell(trained, clients):
    _, result = trained
    rows = files.read_jsonl(result.out / "metrics.jsonl")
    assert [row["round"] for row in result.history] == [row["round"] for row in rows] == [0, 2, 4]
    assert result.accuracy == rows[-1]["accuracy"] and result.loss == rows[-1]["loss"]
    stored = files.read_npz(result.out / "results.npz")["accuracy_test"][-1]
    np.testing.assert_array_equal(result.per_client_accuracy, stored)
    assert np.average(stored, weights=clients.test.size) == pytest.approx(result.accuracy)
    assert result.state.models["Dense_0"]["kernel"].shape[0] == clients.num_clients
    assert files.read_json(result.out / "summary.json")["last"]["round"] == 4


def test_predictions_are_those_that_were_scored(trained, clients):
    """Scoring a client's test examples by `predict` gives the accuracy in the results."""
    _, result = trained
    for k in (0, 4):
        size = clients.test.size[k]
        x, y = clients.test.x[k, :size], clients.test.y[k, :size]
        found = result.predict(x, client=k)
        assert found.shape == (size, 10)
        np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
        assert (found.argmax(axis=1) == y).mean() == pytest.approx(result.per_client_accuracy[k])
        np.testing.assert_allclose(result.predictions(x)[k], found, atol=1e-6)


def test_collaboration_is_a_matrix_of_weights(trained, clients):
    found = trained[1].collaboration
    assert found.rounds.tolist() == [0, 2, 4]
    matrix = found.matrix()
    assert matrix.shape == (6, 6)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(found.distribution, clients.distribution)


def test_scores_as_a_frame(trained, clients):
    """Its groups give the figures that the result tells, computed by pandas."""
    result = trained[1]
    frame = result.to_pandas()
    assert frame.columns.tolist() == ["round", "client", "split", "group", "size", "loss", "accuracy"]
    assert len(frame) == len(result.history) * clients.num_clients * frame.split.nunique()
    last = frame[(frame["round"] == 4) & (frame.split == "test")].set_index("client").accuracy
    np.testing.assert_array_equal(last, result.per_client_accuracy)
    first = frame[(frame["round"] == result.history[0]["round"]) & (frame.split == "train")].set_index("client").loss
    np.testing.assert_array_equal(first, result.results["loss_train"][0])
    own = frame[(frame["round"] == 2) & (frame.split == "train")].set_index("client")
    np.testing.assert_array_equal(own["size"], clients.train.size)
    np.testing.assert_array_equal(own.group, clients.distribution)


@pytest.mark.slow
def test_without_true_groups_nothing_is_said_of_them(clients, tmp_path):
    """Natural clients: the files, frames, figures and pages of a run leave groups out."""
    unknown = dataclasses.replace(clients, distribution=None)
    result = pfl.Run(pfl.FedeRiCo(neighbors=2), unknown, MODEL, LOCAL).train(rounds=1, out=tmp_path / "run")
    assert "group" not in result.to_pandas().columns and result.collaboration.distribution is None
    assert "distribution" not in files.read_npz(tmp_path / "run" / "collaboration.npz")
    assert all("distribution" not in row for row in result.summary["per_client"])
    page = result.write_report().read_text()
    assert "their true groups are unknown" in page and "Rand" not in page and "true group<" not in page


def test_unseen_clients_are_scored_by_the_names_of_their_classes():
    """Models that tell dogs from eels by the only feature tell those of unseen clients, who have no cat."""
    y = np.arange(90) % 3
    make = lambda rows: pfl.Federation.from_arrays(
        np.eye(3)[y[rows]], np.array(["cat", "dog", "eel"])[y[rows]], rows % 2, standardize=False
    )
    rows = np.arange(90)
    model, local = pfl.models.MLP(hidden=()), pfl.LocalTraining(optax.sgd(1.0))
    run = pfl.Run(pfl.FedAvg(), make(rows), model, local, unseen=make(rows[y > 0]))
    result = run.train(rounds=20)
    assert result.accuracy == result.summary["unseen"]["accuracy"] == 1


def test_a_frame_names_the_clients_of_a_sample(clients):
    """Of two evaluations of clients 1 and 3; groups and sizes are theirs."""
    scores = {f"loss_{split}": np.arange(4.0).reshape(2, 2) + 10 * (split == "test") for split in ("train", "test")}
    frame = frame_of({"rounds": np.array([3, 6]), "clients": np.array([1, 3]), **scores}, clients)
    row = lambda at, k, split, loss: [at, k, split, clients.distribution[k], getattr(clients, split).size[k], loss]
    first = [row(3, 1, "train", 0), row(3, 1, "test", 10), row(3, 3, "train", 1), row(3, 3, "test", 11)]
    last = [row(6, 1, "train", 2), row(6, 1, "test", 12), row(6, 3, "train", 3), row(6, 3, "test", 13)]
    assert frame.values.tolist() == first + last


def test_a_frame_has_the_data_s_names_of_clients(clients):
    named = dataclasses.replace(clients, client_names=np.array(list("uvwxyz")))
    scores = {"loss_test": np.arange(4.0).reshape(2, 2), "rounds": np.array([3, 6]), "clients": np.array([1, 3])}
    frame = frame_of(scores, named)
    assert frame[["client", "name"]].values.tolist() == [[1, "v"], [3, "x"]] * 2


def test_without_pandas_one_line_says_how_to_get_it(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(pfl.ArgumentError, match=r"to_pandas: needs pandas: pip install 'pfljax\[pandas\]'"):
        trained[1].to_pandas()


@pytest.mark.parametrize("name", ["accuracy", "per_client", "collaboration", "weights", "traffic"])
def test_figures_can_be_shown(trained, name):
    figure = getattr(trained[1].plot, name)()
    assert figure.axes and figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.slow
def test_training_goes_on_and_resumes(trained, clients, tmp_path):
    """Four rounds and two more, six at once, and four, killed, and resumed give the same."""
    start = lambda: pfl.Run(pfl.Scaffold(), clients, MODEL, pfl.LocalTraining(optax.sgd(0.1)), seed=0)
    whole = start().train(rounds=6, eval_every=2)
    parts = start()
    out = tmp_path / "run"
    assert len(parts.train(rounds=4, eval_every=2, out=out).history) == 3
    resumed = start().train(rounds=6, eval_every=2, out=out, resume=True)
    tracked = []
    longer = parts.train(rounds=2, eval_every=2, tracker=tracked.append)
    assert [(each.round, each.resumed) for each in tracked] == [(6, 4)]
    for other in (longer, resumed):
        assert [row["round"] for row in other.history] == [0, 2, 4, 6]
        np.testing.assert_array_equal(other.results["loss_test"], whole.results["loss_test"])
    assert longer.summary["rounds"] == 6


@pytest.mark.slow
def test_a_comparison_is_a_table(clients, tmp_path):
    methods = [pfl.FedAvg(), ("gentle", pfl.FedProx(mu=0.01))]
    options = {"seeds": range(2), "out": tmp_path, "eval_every": 1, "reference": "gentle"}
    table = pfl.compare(methods, clients, MODEL, LOCAL, rounds=2, **options)
    assert "a sample of" not in table.title
    assert [row["algorithm"] for row in table.rows] == ["fedavg", "gentle"]
    again = pfl.compare(methods, clients, MODEL, LOCAL, rounds=2, **options)
    with pytest.raises(ValueError, match=r"^rounds=1: .*seed-0 already has 2 rounds; accepted: 2 or more"):
        pfl.compare(methods, clients, MODEL, LOCAL, rounds=1, **options)
    assert str(again) == str(table)  # taken from the files, seconds included
    cells = [files.read_json(tmp_path / "fedavg" / f"seed-{seed}" / "summary.json") for seed in range(2)]
    alone = [cell["last"]["accuracy"] for cell in cells]
    assert pfl.Run(pfl.FedAvg(), clients, MODEL, LOCAL, seed=1).train(rounds=2).accuracy == pytest.approx(alone[1])
    assert table.rows[0]["accuracy_mean"] == pytest.approx(np.mean(alone))
    assert table.rows[0]["accuracy_std"] == pytest.approx(abs(alone[0] - alone[1]) / np.sqrt(2))
    assert "gentle" in str(table) and str(table).count("±") == 4  # two rows, the title, and what it is
    assert (tmp_path / "table.png").stat().st_size > 1000
    part = pfl.compare([pfl.FedAvg()], clients, MODEL, LOCAL, seeds=[0], rounds=1, eval_clients=2)
    assert f", a sample of 2 of {clients.num_clients} clients, last of 1 rounds, seed 0" in part.title
    assert "±" not in str(part) + part.to_markdown()  # one seed has no deviation
    frame = table.to_pandas()
    assert frame.method.tolist() == ["fedavg", "fedavg", "gentle", "gentle"]
    assert frame.seed.tolist() == [0, 1, 0, 1] and frame.accuracy[:2].tolist() == alone
    assert frame.groupby("method").accuracy.std().tolist() == pytest.approx([r["accuracy_std"] for r in table.rows])
    shown = table.to_pandas(by="method").set_index("algorithm")
    others = frame[frame.method == "gentle"].accuracy
    assert shown.difference["fedavg"] == pytest.approx(np.mean(alone) - others.mean()) and shown.p["fedavg"] >= 0.5
    assert np.isnan(shown.difference["gentle"]) and shown["rank"].min() == 1


def test_curves_are_of_the_rounds_that_all_seeds_have():
    """As after a change of eval_every, or of runs that an earlier version began without round 0."""
    rows = lambda *rounds: [{"round": number, "accuracy": number / 10} for number in rounds]
    rounds, curves = over_rounds([rows(0, 2, 4, 6), rows(2, 3, 6)], "accuracy")
    assert rounds == [2, 6] and curves.tolist() == [[0.2, 0.6]] * 2


def test_one_s_own_arrays_and_module():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, inputs):
            return nn.Dense(3)(inputs)

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)), rng.integers(3, size=60)
    y[:3] = [0, 1, 2]
    for arrays in ((x, y), (jax.numpy.asarray(x), jax.numpy.asarray(y))):
        clients = pfl.Federation.from_arrays(*arrays, client=np.repeat(["a", "b", "c"], 20))
        assert clients.num_clients == 3
        result = pfl.Run(pfl.FedAvg(), clients, Own(), pfl.LocalTraining(optax.sgd(0.1))).train(rounds=1)
        assert np.isfinite(result.loss)
        np.testing.assert_array_equal(result.predict(x[:3], client="b"), result.predict(x[:3], client=1))


@pytest.mark.parametrize("client", [6, -1, "ann", 1.0])
def test_a_client_that_is_not_there_has_no_predictions(client, clients, trained):
    with pytest.raises(pfl.ArgumentError, match=f"client={client}: accepted: 0 to 5"):
        trained[1].predict(clients.test.x[0], client=client)


@pytest.mark.parametrize(
    ("client", "hint"), [("clinic-9", "; did you mean clinic-5?"), (6, " such as clinic-0, clinic-1, clinic-2")]
)
def test_names_of_clients_are_told(client, hint, clients, trained):
    named = dataclasses.replace(clients, client_names=np.array([f"clinic-{k}" for k in (0, 1, 2, 3, 4, 59)]))
    result = copy.copy(trained[1])
    result.experiment = types.SimpleNamespace(federation=named)
    with pytest.raises(pfl.ArgumentError) as error:
        result.export(client)
    assert str(error.value) == f"client={client}: accepted: 0 to 5, or a name{hint.replace('clinic-5', 'clinic-59')}"


def run_with(store="device", **options):
    clients = pfl.data.digits(num_clients=8, train_examples=6)
    execution = pfl.Execution("map", devices=1, client_store=store)
    local = pfl.LocalTraining(optax.sgd(0.1))
    run = pfl.Run(pfl.FedAvg(), clients, MODEL, local, execution=execution, **options)
    return run.train(2, eval_every=2, progress=False)


def test_samplers_draw_on_the_devices_only():
    sampled = run_with(server=pfl.Server("power_of_choice"), participation=0.25)
    assert np.isfinite(sampled.accuracy) and ("cohorts", "power_of_choice") in sampled.summary["plan"]
    with pytest.raises(pfl.ArgumentError, match=r"client_store=host: .*cohorts that are not drawn uniformly"):
        run_with("host", server=pfl.Server("weighted"), participation=0.25)


@pytest.mark.slow
def test_replicates_have_attackers_of_their_own():
    clients = pfl.data.digits(num_clients=8, train_examples=6)
    runs = [
        pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP(hidden=(4,)), seed=seed, attack=pfl.Attack("sign_flip", 0.25))
        for seed in (0, 1)
    ]
    together = [each.results["loss_test"] for each in pfl.train_replicates(runs, 2)]
    assert (np.isnan(together[0][-1]) != np.isnan(together[1][-1])).any()
    for seed, found in enumerate(together):
        alone = pfl.Run(
            pfl.FedAvg(), clients, pfl.models.MLP(hidden=(4,)), seed=seed, attack=pfl.Attack("sign_flip", 0.25)
        )
        np.testing.assert_allclose(found, alone.train(2, progress=False).results["loss_test"], rtol=2e-4)
    mixed = [runs[0], pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP(hidden=(4,)), seed=1)]
    with pytest.raises(pfl.ArgumentError, match="one method"):
        pfl.train_replicates(mixed, 2)
