"""When runs are evaluated by default."""

import types

import numpy as np
import pytest

import pfljax as pfl
from pfljax.contract.errors import ArgumentError
from pfljax.training import evaluating
from pfljax.training.loop import Schedule


@pytest.mark.parametrize(
    ("evaluated", "trained", "expected"),
    [
        (40_000, 1, 10),  # little work
        (40_001, 1e6, 10),
        (70_000, 21_000, 10),  # a tenth of the time
        (70_000, 20_999, 20),
        (70_000, 3_356, 100),  # 5,000 clients with MNIST, of which 100 train in a round
        (10**9, 50_000, 100_000),
        (70_000, 0, 10),
    ],
)
def test_evaluations_take_a_tenth_of_the_time(evaluated, trained, expected, monkeypatch):
    monkeypatch.setattr(evaluating, "examples_evaluated", lambda _: evaluated)
    monkeypatch.setattr(evaluating, "examples_trained", lambda _: trained)
    problem = types.SimpleNamespace(models=[types.SimpleNamespace(num_parameters=50_000)])
    assert evaluating.usual_interval(types.SimpleNamespace(problem=problem)) == expected


@pytest.fixture
def clients():
    """20 clients with 8 training examples and 2 test examples."""
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    return pfl.Federation.from_arrays(x, np.arange(200) % 2, client=np.arange(200) % 20)


def run_of(clients, method=None, **options):
    local = pfl.LocalTraining(learning_rate=0.1, batch_size=4, epochs=2)
    model = pfl.models.MLP(hidden=())
    return pfl.Run(method or pfl.Local(), clients, model, local, participation=0.1, **options)


def test_examples_are_counted_as_rounds_and_evaluations_use_them(clients):
    experiment = run_of(clients).experiment
    num_train = int(np.asarray(clients.train.size).sum())
    assert evaluating.examples_evaluated(experiment) == 200
    # each in two epochs, and 2 of 20 clients a round
    assert evaluating.examples_trained(experiment) == pytest.approx(2 * num_train / 10, rel=0.2)
    scored = run_of(clients, eval_clients=5).experiment
    assert evaluating.examples_evaluated(scored) == 50


def test_the_plan_says_a_larger_interval_and_what_is_requested_holds(clients, monkeypatch, said):
    monkeypatch.setattr(evaluating, "LITTLE", 0)
    # 200 examples in an evaluation, about 32 x 3 in a round
    result = run_of(clients).train(rounds=25, progress=False)
    assert [row["round"] for row in result.history] == [0, 20, 25]
    assert any("every 20 rounds instead of 10" in line for line in said)
    said.clear()
    result = run_of(clients).train(rounds=12, eval_every=4, progress=False)
    assert [row["round"] for row in result.history] == [0, 4, 8, 12]
    assert not any("instead of 10" in line for line in said)


def test_a_run_that_goes_on_is_evaluated_after_the_same_rounds(clients, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluating, "LITTLE", 0)
    run_of(clients).train(rounds=20, out=tmp_path, progress=False)
    resumed = run_of(clients).train(rounds=45, out=tmp_path, resume=True, progress=False)
    assert [row["round"] for row in resumed.history] == [0, 20, 40, 45]


def test_runs_of_a_comparison_are_evaluated_after_the_same_rounds(clients, monkeypatch, tmp_path):
    """The largest number of rounds that one of them needs."""
    monkeypatch.setattr(evaluating, "LITTLE", 0)
    needed = {"local": 20, "fedavg": 50}
    monkeypatch.setattr(
        evaluating, "usual_interval", lambda experiment: needed[experiment.method.info.name]
    )
    pfl.compare(
        [pfl.Local(), pfl.FedAvg()],
        clients,
        pfl.models.MLP(hidden=()),
        pfl.LocalTraining(learning_rate=0.1),
        rounds=60,
        seeds=[0, 1],
        out=tmp_path,
    )
    for path in sorted(tmp_path.glob("*/seed-*")):
        assert np.load(path / "results.npz")["rounds"].tolist() == [0, 50, 60]


def test_small_networks_are_evaluated_every_ten_rounds():
    for name in ("digits", "synthetic"):
        federation = getattr(pfl.data, name)(num_clients=20)
        run = pfl.Run(pfl.FedAvg(), federation, pfl.models.MLP(), participation=0.1)
        assert evaluating.interval("auto", [run.experiment]) == 10


@pytest.mark.parametrize("every", [0, "0", "often", 1.5])
def test_other_intervals_are_refused_in_a_line(every, clients):
    with pytest.raises(ArgumentError, match=r"^eval_every=.*accepted: a number of rounds, 1 or"):
        run_of(clients).train(rounds=1, eval_every=every)


def test_the_default_is_ten_rounds_or_more():
    assert Schedule().eval_every == "auto" and evaluating.USUAL == 10
