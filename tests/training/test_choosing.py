"""plan=auto on an accelerator: CPU devices in its place, and rows in place of compiled programs."""

import dataclasses
import json
import types

import jax
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.contract.types import ClientData
from pfljax.exchange import targets
from pfljax.exchange.targets import Chip, Target
from pfljax.stores import estimating
from pfljax.stores.estimating import Row
from pfljax.training import choosing
from pfljax.training.compiling import compile_to_fit

CHIP = Chip(1 << 30, 1e12, 1e11, 1e10)


def experiment(method, traced=False, **execution):
    """A run of 20 clients; its program is described by the method's name and knobs, or `traced`."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(160, 5)).astype(np.float32), rng.integers(0, 3, 160)
    federation = pfl.Federation.from_arrays(x, y, client=np.repeat(np.arange(20), 8))
    options = {"execution": pfl.Execution(devices=2, **execution)}
    run = pfl.Run(method, federation, pfl.models.MLP(hidden=(4,)), pfl.LocalTraining(optax.sgd(0.1)), **options)
    if traced:
        return run.experiment
    return dataclasses.replace(run.experiment, programs=lambda planned: {"method": repr(method)})


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The chunks and exchanges that are compiled; of them, only those in `fits` fit, in so many milliseconds."""
    monkeypatch.setenv("PFLJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(choosing, "target_of", lambda plan: Target("here", list(plan.mesh.devices.flat), CHIP, {}))
    found = types.SimpleNamespace(choices=[], fits={})

    def prepare(experiment, target, chunk, exchange):
        found.choices.append((chunk, exchange))
        time = found.fits.get((chunk, exchange))
        return Row("", chunk, exchange, time is not None, milliseconds=time), None

    monkeypatch.setattr(estimating, "prepare", prepare)
    return found


@pytest.mark.slow
def test_the_fastest_that_fits_is_chosen_once(asked):
    asked.fits = {(0, "gather"): 3.0, (1, "ring"): 1.0, (8, "gather"): 2.0}
    run = experiment(pfl.FedeRiCo(neighbors=1), traced=True)
    plan = choosing.chosen(run)
    assert (plan.chunk, plan.peers) == (1, "ring")
    assert set(asked.choices) == {(chunk, exchange) for chunk in (0, 1, 8) for exchange in ("gather", "ring")}
    asked.choices.clear()
    assert choosing.chosen(experiment(pfl.FedeRiCo(neighbors=1), traced=True)) == plan and not asked.choices
    choosing.chosen(experiment(pfl.FedeRiCo(neighbors=2), traced=True))  # another program
    assert asked.choices


def test_what_the_user_sets_stays(asked):
    asked.fits = {(0, "gather"): 3.0, (1, "ring"): 1.0, (5, "gather"): 4.0, (5, "ring"): 2.0, (0, "ring"): 5.0}
    chosen = lambda **options: choosing.chosen(experiment(pfl.FedeRiCo(neighbors=1), **options))
    plan = chosen(plan="chunk", chunk=5)
    assert (plan.chunk, plan.peers) == (5, "ring") and set(asked.choices) == {(5, "gather"), (5, "ring")}
    assert (chosen(exchange="gather").chunk, chosen(exchange="gather").peers) == (0, "gather")
    asked.choices.clear()
    assert chosen(plan="chunk", chunk=5, exchange="gather").chunk == 5 and not asked.choices


def test_gathering_leaves_the_ring_for_when_memory_is_too_small(asked):
    asked.fits = {(8, "gather"): 1.0}
    plan = choosing.chosen(experiment(pfl.FedeRiCo(neighbors=1)))
    assert (plan.chunk, plan.peers) == (8, "auto")


def test_the_choice_is_kept_for_the_same_program(asked):
    asked.fits = {(8, "gather"): 1.0, (0, "ring"): 2.0}
    plan = choosing.chosen(experiment(pfl.FedeRiCo(neighbors=1)))
    asked.choices.clear()
    assert choosing.chosen(experiment(pfl.FedeRiCo(neighbors=1))) == plan and not asked.choices
    choosing.chosen(experiment(pfl.FedeRiCo(neighbors=2)))
    assert asked.choices


def test_nothing_that_fits_leaves_the_plan_and_is_not_kept(asked, tmp_path):
    run = experiment(pfl.Local())
    assert choosing.chosen(run) == run.problem.plan and not list(tmp_path.rglob("*.json"))


def test_a_damaged_or_unfit_choice_is_made_again(asked, tmp_path):
    asked.fits = {(8, ""): 1.0}
    run = experiment(pfl.Local())
    assert choosing.chosen(run).chunk == 8
    (file,) = tmp_path.rglob("*.json")
    for text in ("{", "[]", json.dumps({"chunk": -3, "exchange": ""})):
        file.write_text(text)
        assert choosing.chosen(run).chunk == 8


def test_a_run_is_compiled_with_the_choice(asked):
    asked.fits = {(8, ""): 1.0}
    run = experiment(pfl.Local())
    store, plan = estimating.store_of(run), run.problem.plan
    put = lambda part: store.put(plan, estimating.ONE, [part], run.federation.num_clients)
    data = ClientData(put(run.federation.train), put(run.federation.validation))
    assert compile_to_fit(run, data, 1).plan.chunk == 8


@pytest.mark.parametrize(
    ("platform", "kind", "chip"),
    [
        ("tpu", "TPU v5 lite", targets.TPUS["v5e"]),
        ("tpu", "TPU v5p", targets.TPUS["v5p"]),
        ("tpu", "TPU v9", None),
        ("gpu", "NVIDIA H100 80GB HBM3", targets.GPUS["h100"]),
        ("gpu", "NVIDIA A100-SXM4-40GB", targets.GPUS["a100"]),
        ("gpu", "NVIDIA GeForce RTX 3090", None),
        ("cpu", "cpu", None),
    ],
)
def test_only_known_accelerators_are_estimated(platform, kind, chip):
    assert targets.chip_of(types.SimpleNamespace(platform=platform, device_kind=kind)) == chip


def test_cpus_keep_their_plan():
    run = experiment(pfl.FedeRiCo(neighbors=1))
    assert run.problem.plan.auto and choosing.chosen(run) is run.problem.plan
    assert not dataclasses.replace(run.problem.plan, auto=False).auto and jax.devices()[0].platform == "cpu"
