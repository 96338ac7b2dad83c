"""The planned number of rounds: what depends on it, and how runs go on."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
import toys
from runs import figures

import pfljax as pfl
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.folder import fingerprint
from pfljax.settings.method import METHODS
from pfljax.training.loop import Schedule, Trainer

# A schedule over the rounds, or traffic that is spread over them. All others read no planned number.
DEPENDENT = ("floco", "fedkd", "fedcac", "apple", "fedavg_data")
FAST = ("fedavg", "floco", "apple")
HYPERPARAMETERS = {
    "hilora": {"root_rounds": 1, "cluster_rounds": 1}
}  # so that all stages are played
FEW = 2
MANY = 5
EVERY_ROUND = Schedule(eval_every=1, checkpoint_every=1)
LOCAL = pfl.LocalTraining(optax.sgd, 0.1)
MODEL = pfl.models.MLP(hidden=(4,))
ONE_DEVICE = pfl.Execution("map", devices=1)


def trainer_of(name, **options):
    """A trainer of five clients, four of them a round; newcomers are scored after training."""
    federation = toys.make_federation((4, 3, 5, 2, 4))
    network: dict[str, Any] = toys.network(name)
    problem = toys.make_problem(federation, optax.adam(0.05), cohort=4, batch_size=2, **network)
    unseen = toys.make_federation((3, 4), seed=8)
    made = toys.make_experiment(
        name,
        problem,
        federation,
        hyperparameters=HYPERPARAMETERS.get(name),
        unseen=unseen,
        seed=1,
        **options,
    )
    return Trainer([fingerprint.identified(made)])


def assert_same(outcome, other):
    """Two outcomes have the same state, bit by bit, rows and scores of newcomers."""
    assert toys.same_trees(outcome.whole_state(), other.whole_state())
    assert figures(outcome.summary) == figures(other.summary)
    assert [figures(row) for row in outcome.history.rows] == [
        figures(row) for row in other.history.rows
    ]


@toys.each_method(fast=FAST, slow=(*DEPENDENT, *toys.KINDS), grouped=True)
def test_a_run_that_goes_on_equals_one_trained_at_once_or_is_refused(name):
    [at_once] = trainer_of(name).train(MANY, EVERY_ROUND)
    trainer = trainer_of(name)
    trainer.train(FEW, EVERY_ROUND)
    if name in DEPENDENT:
        before = jax.device_get(trainer.state)
        text = (
            rf"^rounds: {name} depends on the planned number of rounds, here 2; .*planned_rounds=5$"
        )
        with pytest.raises(pfl.ArgumentError, match=text):
            trainer.train(MANY, EVERY_ROUND)
        assert toys.same_trees(before, jax.device_get(trainer.state))
        trainer = trainer_of(name, planned_rounds=MANY)
        trainer.train(FEW, EVERY_ROUND)
    [extended] = trainer.train(MANY, EVERY_ROUND)
    assert_same(at_once, extended)


# part of `Paced` -> (planned number of rounds) -> factor; parts that are not there read no number
PACE = {}


def paced(part, problem, models):
    """The models, shrunk by the factor of a part."""
    return tree.scale(models, PACE[part](problem.rounds)) if part in PACE else models


@pfl.author.method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class Paced:
    """Paced (Me, 2026): FedAvg, whose models shrink by factors of the planned number of rounds."""

    def build(self, problem):
        plain = averaging(problem)

        def server_update(key, state, aggregate):
            state, metrics = plain.server_update(key, state, aggregate)
            return state.with_models(paced("server_update", problem, state.models)), metrics

        def predict(context, models, row, data):
            return pfl.author.Prediction(paced("predict", problem, models))

        def adapt(context, models, data):
            return pfl.author.Prediction(paced("adapt", problem, models))

        return dataclasses.replace(plain, server_update=server_update, predict=predict, adapt=adapt)


METHODS.pop("paced")  # it is not for tests of all methods


@pytest.fixture(autouse=True)
def pace(monkeypatch):
    """`PACE` of a test."""
    monkeypatch.setattr(f"{__name__}.PACE", {})
    return PACE


@pytest.fixture(scope="module")
def clients():
    return toys.make_federation((4, 3, 5))


def run_of(clients, method=None, **options):
    unseen = toys.make_federation((3, 4), seed=8)
    return pfl.Run(
        method or Paced(), clients, MODEL, LOCAL, unseen=unseen, execution=ONE_DEVICE, **options
    )


def compared(clients, methods, rounds, out, **options):
    return pfl.compare(
        methods, clients, MODEL, LOCAL, rounds=rounds, out=out, execution=ONE_DEVICE, **options
    )


def contents(folder):
    """All files of a folder and what they contain."""
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.slow
def test_a_run_in_a_folder_goes_on_if_it_was_planned_for_all_rounds(clients, tmp_path):
    at_once = run_of(clients, pfl.methods.Floco()).train(4, eval_every=1)
    run_of(clients, pfl.methods.Floco(), planned_rounds=4).train(2, out=tmp_path, eval_every=1)
    extended = run_of(clients, pfl.methods.Floco()).train(
        4, out=tmp_path, eval_every=1, resume=True
    )
    assert toys.same_trees(at_once.state, extended.state)
    assert figures(at_once.summary) == figures(extended.summary)


def test_a_run_in_a_folder_is_not_extended_beyond_what_was_planned(clients, tmp_path):
    run_of(clients, pfl.methods.Floco()).train(2, out=tmp_path)
    before = contents(tmp_path)
    text = "was planned for 2 rounds, on which floco depends; now 4; resume from scratch to start over, or choose"
    with pytest.raises(pfl.ArgumentError, match=rf"^planned_rounds: .* {text} another folder$"):
        run_of(clients, pfl.methods.Floco()).train(4, out=tmp_path, resume=True)
    with pytest.raises(
        pfl.ArgumentError,
        match=r"for 2 rounds, .*; now 9; planned_rounds=2 goes on with it; resume",
    ):
        run_of(clients, pfl.methods.Floco(), planned_rounds=9).train(2, out=tmp_path, resume=True)
    assert contents(tmp_path) == before
    again = run_of(clients, pfl.methods.Floco()).train(4, out=tmp_path, resume="from_scratch")
    assert toys.same_trees(again.state, run_of(clients, pfl.methods.Floco()).train(4).state)


def test_a_plan_has_at_least_the_rounds_that_are_trained(clients):
    with pytest.raises(
        pfl.ArgumentError, match=r"^planned_rounds=3: accepted: 4, the number of rounds that are"
    ):
        run_of(clients, planned_rounds=3).train(4)


def test_a_run_that_was_interrupted_keeps_its_plan(clients):
    run = run_of(clients, pfl.methods.Floco())

    def interrupt(evaluation):
        if evaluation.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train(4, eval_every=1, tracker=interrupt)
    run.train(1, eval_every=1)
    extended = run.train(2, eval_every=1)
    assert toys.same_trees(
        extended.state, run_of(clients, pfl.methods.Floco()).train(4, eval_every=1).state
    )


def test_newcomers_are_adapted_for_the_rounds_that_were_trained_whatever_was_planned(clients, pace):
    pace["adapt"] = lambda rounds: 1 / rounds
    at_once = run_of(clients).train(3)
    planned = run_of(clients, planned_rounds=9).train(3)
    run = run_of(clients)
    run.train(1)
    extended = run.train(2)
    expected = at_once.summary["unseen"]["loss"]
    assert planned.summary["unseen"]["loss"] == extended.summary["unseen"]["loss"] == expected
    assert run_of(clients).train(2).summary["unseen"]["loss"] != expected


@pytest.mark.parametrize("part", ["server_update", "predict"])
def test_a_method_of_one_s_own_that_reads_the_number_is_not_extended(part, clients, pace):
    pace[part] = lambda rounds: 0.5 if rounds > 3 else 1.0
    run = run_of(clients)
    run.train(2)
    with pytest.raises(
        pfl.ArgumentError,
        match=r"^rounds: paced depends on .*, here 2; accepted: up to round 2, or",
    ):
        run.train(2)


def test_a_number_that_is_read_while_a_method_is_built_counts(clients, monkeypatch):
    build = Paced.build

    def reads(self, problem):
        # also of a problem that is made from the method's
        assert problem.with_epochs(2).rounds_of_a_client > 0
        return build(self, problem)

    assert not run_of(clients).experiment.depends_on_rounds
    monkeypatch.setattr(Paced, "build", reads)
    assert run_of(clients).experiment.depends_on_rounds


def below_20(factor):
    return lambda rounds: factor if rounds < 20 else 1.0


def above_150(factor):
    return lambda rounds: factor if rounds > 150 else 1.0


def rounded(factor):
    return lambda rounds: 1 / max(round(rounds * factor), 1)


EDITS = {"below 20": (below_20, 4), "above 150": (above_150, 200), "a share": (rounded, 10)}


@pytest.mark.parametrize("part", ["server_update", "adapt"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_depends_on_the_number_is_noticed(edit, part, clients, pace, tmp_path):
    factor_of, planned = EDITS[edit]
    pace[part] = factor_of(0.5)
    run_of(clients, planned_rounds=planned).train(1, out=tmp_path)
    pace[part] = factor_of(0.7)
    with pytest.raises(
        pfl.ArgumentError, match=f"by another program; what differs: {part} of Paced; "
    ):
        run_of(clients, planned_rounds=planned).train(2, out=tmp_path, resume=True)
    pace[part] = factor_of(0.5)
    run_of(clients, planned_rounds=planned).train(2, out=tmp_path, resume=True)


def test_an_edit_that_changes_only_longer_runs_is_none(clients, pace, tmp_path):
    pace["server_update"] = above_150(0.5)
    run_of(clients, planned_rounds=4).train(1, out=tmp_path)
    pace["server_update"] = above_150(0.7)
    run_of(clients, planned_rounds=4).train(2, out=tmp_path, resume=True)


def test_cells_that_were_planned_for_fewer_rounds_are_not_in_a_table_of_more(clients, tmp_path):
    compared(clients, [pfl.FedAvg(), pfl.methods.Floco()], 2, tmp_path)
    before = contents(tmp_path)
    text = (
        r"^rerun: .*floco/seed-0 was planned for 2 rounds, on which floco depends; now 4; "
        r"accepted: changed, to train"
    )
    with pytest.raises(pfl.ArgumentError, match=text):
        compared(clients, [pfl.FedAvg(), pfl.methods.Floco()], 4, tmp_path)
    assert contents(tmp_path) == before
    table = compared(clients, [pfl.FedAvg(), pfl.methods.Floco()], 4, tmp_path, rerun="changed")
    fresh = compared(clients, [pfl.FedAvg(), pfl.methods.Floco()], 4, tmp_path / "fresh")
    assert [row["score_mean"] for row in table.rows] == [row["score_mean"] for row in fresh.rows]
    assert [row["curve_mean"][-1] for row in table.rows] == [
        row["curve_mean"][-1] for row in fresh.rows
    ]


@pytest.mark.slow
def test_cells_that_were_planned_for_all_rounds_go_on_in_a_table(clients, tmp_path):
    compared(clients, [pfl.FedAvg(), pfl.methods.Floco()], 2, tmp_path, planned_rounds=4)
    extended = compared(clients, [pfl.FedAvg(), pfl.methods.Floco()], 4, tmp_path)
    fresh = compared(clients, [pfl.FedAvg(), pfl.methods.Floco()], 4, tmp_path / "fresh")
    assert [row["score_mean"] for row in extended.rows] == [row["score_mean"] for row in fresh.rows]


def test_an_edit_that_depends_on_the_number_is_noticed_in_a_table(clients, pace, tmp_path):
    pace["server_update"] = below_20(0.5)
    compared(clients, [Paced()], 2, tmp_path)
    pace["server_update"] = below_20(0.7)
    with pytest.raises(
        pfl.ArgumentError,
        match=r"^rerun: .*what differs: server_update of Paced; accepted: changed",
    ):
        compared(clients, [Paced()], 2, tmp_path)


def test_a_loaded_run_predicts_by_its_plan(clients, pace, tmp_path):
    pace["predict"] = lambda rounds: 1 / rounds
    result = run_of(clients, planned_rounds=9).train(2, out=tmp_path)
    loaded = pfl.load(tmp_path, method=Paced(), clients=clients, model=MODEL, local=LOCAL)
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(loaded.predict(x), result.predict(x))
    shorter = run_of(clients).train(2)
    assert np.abs(shorter.predict(x) - result.predict(x)).max() > 1e-3


def test_runs_with_other_plans_share_no_kernel(clients):
    runs = [run_of(clients, planned_rounds=planned) for planned in (4, 5)]
    with pytest.raises(pfl.ArgumentError, match="differs from number 0 in planned_rounds"):
        pfl.train_replicates(runs, 2)


@pytest.mark.slow
def test_a_tuning_s_scores_are_those_of_its_number_of_rounds(tmp_path, pace):
    validated = toys.make_federation((4, 3, 5), validation_size=3)
    options = {
        "rounds": 2,
        "hyperparameters": {},
        "learning_rates": (0.1, 0.2),
        "out": tmp_path,
        "execution": ONE_DEVICE,
        "widen": 0,
    }
    pace["server_update"] = lambda rounds: 0.5 if rounds == 2 else 1.0
    first = pfl.tune(Paced(), validated, MODEL, LOCAL, **options)
    assert pfl.tune(Paced(), validated, MODEL, LOCAL, **options).scores == first.scores
    pace["server_update"] = lambda rounds: 0.7 if rounds == 2 else 1.0
    with pytest.raises(pfl.ArgumentError, match="has scores of something else"):
        pfl.tune(Paced(), validated, MODEL, LOCAL, **options)


@pytest.mark.slow
def test_the_debugging_plan_goes_on_only_by_a_plan_if_its_method_cannot_be_traced(
    clients, monkeypatch
):
    build = Paced.build

    def shown(self, problem):
        plain = build(self, problem)

        def server_update(key, state, aggregate):
            assert int(state.round) >= 0  # a value, which a trace does not have
            return plain.server_update(key, state, aggregate)

        return dataclasses.replace(plain, server_update=server_update)

    monkeypatch.setattr(Paced, "build", shown)
    in_python = pfl.Execution("python")
    run = pfl.Run(Paced(), clients, MODEL, LOCAL, execution=in_python)
    run.train(1)
    with pytest.raises(pfl.ArgumentError, match=r"planned_rounds=2$"):
        run.train(1)
    planned = pfl.Run(Paced(), clients, MODEL, LOCAL, planned_rounds=2, execution=in_python)
    planned.train(1)
    assert planned.train(1).history[-1]["round"] == 2
