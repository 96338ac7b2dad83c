"""The Python API: what a user types, what comes back, and what is refused."""

import dataclasses
import sys

import jax
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.api.result import frame_of
from pfljax.folder import files
from pfljax.report.run_data import over_rounds
from pfljax.training import describe

LOCAL = pfl.LocalTraining(optax.adam(1e-2))
MODEL = pfl.models.MLP(hidden=())
pytestmark = pytest.mark.xdist_group("runs")


@pytest.fixture(scope="module")
def clients(digits_clients):
    return digits_clients


def test_a_result_tells_what_its_files_tell(finished_run, clients):
    result = finished_run
    rows = files.read_jsonl(result.out / "metrics.jsonl")
    assert [row["round"] for row in result.history] == [row["round"] for row in rows] == [0, 2, 4]
    assert result.accuracy == rows[-1]["accuracy"] and result.loss == rows[-1]["loss"]
    stored = files.read_npz(result.out / "results.npz")["accuracy_test"][-1]
    np.testing.assert_array_equal(result.per_client_accuracy, stored)
    assert np.average(stored, weights=clients.test.size) == pytest.approx(result.accuracy)
    assert result.state.models["Dense_0"]["kernel"].shape == (2, 64, 10)
    assert files.read_json(result.out / "summary.json")["last"]["round"] == 4


def test_the_seconds_of_all_parts_are_those_of_the_run(finished_run):
    seconds = dict(finished_run.summary["seconds"])
    total = seconds.pop("total")
    assert min(seconds.values()) >= 0 and sum(seconds.values()) == pytest.approx(total)


def test_a_run_is_printed_with_its_method_and_clients(clients):
    assert repr(pfl.Run("ditto", clients, MODEL, seed=3)) == f"Run(ditto, seed 3, on {clients!r})"


def test_predictions_are_those_that_were_scored(finished_run, clients):
    """Scoring a client's test examples by `predict` gives the accuracy in the results."""
    k = 4
    size = clients.test.size[k]
    x = clients.test.x[k, :size]
    y = clients.test.y[k, :size]
    found = finished_run.predict(x, client=k)
    assert found.shape == (size, 10)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    assert (found.argmax(axis=1) == y).mean() == pytest.approx(finished_run.per_client_accuracy[k])
    of_all = finished_run.predict(x)
    np.testing.assert_allclose(of_all[k], found, atol=1e-6)
    assert np.abs(of_all[0] - found).max() > 1e-3


def test_a_method_may_be_named(clients):
    for name in ("ditto", "Ditto", "DITTO"):
        assert pfl.Run(name, clients, MODEL).experiment.method == pfl.Ditto()
    hint = "=dito: unknown method; did you mean ditto"
    with pytest.raises(pfl.ArgumentError, match=f"^method{hint}"):
        pfl.Run("dito", clients, MODEL)
    with pytest.raises(pfl.ArgumentError, match=f"^methods{hint}"):
        pfl.compare(["dito"], clients, MODEL, rounds=1)
    with pytest.raises(pfl.ArgumentError, match=f"^method{hint}"):
        pfl.tune("dito", clients, MODEL, rounds=1)
    with pytest.raises(pfl.ArgumentError, match="accepted: "):
        pfl.Run("", clients, MODEL)


def test_collaboration_is_a_matrix_of_weights(finished_run, clients):
    found = finished_run.collaboration
    assert found.rounds.tolist() == [0, 2, 4] and found.topology == "shared"
    matrix = found.matrix()
    assert matrix.shape == (6, 2)
    np.testing.assert_array_equal(
        np.take_along_axis(matrix, found.index[-1], axis=1), found.weights[-1]
    )
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-5)
    assert np.abs(matrix - found.matrix(0)).max() > 1e-3
    np.testing.assert_array_equal(found.group, clients.group)


def test_a_matrix_of_clients_own_models_has_a_column_for_each():
    index = np.array([[[1, 0], [1, 2], [2, 1]]])
    weights = np.array([[[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]])
    found = pfl.Collaboration(np.array([3]), index, weights, None, "peers", {})
    np.testing.assert_array_equal(found.matrix(), [[0.75, 0.25, 0], [0, 1, 0], [0, 0.5, 0.5]])
    sampled = dataclasses.replace(found, arrays={"clients": np.array([0, 2, 5])})
    with pytest.raises(pfl.ArgumentError, match="eval_clients: a matrix needs all clients"):
        sampled.matrix()


def test_scores_as_a_frame(finished_run, clients):
    """Its groups give the figures that the result tells, computed by pandas."""
    result = finished_run
    frame = result.to_pandas()
    assert frame.columns.tolist() == [
        "round",
        "client",
        "split",
        "group",
        "size",
        "loss",
        "accuracy",
    ]
    assert len(frame) == len(result.history) * clients.num_clients * frame.split.nunique()
    last = frame[(frame["round"] == 4) & (frame.split == "test")].set_index("client").accuracy
    np.testing.assert_array_equal(last, result.per_client_accuracy)
    first = (
        frame[(frame["round"] == result.history[0]["round"]) & (frame.split == "train")]
        .set_index("client")
        .loss
    )
    np.testing.assert_array_equal(first, result.results["loss_train"][0])
    own = frame[(frame["round"] == 2) & (frame.split == "train")].set_index("client")
    np.testing.assert_array_equal(own["size"], clients.train.size)
    np.testing.assert_array_equal(own.group, clients.group)


@pytest.mark.long
def test_without_true_groups_nothing_is_said_of_them(clients, tmp_path):
    """Natural clients: the files, frames, figures and pages of a run leave groups out."""
    unknown = dataclasses.replace(clients, group=None)
    result = pfl.Run(pfl.FedeRiCo(neighbors=2), unknown, MODEL, LOCAL).train(
        rounds=1, out=tmp_path / "run"
    )
    assert "group" not in result.to_pandas().columns and result.collaboration.group is None
    assert "group" not in files.read_npz(tmp_path / "run" / "collaboration.npz")
    assert all("group" not in row for row in result.summary["per_client"])
    page = result.write_report().read_text()
    assert (
        "their true groups are unknown" in page and "Rand" not in page and "true group<" not in page
    )


def animals():
    """A run on clients with cats, dogs and eels, which the only feature tells; its unseen clients have no cats."""
    y = np.arange(90) % 3
    rows = np.arange(90)

    def make(rows):
        names = np.array(["cat", "dog", "eel"])[y[rows]]
        return pfl.Federation.from_arrays(np.eye(3)[y[rows]], names, rows % 2, standardize=False)

    local = pfl.LocalTraining(optax.sgd(1.0))
    return pfl.Run(pfl.FedAvg(), make(rows), MODEL, local, unseen=make(rows[y > 0]))


def test_classes_of_unseen_clients_have_the_numbers_that_they_have_in_training():
    run = animals()
    assert run.clients.class_names == ("cat", "dog", "eel")
    unseen = run.experiment.unseen
    for split in (unseen.train, unseen.test):
        for k, size in enumerate(split.size):
            np.testing.assert_array_equal(split.y[k, :size], split.x[k, :size].argmax(axis=1))
            assert set(split.y[k, :size]) == {1, 2}


@pytest.mark.long
def test_unseen_clients_are_scored_by_the_names_of_their_classes():
    result = animals().train(rounds=20)
    assert result.accuracy == result.summary["unseen"]["accuracy"] == 1


def test_a_frame_names_the_clients_of_a_sample(clients):
    """Of two evaluations of clients 1 and 3; groups and sizes are theirs."""
    scores = {
        f"loss_{split}": np.arange(4.0).reshape(2, 2) + 10 * (split == "test")
        for split in ("train", "test")
    }
    frame = frame_of({"rounds": np.array([3, 6]), "clients": np.array([1, 3]), **scores}, clients)

    def row(at, k, split, loss):
        return [at, k, split, clients.group[k], getattr(clients, split).size[k], loss]

    first = [
        row(3, 1, "train", 0),
        row(3, 1, "test", 10),
        row(3, 3, "train", 1),
        row(3, 3, "test", 11),
    ]
    last = [
        row(6, 1, "train", 2),
        row(6, 1, "test", 12),
        row(6, 3, "train", 3),
        row(6, 3, "test", 13),
    ]
    assert frame.values.tolist() == first + last


def test_a_frame_has_the_data_s_names_of_clients(clients):
    named = dataclasses.replace(clients, client_names=np.array(list("uvwxyz")))
    scores = {
        "loss_test": np.arange(4.0).reshape(2, 2),
        "rounds": np.array([3, 6]),
        "clients": np.array([1, 3]),
    }
    frame = frame_of(scores, named)
    assert frame[["client", "name"]].values.tolist() == [[1, "v"], [3, "x"]] * 2


def test_without_pandas_one_line_says_how_to_get_it(finished_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        pfl.ArgumentError, match=r"to_pandas: needs pandas: pip install 'pfljax\[pandas\]'"
    ):
        finished_run.to_pandas()


@pytest.mark.parametrize("name", ["scores", "per_client", "collaboration", "weights", "traffic"])
def test_figures_can_be_shown(finished_run, name):
    figure = getattr(finished_run, f"plot_{name}")()
    assert figure.axes and figure._repr_png_().startswith(b"\x89PNG")


def test_former_names_say_the_present_ones(finished_run, clients):
    x = clients.test.x[0, :2]
    with pytest.warns(UserWarning, match=r"^predictions: is now predict\(x\)"):
        np.testing.assert_array_equal(finished_run.predictions(x), finished_run.predict(x))
    with pytest.warns(UserWarning, match=r"^plot: .*plot_scores"):
        assert finished_run.plot.accuracy().axes


def test_clients_are_those_of_the_run(finished_run, clients):
    x, _ = finished_run.clients.examples(2)
    np.testing.assert_array_equal(x, clients.examples(2)[0])


@pytest.mark.slow
def test_training_goes_on_and_resumes(clients, tmp_path):
    """Four rounds and two more, six at once, and four, killed, and resumed give the same."""

    def start():
        return pfl.Run(pfl.Scaffold(), clients, MODEL, pfl.LocalTraining(optax.sgd(0.1)), seed=0)

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
    assert [row["method"] for row in table.rows] == ["fedavg", "gentle"]
    again = pfl.compare(methods, clients, MODEL, LOCAL, rounds=2, **options)
    with pytest.raises(
        ValueError, match=r"^rounds=1: .*seed-0 already has 2 rounds; accepted: 2 or more"
    ):
        pfl.compare(methods, clients, MODEL, LOCAL, rounds=1, **options)
    assert str(again) == str(table)  # taken from the files, seconds included
    cells = [
        files.read_json(tmp_path / "fedavg" / f"seed-{seed}" / "summary.json") for seed in range(2)
    ]
    alone = [cell["last"]["accuracy"] for cell in cells]
    assert pfl.Run(pfl.FedAvg(), clients, MODEL, LOCAL, seed=1).train(
        rounds=2
    ).accuracy == pytest.approx(alone[1])
    assert table.rows[0]["score_mean"] == pytest.approx(np.mean(alone))
    assert table.rows[0]["score_std"] == pytest.approx(abs(alone[0] - alone[1]) / np.sqrt(2))
    # two rows, the title, and what it is
    assert "gentle" in str(table) and str(table).count("±") == 4
    assert (tmp_path / "table.png").stat().st_size > 1000
    part = pfl.compare([pfl.FedAvg()], clients, MODEL, LOCAL, seeds=[0], rounds=1, eval_clients=2)
    assert (
        f", a sample of 2 of {clients.num_clients} clients, last of 1 rounds, seed 0" in part.title
    )
    assert "±" not in str(part) + part.to_markdown()  # one seed has no deviation
    frame = table.to_pandas()
    assert frame.method.tolist() == ["fedavg", "fedavg", "gentle", "gentle"]
    assert frame.seed.tolist() == [0, 1, 0, 1] and frame.accuracy[:2].tolist() == alone
    assert frame.groupby("method").accuracy.std().tolist() == pytest.approx(
        [r["score_std"] for r in table.rows]
    )
    shown = table.to_pandas(by="method").set_index("method")
    others = frame[frame.method == "gentle"].accuracy
    assert (
        shown.difference["fedavg"] == pytest.approx(np.mean(alone) - others.mean())
        and shown.p["fedavg"] >= 0.5
    )
    assert np.isnan(shown.difference["gentle"]) and shown["rank"].min() == 1


def test_curves_are_of_the_rounds_that_all_seeds_have():
    """As after a change of eval_every, or of runs that an earlier version began without round 0."""

    def rows(*rounds):
        return [{"round": number, "accuracy": number / 10} for number in rounds]

    rounds, curves = over_rounds([rows(0, 2, 4, 6), rows(2, 3, 6)], "accuracy")
    assert rounds == [2, 6] and curves.tolist() == [[0.2, 0.6]] * 2


def test_one_s_own_arrays_and_module(run_of_arrays):
    x = run_of_arrays.x
    result = run_of_arrays.result
    assert run_of_arrays.clients.num_clients == 3 and np.isfinite(result.loss)
    found = result.predict(x[:3], client="b")
    np.testing.assert_array_equal(found, result.predict(x[:3], client=1))


def test_arrays_of_jax_are_those_of_numpy(run_of_arrays):
    x, y, client, clients, _ = run_of_arrays
    found = pfl.Federation.from_arrays(jax.numpy.asarray(x), jax.numpy.asarray(y), client=client)
    for split in ("train", "test"):
        one = getattr(found, split)
        other = getattr(clients, split)
        np.testing.assert_array_equal(one.y, other.y)
        np.testing.assert_allclose(one.x[...], other.x[...], atol=1e-5)


@pytest.mark.parametrize("client", [6, -1, "ann", 1.0])
def test_a_client_that_is_not_there_has_no_predictions(client, clients, finished_run):
    with pytest.raises(pfl.ArgumentError, match=f"client={client}: accepted: 0 to 5"):
        finished_run.predict(clients.test.x[0], client=client)


def test_pixels_up_to_255_are_refused_where_the_examples_are_fractions(clients, finished_run):
    x, _ = clients.examples(0)
    with pytest.raises(
        pfl.ArgumentError,
        match=r"^x: is uint8, but the clients' examples are floats; accepted: .* 255",
    ):
        finished_run.predict((255 * x).astype(np.uint8), client=0)
    assert finished_run.predict((x > 0.5).astype(np.uint8), client=0).shape == (len(x), 10)


@pytest.mark.parametrize(
    ("client", "hint"),
    [
        ("clinic-9", "; did you mean clinic-5?"),
        (6, " such as clinic-0, clinic-1, clinic-2"),
    ],
)
def test_names_of_clients_are_told(client, hint, clients):
    named = dataclasses.replace(
        clients, client_names=np.array([f"clinic-{k}" for k in (0, 1, 2, 3, 4, 59)])
    )
    with pytest.raises(pfl.ArgumentError) as error:
        named.client_number(client)
    assert (
        str(error.value)
        == f"client={client}: accepted: 0 to 5, or a name{hint.replace('clinic-5', 'clinic-59')}"
    )


def test_a_number_that_is_a_name_is_told_as_a_name(clients):
    named = dataclasses.replace(clients, client_names=np.array(["1", "3", "5", "7", "9", "11"]))
    message = r"^client=7: accepted: 0 to 5, or the name '7', a string$"
    with pytest.raises(pfl.ArgumentError, match=message):
        named.client_number(7)
    assert named.client_number("7") == 3


def sampled(sampler, store):
    """A run of a quarter of the clients a round."""
    execution = pfl.Execution("map", devices=1, client_store=store)
    clients = pfl.data.digits(num_clients=8, train_examples=6)
    server = pfl.Server(sampler)
    return pfl.Run(
        pfl.FedAvg(), clients, MODEL, LOCAL, execution=execution, server=server, participation=0.25
    )


def test_samplers_draw_on_the_devices_only():
    run = sampled("power_of_choice", "device")
    assert describe.surroundings(run.experiment) == [("cohorts", "power_of_choice")]
    with pytest.raises(
        pfl.ArgumentError, match=r"client_store=host: .*cohorts that are not drawn uniformly"
    ):
        sampled("weighted", "host")


@pytest.mark.long
def test_a_sampler_is_on_the_plan_of_a_run():
    result = sampled("power_of_choice", "device").train(2, eval_every=2, progress=False)
    assert np.isfinite(result.accuracy) and ("cohorts", "power_of_choice") in result.summary["plan"]


@pytest.mark.long
def test_replicates_have_attackers_of_their_own():
    clients = pfl.data.digits(num_clients=8, train_examples=6)
    runs = [
        pfl.Run(
            pfl.FedAvg(),
            clients,
            pfl.models.MLP(hidden=(4,)),
            seed=seed,
            attack=pfl.Attack("sign_flip", 0.25),
        )
        for seed in (0, 1)
    ]
    together = [each.results["loss_test"] for each in pfl.train_replicates(runs, 2)]
    assert (np.isnan(together[0][-1]) != np.isnan(together[1][-1])).any()
    for seed, found in enumerate(together):
        alone = pfl.Run(
            pfl.FedAvg(),
            clients,
            pfl.models.MLP(hidden=(4,)),
            seed=seed,
            attack=pfl.Attack("sign_flip", 0.25),
        )
        np.testing.assert_allclose(
            found, alone.train(2, progress=False).results["loss_test"], rtol=2e-4
        )
    mixed = [runs[0], pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP(hidden=(4,)), seed=1)]
    with pytest.raises(pfl.ArgumentError, match="one method"):
        pfl.train_replicates(mixed, 2)
