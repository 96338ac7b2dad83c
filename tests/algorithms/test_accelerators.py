"""Methods compiled for a TPU v5e 2x2 that is not here: what moves between chips, and what they need.

Budgets are bytes of temporaries on one chip, a quarter above what was read when they were recorded; whoever raises one
says why. They hold for one version of libtpu: the same code once took about half, perhaps with another. Methods without
a budget only have to compile. "moved" lists what a server that compares its clients' models moves besides sums. Without
libtpu the tests are skipped.
"""

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import jax
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import pfljax as pfl
from pfljax.exchange import targets
from pfljax.stores.planning import prepare

BUDGETS = json.loads(Path(__file__).with_name("accelerators.json").read_text())
SUMS = {"all-reduce", "reduce-scatter"}
LIBTPU = "0.0.50.1"
SETTINGS = {"q_ffl": {"lipschitz": 100.0}}  # optax hides the learning rate from which it would follow
REPORTS = 128  # bytes of up to two numbers for each of 16 clients, which the server may read


@pytest.fixture(scope="module", autouse=True)
def no_compilation_cache():
    """A program for a TPU cannot be read from the cache: that needs a TPU."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def target():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu cannot be imported, so nothing is compiled for TPUs: pip install 'pfljax[tpu-target]'")
    return targets.find("tpu:v5e:2x2")


@pytest.fixture(scope="module")
def clients():
    return pfl.data.digits(16, train_examples=15, validation_fraction=0.2)


@pytest.mark.slow
def test_a_model_on_four_chips_compiles_for_a_tpu(target, clients):
    """Of 16 chips four share a model; no chip holds or moves a whole kernel of 64 x 1024."""
    del target  # skips without libtpu
    sixteen, rows = targets.find("tpu:v5e:4x4"), []
    for model_devices in (1, 4):
        execution = pfl.Execution("map", devices=4, model_devices=model_devices)
        model = pfl.models.MLP(hidden=(1024,))
        run = pfl.Run(pfl.FedAvg(), clients, model, pfl.LocalTraining(optax.sgd(0.1)), execution=execution)
        compiling = prepare(run.experiment, sixteen, 1, "")[1]
        assert compiling is not None
        rows.append(compiling())
    whole, parts = rows
    assert parts.fits and not parts.why
    assert parts.temporaries_bytes < whole.temporaries_bytes
    shapes = " ".join(each["shapes"] for each in parts.collectives)
    assert "64,256]" in shapes and "64,1024]" not in shapes


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(pfl.METHODS))
def test_a_method_compiles_for_a_tpu(name, target, clients):
    local = pfl.LocalTraining(optax.adam(0.01), batch_size=5)
    run = pfl.Run(pfl.METHODS[name](**SETTINGS.get(name, {})), clients, pfl.models.MLP(hidden=(64,)), local).experiment
    topology, budget = run.algorithm(run.problem.plan).topology, BUDGETS.get(name)
    for chunk, plan in ((0, "vmap"), (1, "map")):
        row, compiling = prepare(run, target, chunk, "gather" if topology in ("peers", "push") else "")
        assert compiling is not None, row.why
        row = compiling()
        assert row.fits and not row.why and not row.doubles
        if budget is None:
            continue
        if importlib.metadata.version("libtpu") == LIBTPU:
            assert row.temporaries_bytes <= budget[plan], f"{plan}: {row.temporaries_bytes}"
        moved = {each["kind"] for each in row.collectives if each["bytes"] > REPORTS}
        if topology == "own":
            assert moved <= set(budget.get("moved", ()))
        if topology == "shared":
            assert moved <= SUMS | set(budget.get("moved", ()))
