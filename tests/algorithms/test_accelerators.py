"""Every method compiled for a TPU v5e 2x2 that is not here: what moves between chips, and how many bytes it needs.

accelerators.json holds each program's bytes on one chip: of temporaries, and of a round's collectives. A change must
not need more. One that does, for a reason, or that needs less, writes them anew:

    WRITE_BUDGETS=1 pytest -n0 -m 'slow or long' tests/algorithms/test_accelerators.py [-k NAME]

Another libtpu may lay programs out differently (0.0.52 needs half of the temporaries that 0.0.50 needs), so with one of
those a budget is only a rough bound. Without libtpu the tests are skipped.
"""

import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path

import jax
import optax
import pytest
import toys
from jax.experimental.compilation_cache import compilation_cache

import pfljax as pfl
from pfljax.planner import targets
from pfljax.planner.planning import prepare

FILE = Path(__file__).with_name("accelerators.json")
# how much more than its budget a program may need, with the libtpu of the budgets or another
EXACT = 1.02
ROUGH = 1.5
# optax hides the learning rate from which it would follow
SETTINGS = {"q_ffl": {"lipschitz": 100.0}}
REPORTS = 128  # bytes of up to two numbers for each of 16 clients, which the server may read
MOVES = {  # what may move in larger pieces
    "own": set(),
    "shared": {"all-reduce", "reduce-scatter"},
    "push": {"all-reduce", "reduce-scatter"},
    "peers": {"all-reduce", "reduce-scatter", "all-gather"},
}
# Their servers compare all clients' models, heads or bases; the chips share that work and its results.
COMPARE = {"clustered", "fedamp", "fedcac", "fedpac", "floco", "hilora", "mocha", "pfedgraph"}
# of each topology, and one that compares; the others are compiled at night
IN_CI = (*toys.KINDS, "fedpac")


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
        pytest.skip(
            "libtpu cannot be imported, so nothing is compiled for TPUs: pip install 'pfljax[tpu-target]'"
        )
    return targets.find("tpu:v5e:2x2")


@pytest.fixture(scope="module")
def clients():
    return pfl.data.digits(16, train_examples=15, validation_fraction=0.2)


@pytest.mark.slow
def test_a_model_on_four_chips_compiles_for_a_tpu(target, clients):
    """Of 16 chips four share a model; no chip holds or moves a whole kernel of 64 x 1024."""
    del target  # skips without libtpu
    sixteen = targets.find("tpu:v5e:4x4")
    rows = []
    for model_devices in (1, 4):
        execution = pfl.Execution("map", devices=4, model_devices=model_devices)
        model = pfl.models.MLP(hidden=(1024,))
        run = pfl.Run(
            pfl.FedAvg(), clients, model, pfl.LocalTraining(optax.sgd(0.1)), execution=execution
        )
        compiling = prepare(run.experiment, sixteen, 1, "")[1]
        assert compiling is not None
        rows.append(compiling())
    whole, parts = rows
    assert parts.fits and not parts.why
    assert parts.temporaries_bytes < whole.temporaries_bytes
    shapes = " ".join(each["shapes"] for each in parts.collectives)
    assert "64,256]" in shapes and "64,1024]" not in shapes


def make_run(name, clients):
    """A run with a network of one hidden layer that the method can train."""
    network = (toys.required(name, 64, 64) or toys.network(name)).get("model")
    local = pfl.LocalTraining(optax.adam(0.01), batch_size=5)
    return pfl.Run(
        pfl.methods.METHODS[name](**SETTINGS.get(name, {})),
        clients,
        network or pfl.models.MLP((64,)),
        local,
    )


def moved_in(row):
    """Kinds of collectives that move more than scalars and reports."""
    return {
        each["kind"] for each in row.collectives if not each["scalars"] and each["bytes"] > REPORTS
    }


def libtpu():
    """Its version, without the last number of a corrected one."""
    return ".".join(importlib.metadata.version("libtpu").split(".")[:3])


def write(name, found):
    """Replaces a method's line of the file."""
    known = (json.loads(FILE.read_text())["bytes"] if FILE.exists() else {}) | {name: found}
    lines = [
        f"    {json.dumps(each)}: {json.dumps(known[each])}"
        for each in sorted(known)
        if each in pfl.methods.METHODS
    ]
    FILE.write_text(
        f'{{\n  "libtpu": "{libtpu()}",\n  "bytes": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    )


@toys.each_method(sorted(pfl.methods.METHODS), fast=(), slow=IN_CI)
def test_a_method_moves_what_its_topology_says_within_its_bytes(name, target, clients):
    run = make_run(name, clients).experiment
    found = {}
    topology = run.algorithm(run.problem.plan).topology
    for chunk, plan in ((0, "vmap"), (1, "map")):
        row, compiling = prepare(
            run, target, chunk, "gather" if topology in ("peers", "push") else ""
        )
        assert compiling is not None, row.why
        row = compiling()
        assert row.fits and not row.why and not row.doubles
        more = moved_in(row) - MOVES[topology]
        assert bool(more) == (name in COMPARE), f"{plan}: {more}"
        found[plan] = {
            "temporaries": row.temporaries_bytes,
            "collectives": round(row.collectives_bytes),
        }
    if os.environ.get("WRITE_BUDGETS"):
        write(name, found)
    recorded = json.loads(FILE.read_text())
    slack = EXACT if recorded["libtpu"] == libtpu() else ROUGH
    for plan, sizes in recorded["bytes"][name].items():
        for kind, budget in sizes.items():
            assert found[plan][kind] <= slack * budget, (
                f"{plan}: {kind} take {found[plan][kind]} bytes, not {budget}"
            )


def test_every_method_has_budgets():
    assert json.loads(FILE.read_text())["bytes"].keys() == pfl.methods.METHODS.keys()
