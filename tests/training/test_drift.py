"""Runs whose clients' data change: what is trained on what, in every store, and what a resumed run does."""

import jax
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.data import Drift, drifted

MODEL = pfl.models.MLP(hidden=())
LOCAL = pfl.LocalTraining(optax.adam(0.02), batch_size=4)
QUIET = {"progress": False, "eval_every": 2}
LABELS = Drift(round=3, change="labels", clients=[1, 2])
ALL = [
    LABELS,
    Drift(round=1, change="arrive", clients=[0]),
    Drift(round=2, change="classes", clients=[3]),
    Drift(round=4, change="exchange", clients=[1, 3]),
    Drift(round=5, change="leave", clients=[2]),
]


@pytest.fixture(scope="module")
def clients():
    return pfl.data.digits(num_clients=4, train_examples=12)


def make_run(clients, method=None, *, store="device", local=LOCAL, **options):
    execution = pfl.Execution(client_store=store, devices=2)
    method = method or pfl.Ditto()
    return pfl.Run(method, clients, MODEL, local, seed=1, execution=execution, **options)


def assert_same(one, other, close=False):
    """Two results have the same state and the same scores."""
    compare = np.testing.assert_allclose if close else np.testing.assert_array_equal
    options = {"rtol": 2e-4, "atol": 2e-5} if close else {}
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True):
        compare(np.asarray(a), np.asarray(b), **options)
    assert one.results.keys() == other.results.keys()
    for name in one.results.keys() - {"scored"}:
        compare(one.results[name], other.results[name], **options)


@pytest.mark.slow
def test_a_change_that_does_not_come_changes_nothing(clients):
    plain = make_run(clients).train(4, **QUIET)
    late = make_run(clients, drift=Drift(round=4)).train(4, **QUIET)
    assert_same(plain, late)
    assert "drift" not in plain.summary


@pytest.mark.slow
def test_rounds_after_a_change_train_on_the_new_data(clients):
    """The run is two simulations, one after the other."""
    result = make_run(clients, drift=LABELS).train(5, **QUIET)
    key = jax.random.key(1)
    rounds_key = jax.random.fold_in(key, 1)
    state = None
    for federation, rounds in ((clients, 3), (drifted(clients, LABELS, 4, seed=1), 2)):
        execution = pfl.Execution(devices=2)
        simulation = pfl.Simulation(
            pfl.Ditto(), federation, MODEL, LOCAL, rounds=5, execution=execution
        )
        state = simulation.init(jax.random.fold_in(key, 0)) if state is None else state
        for _ in range(rounds):
            state, _ = simulation.step(rounds_key, state)
    for a, b in zip(jax.tree.leaves(result.state), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_continues_on_its_new_data(clients, tmp_path):
    whole = make_run(clients, pfl.Local(), drift=LABELS).train(4, **QUIET)
    make_run(clients, pfl.Local(), drift=LABELS).train(3, out=tmp_path / "run", **QUIET)
    run = make_run(clients, pfl.Local(), drift=LABELS)
    assert_same(whole, run.train(4, out=tmp_path / "run", resume=True, **QUIET))


@pytest.mark.long
@pytest.mark.parametrize("store", ["device", "host", "disk"])
@pytest.mark.parametrize("done", [2, 3, 4])
def test_a_resumed_run_is_the_same_to_the_last_bit(clients, tmp_path, store, done):
    def run():
        return make_run(clients, store=store, drift=ALL, participation=0.75)

    whole = run().train(7, **QUIET)
    run().train(done, out=tmp_path / "run", **QUIET)
    resumed = run().train(7, out=tmp_path / "run", resume=True, **QUIET)
    assert_same(whole, resumed)
    assert resumed.summary["drift"] == whole.summary["drift"]
    further = run()
    further.train(done, **QUIET)
    assert_same(whole, further.train(7 - done, **QUIET))


@pytest.mark.long
def test_all_stores_train_alike(clients):
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=4)
    results = [
        make_run(clients, store=store, local=local, drift=ALL).train(7, **QUIET)
        for store in ("device", "host", "disk")
    ]
    for other in results[1:]:
        assert_same(results[0], other, close=True)


@pytest.mark.long
def test_seeds_in_one_kernel_train_as_they_do_alone(clients):
    def runs():
        drift = [Drift(round=2, change="exchange", share=1), Drift(round=3, change="classes")]
        return [
            pfl.Run(pfl.FedAvg(), clients, MODEL, LOCAL, seed=seed, drift=drift) for seed in (0, 1)
        ]

    together = pfl.train_replicates(runs(), rounds=4)
    for one, run in zip(together, runs(), strict=True):
        assert_same(one, run.train(4, progress=False), close=True)


@pytest.mark.slow
def test_who_is_away_neither_trains_nor_is_scored(clients):
    drift = [
        Drift(round=2, change="arrive", clients=[0]),
        Drift(round=3, change="leave", clients=[3]),
    ]
    result = make_run(clients, pfl.Local(), drift=drift).train(5, progress=False, eval_every=1)
    is_scored = np.isfinite(result.results["loss_test"])
    assert is_scored[:, 0].tolist() == [False] * 3 + [True] * 3
    assert is_scored[:, 3].tolist() == [True] * 4 + [False] * 2
    assert is_scored[:, 1:3].all()
    trained = [row["rounds_trained"] for row in result.summary["per_client"]]
    assert trained == [3, 5, 5, 3]
    assert result.summary["per_client"][3]["n_test"] == 0


@pytest.mark.slow
def test_recovery_is_that_of_the_scores(clients):
    result = make_run(clients, pfl.Local(), drift=LABELS).train(9, **QUIET)
    (recovery,) = result.recovery()
    (entry,) = result.summary["drift"]
    rounds = result.results["rounds"].tolist()
    scores = result.results["accuracy_test"]
    assert {3, 8} <= set(rounds)  # evaluated before the change, and five rounds after
    np.testing.assert_array_equal(recovery.before, scores[rounds.index(3)])
    np.testing.assert_array_equal(recovery.after[5], scores[rounds.index(8)])
    assert recovery.clients.tolist() == entry["clients"] == [1, 2]
    assert np.isclose(entry["changed"]["before"], scores[rounds.index(3), 1:3].mean())
    with pytest.raises(pfl.ArgumentError, match="do not change"):
        make_run(clients, pfl.Local()).train(1, **QUIET).recovery()


def test_runs_neither_stop_nor_have_their_best_round_before_the_last_change(clients):
    seen = []

    def stop(rows):
        seen.append([row["round"] for row in rows])
        return len(rows) == 2

    result = make_run(clients, pfl.Local(), drift=LABELS, stop=stop).train(12, **QUIET)
    assert seen[0] == [4] and result.history[-1]["round"] == seen[-1][-1] == 6
    assert result.summary["best"]["round"] > 3


@pytest.mark.slow
def test_a_folder_tells_the_drift_and_refuses_another(clients, tmp_path):
    out = tmp_path / "run"
    result = make_run(clients, pfl.methods.KNNPer(), drift=LABELS)
    result = result.train(4, out=out, **QUIET)
    loaded = pfl.load(out, clients=clients)
    x, _ = clients.examples(1)
    np.testing.assert_allclose(loaded.predict(x), result.predict(x), rtol=1e-5, atol=1e-6)
    assert loaded.summary["drift"] == result.summary["drift"]
    assert pfl.load(out).recovery()[0].round == 3
    for other in ((), Drift(round=3, change="labels", clients=[1])):
        with pytest.raises(pfl.ArgumentError, match="drift"):
            make_run(clients, drift=other).train(5, out=out, resume=True, **QUIET)


def test_what_does_not_fit_is_refused(clients):
    privacy = pfl.Privacy(noise_multiplier=1.0, clip_norm=1.0)
    local = pfl.LocalTraining(optax.sgd(0.1), privacy=privacy)
    leave = Drift(round=1, change="leave")
    with pytest.raises(pfl.ArgumentError, match=r"drift.change=leave: .*with privacy: labels"):
        pfl.Run(pfl.FedAvg(), clients, MODEL, local, drift=leave)
    pfl.Run(pfl.FedAvg(), clients, MODEL, local, drift=LABELS)
    with pytest.raises(pfl.ArgumentError, match="drift"):
        pfl.Run(pfl.FedAvg(), clients, MODEL, LOCAL, drift=[3])


@pytest.mark.long
def test_stages_meet_a_drift(clients):
    """Attackers stay attackers, clocks count, and privacy of clients covers those who leave."""
    attack = pfl.Attack("sign_flip", attackers=0.25)
    run = make_run(clients, pfl.FedAvg(), drift=ALL, attack=attack, clock=pfl.Clock())
    result = run.train(7, **QUIET)
    is_attacker = run.experiment.federation.attacker
    assert not np.isfinite(result.results["loss_test"][:, is_attacker]).any()
    privacy = pfl.ClientPrivacy(noise_multiplier=1.0, clip_norm=1.0)
    private = make_run(clients, pfl.FedAvg(), drift=ALL, client_privacy=privacy, participation=0.5)
    plain = make_run(clients, pfl.FedAvg(), client_privacy=privacy, participation=0.5)
    spent = [each.train(6, **QUIET).summary["privacy"]["of_clients"] for each in (private, plain)]
    assert spent[0]["epsilon"] == spent[1]["epsilon"]


@pytest.mark.slow
def test_a_table_has_scores_around_a_change_and_the_recovery_time(clients):
    table = pfl.compare(
        ["local", "fedavg"],
        clients,
        MODEL,
        LOCAL,
        rounds=9,
        seeds=[0, 1],
        drift=LABELS,
        eval_every=1,
    )
    heads, body = table.columns()
    (entry,) = table.rows[0]["drift"]
    cells = dict(zip(heads, body[0], strict=True))
    assert cells["before labels at 3, %"] == f"{100 * entry['before']:.1f}"
    assert cells["5 after labels at 3, %"] == f"{100 * entry['after']['5']:.1f}"
    assert "rounds to recover from 3" in cells and len(entry["rounds"]) == 2
