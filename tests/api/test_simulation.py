"""Single rounds: a simulation against a run of the same method, and the plan for debugging."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import toys

import pfljax as pfl
from pfljax.algorithms.common import averaging

MODEL = pfl.models.MLP(hidden=())
LOCAL = pfl.LocalTraining(optax.sgd(0.1), batch_size=3)


@pytest.fixture(scope="module")
def clients():
    return toys.make_federation([5, 7, 4, 6])


@pytest.mark.slow
def test_steps_play_the_rounds_of_a_run(clients):
    run = pfl.Run(pfl.Ditto(), clients, MODEL, LOCAL, seed=3).train(
        rounds=3, eval_every=3, progress=False
    )
    sim = pfl.Simulation(pfl.Ditto(), clients, MODEL, LOCAL, rounds=3)
    init_key, rounds_key = (jax.random.fold_in(jax.random.key(3), purpose) for purpose in (0, 1))
    state = sim.init(init_key)
    for number in range(3):
        assert state.round == number
        state, info = sim.step(rounds_key, state)
    toys.assert_trees_close(state, run.state, rtol=1e-5, atol=1e-6)
    assert float(info.train_loss) == pytest.approx(run.history[-1]["train_loss"], rel=1e-5)
    np.testing.assert_allclose(
        sim.evaluate(state)["test"]["accuracy"], run.per_client_accuracy, atol=1e-6
    )


@pytest.mark.long
def test_steps_can_be_scanned(clients):
    sim = pfl.Simulation(pfl.FedAvg(), clients, MODEL, LOCAL)
    start = sim.init(jax.random.key(0))

    def step(state, _):
        return sim.step(jax.random.key(1), state)

    scanned, info = jax.jit(lambda state: jax.lax.scan(step, state, length=2))(start)
    one_by_one = sim.step(jax.random.key(1), sim.step(jax.random.key(1), start)[0])[0]
    toys.assert_trees_close(scanned, one_by_one, rtol=1e-5, atol=1e-6)
    assert info.train_loss.shape == (2,)


@pytest.mark.slow
def test_the_debugging_plan_shows_values_and_gives_the_same_figures(capsys):
    clients = toys.make_federation([2, 3])  # steps in Python take long

    @pfl.author.method(keeps="nothing", travels="the global model, both ways")
    @dataclasses.dataclass(frozen=True)
    class Shown:
        """FedAvg that prints each client's loss."""

        def build(self, problem):
            def train(context, models, row, data):
                trained = problem.fit(context, models, data.train)
                print(
                    f"client {int(context.client)} of round {int(context.round)}: {float(trained.losses[0]):.6f}"
                )
                return trained

            return averaging(problem, train=train, ledger=pfl.author.Ledger(gradients=1))

    plans = {name: pfl.Execution(plan=name) for name in ("python", "map")}
    shown = pfl.Run(Shown(), clients, MODEL, LOCAL, execution=plans["python"])
    result = shown.train(rounds=2, eval_every=1, progress=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"client {k} of round {r}" for r in range(2) for k in range(2)
    ]
    losses = np.array([float(line.split(": ")[1]) for line in lines]).reshape(2, 2)
    expected = pfl.Run(pfl.FedAvg(), clients, MODEL, LOCAL, execution=plans["map"])
    expected = expected.train(rounds=2, eval_every=1, progress=False)
    for row, of_round, size in zip(
        expected.history[1:], losses, [clients.train.size] * 2, strict=True
    ):
        assert row["train_loss"] == pytest.approx(np.average(of_round, weights=size), abs=2e-6)
    np.testing.assert_allclose(
        result.results["loss_test"], expected.results["loss_test"], rtol=1e-5
    )
    assert [row["bytes_up"] for row in result.history] == [
        row["bytes_up"] for row in expected.history
    ]


def test_other_stores_are_refused(clients):
    with pytest.raises(
        pfl.ArgumentError, match=r"^client_store=host: accepted for a Simulation: device$"
    ):
        pfl.Simulation(
            pfl.FedAvg(), clients, MODEL, LOCAL, execution=pfl.Execution(client_store="host")
        )
    with pytest.raises(
        pfl.ArgumentError, match=r"^client_store=disk: accepted with plan=python: device$"
    ):
        pfl.Run(
            pfl.FedAvg(),
            clients,
            MODEL,
            LOCAL,
            execution=pfl.Execution(plan="python", client_store="disk"),
        )
