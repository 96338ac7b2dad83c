"""Both of Flower's apps in one process, against the simulation."""

import json
import time

import jax
import numpy as np
import optax
import pytest

import pfljax as pfl

flwr = pytest.importorskip("flwr")

SIZES = (6, 8, 11)
SEED = jax.random.key(0)


def make_clients(**options):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(sum(SIZES), 3)) * [1, 20, 0.1] + [0, 5, 1]
    y = (x[:, 0] + x[:, 1] / 20 > 0.2).astype(int)
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    return pfl.Federation.from_arrays(x, y, client=client, **options)


def simulated(method, clients=None, rounds=3, local=None, model=None, **options):
    """A simulation, and its state after some rounds, with the keys of a run."""
    local = local or pfl.LocalTraining(optimizer=optax.sgd, learning_rate=0.1, batch_size=3)
    simulation = pfl.Simulation(
        method,
        clients or make_clients(),
        model or pfl.models.MLP(hidden=(3,)),
        local,
        rounds=rounds,
        execution=pfl.Execution(devices=1, cache_features=False),
        **options,
    )
    state = simulation.init(jax.random.fold_in(SEED, 0))
    for _ in range(rounds):
        state, _ = simulation.step(jax.random.fold_in(SEED, 1), state)
    return simulation, state


def on_flower(run, rounds=3, nodes=None, before=None, read=None, **options):
    """What a run leaves at the server, and the grid."""
    outcomes = []
    readers = {} if read is None else {"read": read}
    client_app = pfl.flower.client_app(run, **readers)
    server_app = pfl.flower.server_app(
        run, rounds, eval_every=rounds, finished=outcomes.append, **options
    )
    nodes = nodes or [{"partition-id": number} for number in range(len(SIZES))]
    grid = pfl.flower.rehearse(client_app, server_app, nodes, before=before)
    return outcomes[0], grid


def task_of(message):
    """The task in a message, and its round."""
    values = message.content.config_records["pfljax.values"]
    return values.get("task"), values.get("round")


def assert_equal_scores(simulation, state, outcome):
    """The last scores of a deployment are those of the simulation."""
    scores = simulation.evaluate(state, jax.random.fold_in(SEED, 2))
    evaluated = outcome.evaluations[-1].scores
    assert "test" in evaluated
    for split, values in evaluated.items():
        for metric, each in values.items():
            np.testing.assert_allclose(each, scores[split][metric], atol=1e-5)


def assert_close(a, b, atol=1e-5):
    for leaf, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(leaf, other, atol=atol)


def test_a_method_with_a_server_and_rows_equals_the_simulation():
    simulation, state = simulated(pfl.Ditto())
    outcome, _ = on_flower(simulation)
    assert_close(state.server, outcome.state.server)
    scores = simulation.evaluate(state, jax.random.fold_in(SEED, 2))
    evaluated = outcome.evaluations[-1].scores
    np.testing.assert_allclose(evaluated["test"]["loss"], scores["test"]["loss"], atol=1e-5)
    assert outcome.history[-1]["absent"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pfl.Local(),
        pfl.methods.FedPAC(),  # its server changes clients' rows
        pfl.methods.DFedEM(),  # clients push
        pfl.FedeRiCo(neighbors=2),  # clients receive each other's models
        pfl.FedFomo(neighbors=1),
    ],
    ids=lambda method: method.info.name,
)
def test_every_topology_equals_the_simulation(method):
    simulation, state = simulated(method, make_clients(validation_fraction=0.3))
    outcome, _ = on_flower(simulation)
    assert_close(state.server, outcome.state.server)
    if outcome.state.clients.model:
        assert_close(state.clients.model, outcome.state.clients.model)
    scores = simulation.evaluate(state, jax.random.fold_in(SEED, 2))
    for split, values in outcome.evaluations[-1].scores.items():
        np.testing.assert_allclose(values["loss"], scores[split]["loss"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pfl.methods.IFCA(clusters=2, averaging="gradients"),
        pfl.methods.FedeRiCoCentralized(),
        pfl.FedeRiCo(neighbors=2, update="gradient"),
    ],
    ids=lambda method: method.info.name,
)
def test_several_exchanges_a_round_equal_the_simulation(method):
    """11 examples in batches of 3 are four steps, and as many messages to each client."""
    simulation, state = simulated(method)
    outcome, grid = on_flower(simulation)
    assert_close(state.server, outcome.state.server)
    if outcome.state.clients.model:
        assert_close(state.clients.model, outcome.state.clients.model)
    assert_equal_scores(simulation, state, outcome)
    work = [message for message in grid.messages if task_of(message)[0] == "work"]
    assert len(work) > 3 * len(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pfl.Local(),
        pfl.methods.FML(),
        pfl.methods.FedProto(),
        pfl.methods.FedGH(),
        pfl.methods.LGFedAvg(shared_layers=1),
    ],
    ids=lambda method: method.info.name,
)
def test_clients_with_different_networks_equal_the_simulation(method):
    networks = {"small": pfl.models.MLP(hidden=(3,)), "deep": pfl.models.MLP(hidden=(5, 3))}
    simulation, state = simulated(method, model=networks)
    outcome, _ = on_flower(simulation)
    assert_close(state.server, outcome.state.server)
    assert_equal_scores(simulation, state, outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"participation": 0.67},
        {"compression": pfl.Compression(upload="topk:0.3")},
        {"server": pfl.Server(aggregator="median")},
    ],
    ids=lambda options: next(iter(options)),
)
def test_stages_equal_the_simulation(options):
    simulation, state = simulated(pfl.methods.Scaffold(), **options)
    outcome, _ = on_flower(simulation)
    assert_close(state.server.state.state, outcome.state.server.state.state)
    assert_close(state.models, outcome.state.models)


@pytest.mark.slow
def test_each_nodes_noise_is_drawn_from_its_secret():
    pytest.importorskip("jax_privacy")

    def local(noise_seed):
        privacy = pfl.Privacy(noise_multiplier=0.5, clip_norm=1.0, noise_seed=noise_seed)
        return pfl.LocalTraining(optimizer=optax.sgd, learning_rate=0.1, privacy=privacy)

    simulation, _ = simulated(pfl.FedAvg(), rounds=1, local=local(None))
    first, grid = on_flower(simulation, rounds=1)
    second, _ = on_flower(simulation, rounds=1)
    secrets = []
    for context in grid.contexts.values():
        secrets.append(context.state.array_records["pfljax.arrays"]["secret/key"].numpy().tolist())
    assert len({tuple(secret) for secret in secrets}) == len(SIZES)
    kernels = [outcome.state.models["Dense_0"]["kernel"] for outcome in (first, second)]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3
    names = [
        name for message in grid.messages for name in message.content.array_records["pfljax.arrays"]
    ]
    assert names and not any("secret" in name for name in names)


def test_a_client_without_a_node_counts_as_one_without_examples():
    """Node 1 is gone from the second round on: the mean is that of the others."""
    rounds = 2

    def before(grid, message):
        values = message.content.config_records["pfljax.values"]
        if values.get("task") == "work" and values["round"] == 1:
            grid.gone = {101}

    simulation, _ = simulated(pfl.FedAvg(), rounds=1)
    outcome, _ = on_flower(simulation, rounds, before=before)
    assert outcome.history[-1]["absent"] == [1]
    assert np.isnan(outcome.evaluations[-1].scores["test"]["loss"]).tolist() == [False, True, False]

    # The same by hand: the second round of clients 0 and 2 alone, from the models of the first.
    clients = simulation.experiment.clients
    sizes = np.asarray(clients.train.size)
    only, _ = on_flower(simulation, rounds)
    assert (
        np.abs(
            only.state.models["Dense_0"]["kernel"] - outcome.state.models["Dense_0"]["kernel"]
        ).max()
        > 1e-6
    )
    updates = []
    for gone in ({100, 101}, {101, 102}):

        def alone(grid, message, gone=gone):
            values = message.content.config_records["pfljax.values"]
            if values.get("task") == "work" and values["round"] == 1:
                grid.gone = gone

        single, _ = on_flower(simulation, rounds, before=alone)
        updates.append(single.state.models["Dense_0"]["kernel"])
    weights = np.array([sizes[2], sizes[0]]) / (sizes[0] + sizes[2])
    expected = weights[0] * updates[0] + weights[1] * updates[1]
    np.testing.assert_allclose(outcome.state.models["Dense_0"]["kernel"], expected, atol=1e-6)


def test_a_node_that_comes_back_under_its_id_is_asked_again_in_the_round(monkeypatch):
    """As nodes with keys of their own do. The time until Flower knows that it is gone does not count."""
    listings = []
    seconds = time.monotonic

    def before(grid, message):
        is_first = task_of(message) == ("work", 1) and message.metadata.dst_node_id == 101
        if not is_first or listings:
            return
        grid.gone = {101}
        monkeypatch.setattr(time, "monotonic", lambda: seconds() + 1000)
        all_ids = grid.get_node_ids

        def get_node_ids():
            listings.append(all_ids())
            if len(listings) > 2:
                grid.gone = set()
            return all_ids()

        grid.get_node_ids = get_node_ids

    simulation, state = simulated(pfl.Ditto(), rounds=2)
    patience = pfl.flower.Patience(rejoin=60)
    outcome, _ = on_flower(simulation, rounds=2, before=before, patience=patience)
    assert [100, 102] in listings
    assert outcome.history[-1]["absent"] == []
    assert_close(state.server, outcome.state.server)
    assert_equal_scores(simulation, state, outcome)


def test_a_node_that_cannot_take_part_ends_no_run_that_has_begun():
    connected = []

    def before(grid, message):
        if task_of(message) == ("work", 0) and not connected:
            connected.extend(
                [
                    grid.connect({}),  # no client
                    grid.connect({"partition-id": 7}),
                    grid.connect({"partition-id": 0, "newcomer": True}),
                    grid.connect({"partition-id": 0, "newcomer": True}),
                ]
            )

    simulation, state = simulated(pfl.FedAvg(), rounds=2)
    outcome, _ = on_flower(simulation, rounds=2, before=before)
    assert_close(state.server, outcome.state.server)
    assert [each.newcomer_ids for each in outcome.evaluations] == [(), (0,)]


def test_results_of_each_evaluation_are_written_and_newcomers_may_join_late(tmp_path):
    seen = []

    def before(grid, message):
        if task_of(message) == ("work", 0) and not seen:
            seen.append(sorted(path.name for path in (tmp_path / "out").iterdir()))
            grid.connect({"partition-id": 2, "newcomer": True})

    simulation, state = simulated(pfl.FedAvg(), rounds=2)
    on_flower(simulation, rounds=2, before=before, out=tmp_path / "out")
    assert seen == [["metrics.jsonl", "results.npz", "server.npz"]]
    scores = simulation.evaluate(state, jax.random.fold_in(SEED, 2))
    with np.load(tmp_path / "out" / "results.npz") as results:
        assert results["rounds"].tolist() == [0, 2] and results["newcomers"].tolist() == [2]
        loss = scores["test"]["loss"]
        np.testing.assert_allclose(results["loss_test"][-1], loss, atol=1e-5)
        # The newcomer has the examples of client 2, and the global model.
        newcomer = results["newcomers_loss_test"]
        np.testing.assert_allclose(newcomer[:, 0], [np.nan, loss[2]], atol=1e-5)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    # A client receives and sends the model's 3 * 3 + 3 + 3 * 2 + 2 floats a round, and a few numbers.
    for name in ("bytes_down", "bytes_up"):
        assert 0 <= summary["last"][name] - 2 * 4 * 20 <= 2 * 64


def test_a_node_that_is_asked_again_begins_where_it_began_before():
    simulation, state = simulated(pfl.Ditto(), rounds=2)
    asked = []

    def again(grid, message):
        values = message.content.config_records["pfljax.values"]
        if values.get("task") == "work" and not asked:
            asked.append(message)
            grid.client_app(message, grid.contexts[message.metadata.dst_node_id])  # lost

    outcome, _ = on_flower(simulation, rounds=2, before=again)
    assert asked
    assert_close(state.server, outcome.state.server)
    scores = simulation.evaluate(state, jax.random.fold_in(SEED, 2))
    losses = outcome.evaluations[-1].scores["test"]["loss"]
    np.testing.assert_allclose(losses, scores["test"]["loss"], atol=1e-5)


@pytest.mark.slow
def test_scaling_is_that_of_all_clients_or_of_each_node():
    clients = make_clients()

    def read(config, known):
        one = pfl.flower.client_of_run(config, known)
        x, y = one.examples(0, "train")
        test_x, test_y = one.examples(0)
        is_test = np.arange(len(x) + len(test_x)) >= len(x)
        own = pfl.Federation.from_arrays(
            np.concatenate([x, test_x]),
            np.concatenate([y, test_y]),
            np.zeros(len(is_test), int),
            is_test=is_test,
            num_classes=2,
        )
        return own

    # Full batches, since other files have other orders of the examples.
    local = pfl.LocalTraining(optimizer=optax.sgd, learning_rate=0.1)
    simulation, state = simulated(pfl.FedAvg(), clients, local=local)
    outcome, _ = on_flower(simulation, read=read)
    assert_close(state.models, outcome.state.models)
    other, _ = on_flower(simulation, read=read, scaling="node")
    kernel = other.state.models["Dense_0"]["kernel"]
    assert np.abs(kernel - state.models["Dense_0"]["kernel"]).max() > 1e-3


@pytest.mark.slow
def test_newcomers_are_scored_with_what_they_make_of_the_models():
    simulation, _ = simulated(pfl.FedAvg())
    nodes = [{"partition-id": number} for number in range(3)]
    nodes.append({"partition-id": 0, "newcomer": True})
    outcome, _ = on_flower(simulation, nodes=nodes)
    last = outcome.evaluations[-1]
    # The newcomer has the examples of client 0, and the global model.
    np.testing.assert_allclose(
        last.newcomers["test"]["loss"], last.scores["test"]["loss"][:1], atol=1e-6
    )


@pytest.mark.parametrize(
    "options, named",
    [
        ({"faults": pfl.Faults(dropout=0.5)}, "faults"),
        ({"clock": pfl.Clock()}, "clock"),
        ({"attack": pfl.Attack(kind="sign_flip")}, "attack"),
    ],
    ids=["faults", "clock", "attack"],
)
def test_what_is_only_simulated_is_refused(options, named):
    run = pfl.Run(pfl.FedAvg(), make_clients(), pfl.models.MLP(hidden=(3,)), **options)
    with pytest.raises(pfl.ArgumentError, match=f"^{named}: accepted in a deployment: none"):
        pfl.flower.client_app(run)


def test_mistakes_of_nodes_end_the_run_with_their_line():
    simulation, _ = simulated(pfl.FedAvg(), rounds=1)
    with pytest.raises(pfl.RunError, match=r"^node 101: partition-id: a node needs"):
        on_flower(simulation, nodes=[{"partition-id": 0}, {}, {"partition-id": 2}])
    with pytest.raises(pfl.RunError, match=r"client=7: accepted: 0 to 2"):
        on_flower(simulation, nodes=[{"partition-id": 7}])
    with pytest.raises(pfl.RunError, match=r"^no node of client 1, 2 after 0 seconds"):
        patience = pfl.flower.Patience(start=0)
        on_flower(simulation, nodes=[{"partition-id": 0}], patience=patience)


@pytest.mark.parametrize(
    "config, line",
    [
        ({"rounds": 0}, "rounds=0: accepted: 1 or more"),
        ({"eval-every": 0}, "eval_every=0: accepted: 1 or more"),
        ({"scaling": "none"}, "scaling=none: accepted: federated, node"),
        ({"rejoin": -1.0}, "rejoin=-1.0: accepted: 0 or more"),
        ({"start": "soon"}, "start=soon: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_mistakes_in_the_configuration_of_a_run_are_refused(config, line):
    simulation, _ = simulated(pfl.FedAvg(), rounds=1)
    client_app = pfl.flower.client_app(simulation)
    server_app = pfl.flower.server_app(simulation, 1)
    with pytest.raises(pfl.ArgumentError, match=f"^{line}"):
        pfl.flower.rehearse(client_app, server_app, [], run_config=config)


def test_examples_leave_a_node_only_if_it_agrees():
    simulation, _ = simulated(pfl.methods.FedAvgData(), rounds=1)
    with pytest.raises(pfl.RunError, match=r"^client 0: send-examples: fedavg_data needs"):
        on_flower(simulation, rounds=1)


def test_other_versions_of_flower_are_refused(monkeypatch):
    simulation, _ = simulated(pfl.FedAvg(), rounds=1)
    for version in ("1.25.0", "1.43.0", "2.0"):
        monkeypatch.setattr(flwr, "__version__", version)
        with pytest.raises(pfl.ArgumentError, match=rf"^flwr={version}: accepted: >=1.26,<1.43"):
            pfl.flower.client_app(simulation)
