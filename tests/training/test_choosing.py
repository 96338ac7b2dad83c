"""plan=auto on an accelerator: CPU devices in its place, and given times in place of rounds."""

import dataclasses
import json
import types

import jax
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.contract.errors import RunError
from pfljax.contract.types import ClientData
from pfljax.run.replicates import ONE
from pfljax.stores.registry import store_of
from pfljax.training import choosing
from pfljax.training.compiling import compile_to_fit


def experiment(method, traced=False, **execution):
    """A run of 20 clients; its program is described by the method's name and hyperparameters, or `traced`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 5)).astype(np.float32)
    y = rng.integers(0, 3, 160)
    federation = pfl.Federation.from_arrays(x, y, client=np.repeat(np.arange(20), 8))
    run = pfl.Run(
        method,
        federation,
        pfl.models.MLP(hidden=(4,)),
        pfl.LocalTraining(optax.sgd(0.1)),
        execution=pfl.Execution(devices=2, **execution),
    )
    if traced:
        return run.experiment
    return dataclasses.replace(run.experiment, programs=lambda planned: {"method": repr(method)})


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The chunks and exchanges that are tried; of them, only those in `seconds` fit, and take so long."""
    monkeypatch.setenv("PFLJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(choosing, "is_measured", lambda plan: True)
    tried = types.SimpleNamespace(choices=[], seconds={})

    def played_seconds(plan):
        choice = (plan.chunk, plan.peers)
        tried.choices.append(choice)
        return tried.seconds.get(choice)

    tried.chosen = lambda run: choosing.chosen(run, played_seconds)
    return tried


@pytest.mark.slow
def test_the_fastest_that_fits_is_chosen_once(measured):
    measured.seconds = {(0, "auto"): 3.0, (1, "ring"): 1.0, (8, "auto"): 2.0}
    plan = measured.chosen(experiment(pfl.FedeRiCo(neighbors=1), traced=True))
    assert (plan.chunk, plan.peers) == (1, "ring")
    tried = {(chunk, peers) for chunk in (0, 1, 8) for peers in ("auto", "ring")}
    assert set(measured.choices) == tried
    measured.choices.clear()
    again = measured.chosen(experiment(pfl.FedeRiCo(neighbors=1), traced=True))
    assert again == plan and not measured.choices
    measured.chosen(experiment(pfl.FedeRiCo(neighbors=2), traced=True))  # another program
    assert measured.choices


def test_what_the_user_sets_stays(measured):
    measured.seconds = {(5, "auto"): 4.0, (5, "ring"): 2.0, (0, "gather"): 3.0, (0, "ring"): 5.0}
    method = pfl.FedeRiCo(neighbors=1)
    plan = measured.chosen(experiment(method, plan="chunk", chunk=5))
    assert (plan.chunk, plan.peers) == (5, "ring")
    assert set(measured.choices) == {(5, "auto"), (5, "ring")}
    plan = measured.chosen(experiment(method, exchange="gather"))
    assert (plan.chunk, plan.peers) == (0, "gather")
    measured.choices.clear()
    plan = measured.chosen(experiment(method, plan="chunk", chunk=5, exchange="gather"))
    assert plan.chunk == 5 and not measured.choices


def test_gathering_leaves_the_ring_for_when_memory_is_too_small(measured):
    measured.seconds = {(8, "auto"): 1.0}
    plan = measured.chosen(experiment(pfl.FedeRiCo(neighbors=1)))
    assert (plan.chunk, plan.peers) == (8, "auto")


def test_nothing_that_fits_leaves_the_plan_and_is_not_kept(measured, tmp_path):
    run = experiment(pfl.Local())
    assert measured.chosen(run) == run.problem.plan and not list(tmp_path.rglob("*.json"))


def test_a_plan_that_cannot_be_compiled_is_passed_over(monkeypatch, measured):
    def played_seconds(plan):
        if plan.chunk != 8:
            raise RunError("the compiler refuses it")
        return 1.0

    assert choosing.chosen(experiment(pfl.Local()), played_seconds).chunk == 8


def test_a_damaged_or_unfit_choice_is_made_again(measured, tmp_path):
    measured.seconds = {(8, "auto"): 1.0}
    run = experiment(pfl.Local())
    assert measured.chosen(run).chunk == 8
    (file,) = tmp_path.rglob("*.json")
    for text in ("{", "[]", json.dumps({"chunk": -3, "exchange": ""})):
        file.write_text(text)
        assert measured.chosen(run).chunk == 8


@pytest.mark.slow
def test_a_run_plays_rounds_of_each_plan_and_is_compiled_with_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PFLJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(choosing, "is_measured", lambda plan: True)
    run = experiment(pfl.Local())
    store = store_of(run)

    def put(part):
        return store.put(run.problem.plan, ONE, [part], run.federation.num_clients)

    clients = ClientData(put(run.federation.train), put(run.federation.validation))
    compiled = compile_to_fit(run, clients, 1)
    (file,) = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["chunk"] == compiled.plan.chunk


def test_cpus_keep_their_plan():
    run = experiment(pfl.FedeRiCo(neighbors=1))

    def played_seconds(plan):
        raise AssertionError("nothing is played")

    assert jax.devices()[0].platform == "cpu" and run.problem.plan.auto
    assert choosing.chosen(run, played_seconds) is run.problem.plan
