"""Small runs with folders: how tests train them, share what they compile, and compare what they leave behind."""

from pathlib import Path

import numpy as np
import optax
import pytest
import toys

from pfljax.algorithms import METHODS
from pfljax.folder import files
from pfljax.run.replicates import ONE
from pfljax.stores.registry import STORES
from pfljax.training import loop
from pfljax.training.loop import Schedule

ROUNDS = 6
SIZES = (4, 3, 5, 2, 4)
TESTS = Path(__file__).parents[1]


EVERY_ROUND = Schedule(eval_every=1, checkpoint_every=2)


def make_experiment(
    name="federico", *, federation=None, optimizer=None, seed=1, unseen=True, **fields
):
    """Five clients, four of them a round, in mini-batches, on two devices."""
    federation = federation or toys.make_federation(
        SIZES, validation_size=3 * METHODS[name].info.validates
    )
    training = {"batch_size": 2} | toys.required(name)
    problem = toys.make_problem(federation, optimizer or optax.adam(0.05), cohort=4, **training)
    usual = {
        "unseen": toys.make_federation((3, 4), seed=8) if unseen else None,
        "seed": seed,
        "config": {"settings": {"method": name, "learning_rate": 0.05}},
    }
    return toys.make_experiment(name, problem, federation, **usual | fields)


def train(experiment, out, rounds=ROUNDS, **options):
    return toys.run(experiment, rounds, out=out, schedule=EVERY_ROUND, **options)


@pytest.fixture
def compile_once(monkeypatch):
    """Runs on the devices share what they compile, by method and shapes; gives the true `score_unseen`."""
    compile_to_fit = loop.compile_to_fit
    make_evaluation = STORES["device"].make_evaluation
    score_unseen = loop.scoring.score_unseen

    def shared(kind, experiment, make, *sizes):
        if experiment.client_store != "device":
            return make()
        federation = experiment.federation
        key = (
            kind,
            experiment.name,
            experiment.checked,
            federation.task,
            federation.train.y.shape,
            *sizes,
        )
        if key not in SHARED:
            SHARED[key] = make()
        return SHARED[key]

    def rounds(experiment, clients, length, replicates=ONE):
        def make():
            return compile_to_fit(experiment, clients, length, replicates)

        return shared("rounds", experiment, make, length, replicates.num)

    def evaluation(experiments, compiled, replicates):
        def make():
            return make_evaluation(experiments, compiled, replicates)

        return shared("evaluation", experiments[0], make, replicates.num)

    monkeypatch.setattr(loop, "compile_to_fit", rounds)
    monkeypatch.setattr(STORES["device"], "make_evaluation", evaluation)
    monkeypatch.setattr(loop.scoring, "score_unseen", lambda *args: {})
    return score_unseen


SHARED: dict = {}


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """An uninterrupted run of each method, for all tests of a worker: its folder and result. Read it only."""
    runs = {}

    def get(name):
        if name not in runs:
            out = tmp_path_factory.mktemp("whole") / name
            runs[name] = out, train(make_experiment(name), out)
        return runs[name]

    return get


def figures(summary):
    """The summary without what a clock says."""
    skip = ("seconds", "seconds_per_round", "compile_seconds", "peak_memory_bytes", "plan")
    if isinstance(summary, dict):
        return {key: figures(value) for key, value in summary.items() if key not in skip}
    return summary


def assert_same_runs(one, other):
    """All figures that two runs left behind are equal."""
    a, b = (files.read_json(out / "summary.json") for out in (one, other))
    assert figures(a) == figures(b)
    for name in ("results.npz", "collaboration.npz"):
        a, b = (files.read_npz(out / name) for out in (one, other))
        assert set(a) == set(b)
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)
    a, b = (
        [figures(row) for row in files.read_jsonl(out / "metrics.jsonl")] for out in (one, other)
    )
    assert a == b


def assert_same_predictions(one, other):
    """All clients of two outcomes predict with the same models, weights and inputs."""

    def as_it_is(algorithm):
        return lambda prediction, _: prediction

    toys.assert_trees_close(
        *(outcome.serve(as_it_is, range(len(SIZES))) for outcome in (one, other))
    )
