"""Plans for other devices, with CPU devices in their place: what is lowered, counted and recommended."""

import contextlib
import dataclasses
import os
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.contract.host import readable
from pfljax.contract.types import Split
from pfljax.exchange.exchange import in_chunks
from pfljax.exchange.side_by_side import CLIENTS
from pfljax.local import batches
from pfljax.planner import planning as estimating
from pfljax.planner import targets
from pfljax.planner.compiled_text import Kernel, Reading
from pfljax.planner.planning import Row
from pfljax.planner.targets import Chip, Collective, ProgramEstimate, Target
from pfljax.training import choosing

CHIP = Chip(1 << 30, 1e12, 1e11, 1e10)
MODEL = pfl.models.MLP(hidden=(8,))


def here(memory=CHIP.memory, devices=2):
    return Target("here", jax.devices()[:devices], CHIP._replace(memory=memory), {})


def experiment(method, clients=4, batch=3, model=MODEL, sizes=None, **options):
    sizes = np.arange(clients) % 2 * 4 + 4 if sizes is None else sizes  # 4 and 8 examples
    client = np.repeat(np.arange(clients), np.array(sizes))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(client), 5)).astype(np.float32)
    y = rng.integers(0, 3, len(client))
    federation = pfl.Federation.from_arrays(x, y, client=client)
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=batch)
    return pfl.Run(method, federation, model, local, **options).experiment.with_rounds(100)


@pytest.fixture(scope="module")
def local():
    return estimating.estimate_for(experiment(pfl.Local()), here())


def test_every_plan_of_a_method_is_compiled(local):
    assert [row.plan for row in local.rows] == ["vmap", "map"]
    for row in local.rows:
        assert row.fits and not row.why and not row.doubles
        assert row.milliseconds == pytest.approx(
            row.compute_milliseconds + row.collectives_milliseconds
        )
        assert row.hours == pytest.approx(100 * row.milliseconds / 3.6e6)
        # No model leaves its device; who trained is a bit for each client.
        assert all(each["scalars"] or each["bytes"] <= 64 for each in row.collectives)
    best = min(local.rows, key=lambda row: row.milliseconds)
    assert local.recommended == {"plan": best.plan} and local.hours == best.hours


def test_arguments_are_state_and_data(local):
    """4 models of 5 x 8 + 8 + 8 x 3 + 3 parameters over 2 devices, and the examples of 2 clients."""
    models = 2 * (5 * 8 + 8 + 8 * 3 + 3) * 4
    assert all(models < row.arguments_bytes < models + 8 * 1024 for row in local.rows)


@pytest.mark.slow
def test_peers_have_two_exchanges_and_the_models_are_what_travels():
    made = estimating.estimate_for(experiment(pfl.FedeRiCo(neighbors=1)), here(), seconds=1e-9)
    assert [row.exchange for row in made.rows] == ["gather"]
    assert [note.split(":")[0] for note in made.notes] == ["vmap, ring", "map, gather", "map, ring"]
    moved = made.rows[0].collectives
    assert any("8" in each["shapes"] and not each["scalars"] for each in moved)


def test_a_run_that_does_not_fit_is_an_answer():
    small = estimating.estimate_for(experiment(pfl.Local(), clients=3), here(memory=500))
    assert {row.why for row in small.rows} == {estimating.DOES_NOT_FIT}
    assert small.recommended == {} and small.hours is None
    assert small.rows[0].arguments_bytes > 500
    assert any("2 or 4 clients can" in note for note in small.notes)


def test_nothing_is_allocated_and_the_host_store_holds_a_cohort():
    run = experiment(pfl.Local(), execution=pfl.Execution(client_store="host"), participation=0.5)
    row, compiling = estimating.prepare(run, here(devices=1), 0, "")
    assert compiling is not None
    models = 2 * (5 * 8 + 8 + 8 * 3 + 3) * 4
    assert 2 * models < row.arguments_bytes < 2 * models + 8 * 1024  # this cohort and the next


def test_a_model_on_several_devices():
    """Of 4 devices 2 share a model of 5 x 1024 and 1024 x 3 weights, so that a device holds half of what 2 of 2 do."""
    wide = pfl.models.MLP(hidden=(1024,))

    def make(number):
        return experiment(
            pfl.Local(), model=wide, execution=pfl.Execution(devices=4, model_devices=number)
        )

    (whole, _), (parts, compiling) = (
        estimating.prepare(make(number), here(devices=2 * number), 1, "") for number in (1, 2)
    )
    saved = 2 * (5 * 1024 + 1024 * 3 + 1024) * 4 / 2  # of two clients: kernels and the wide bias
    assert whole.arguments_bytes - parts.arguments_bytes == pytest.approx(saved)
    assert compiling is not None
    row = compiling()
    assert row.fits and {each["devices"] for each in row.collectives} >= {2}
    plan = here(devices=4).plan(0, "auto", model_devices=2)
    assert [chunk for chunk, _ in choosing.choices(make(2), plan)] == [0, 1]
    with pytest.raises(
        pfl.ArgumentError, match="model_devices=2: accepted: a number that divides the 1 devices"
    ):
        estimating.prepare(make(2), here(devices=1), 1, "")


def test_loops_count_as_often_as_the_largest_client_of_a_chunk_steps():
    run = experiment(pfl.Local())
    steps = run.steps  # of clients 0 to 3
    for chunk, expected in [
        (0, np.maximum(*steps.reshape(2, 2).T).max()),
        (1, steps.reshape(2, 2).mean(axis=1).max()),
    ]:
        plan = here().plan(chunk, "auto")
        assert estimating.lengths(run, plan)("steps") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("block", "chunk"),
    [
        (32, 1),
        (3, 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(32, 0), (32, 2), (3, 0)]),
    ],
)
def test_loops_over_blocks_count_as_often_as_they_run(monkeypatch, block, chunk):
    """A program that calls back from its blocks of examples, once for each client side by side."""
    monkeypatch.setattr(batches, "BLOCKS", (40, block))
    run = experiment(pfl.Local(), sizes=(60, 130, 6, 90))
    calls = []
    size = run.federation.train.size
    split = Split(
        jnp.zeros((4, run.federation.train.y.shape[1], 1)),
        jnp.ones(run.federation.train.y.shape),
        size,
    )

    def total(x, y, mask):
        jax.debug.callback(lambda _: calls.append(1), mask.sum())
        return jnp.where(mask, y, 0).sum()

    def of_all(split):
        return in_chunks(
            lambda split: batches.sum_over_examples(total, split), (split,), chunk or 4, CLIENTS
        )

    compiled = jax.jit(of_all).lower(split).compile()
    np.testing.assert_array_equal(compiled(split), size)
    jax.effects_barrier()
    scopes = set(re.findall(r"(?:full|rest)_[0-9_]+_of_\d+", compiled.as_text()))
    of = estimating.lengths(run, here(devices=1).plan(chunk, "auto"))
    assert len(scopes) == 2 and sum(map(of, scopes)) * 4 == len(
        calls
    )  # each of the 4 / chunk chunks calls `chunk` times


@pytest.mark.slow
def test_an_e_step_is_in_a_rounds_program_once():
    """A round of 3 exchanges has as many loops over blocks of examples as one of a single exchange."""
    loops = []
    for batch in (0, 20):
        run = experiment(
            pfl.FedeRiCoFriends(neighbors=1),
            batch=batch,
            model=pfl.models.MLP(hidden=()),
            sizes=[60] * 2,
            clients=2,
        )
        lowered, _ = estimating.lower(run, here(devices=1).plan(1, "auto"))
        loops.append(
            len(re.findall(r" while\(.*rest_\d\w+_of_\d+", lowered.program.compile().as_text()))
        )
    assert loops[0] == loops[1] > 0


def test_blocks_of_sorted_clients_count_in_the_order_in_which_they_are_sorted():
    """Clients 0 and 3 are large and need 1 and 5 blocks, the others 9 and 2: buckets of 2 take 5 and 9."""
    plan = dataclasses.replace(here(devices=1).plan(2, "auto"), buckets=((2, 2),))
    counts = np.array([1, 9, 2, 5])
    sizes = np.array([40, 10, 20, 30])
    assert plan.repetitions(counts, 4, sizes) == (5 + 9) / 2
    assert plan.repetitions(counts, 4) == (9 + 2) / 2


@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        ("all-gather", 0.5),
        ("all-reduce", 1.0),
        ("reduce-scatter", 0.5),
        ("collective-permute", 1.0),
    ],
)
def test_seconds_of_a_collective(kind, passes):
    """Each of 2 devices lacks half of what is gathered; a sum is scattered and gathered."""
    one = Collective(kind, "f32[1000]", 4000, 1, False)
    assert targets.seconds_of(one, here()) == pytest.approx(targets.LATENCY + passes * 4000 / 1e10)
    assert targets.seconds_of(one, here(devices=1)) == 0
    # its link has two sides, and a hop uses one
    tpu = dataclasses.replace(here(), chip=CHIP._replace(clock=1e9))
    sides = 2 if kind == "collective-permute" else 1
    assert targets.seconds_of(one, tpu) == pytest.approx(
        targets.LATENCY + sides * passes * 4000 / 1e10
    )


@pytest.mark.parametrize(
    ("precision", "peak"), [("tf32", 495e12), ("f32", 67e12), ("bf16", 989e12)]
)
def test_products_take_as_long_as_at_the_peak_of_their_precision(precision, peak, monkeypatch):
    """Products are large beside their bytes, so a roofline is their FLOPs over the peak, and a launch."""
    chip = targets.GPUS["h100"]
    kernels = [Kernel(3, 100, 1e12, precision), Kernel(2, 1e10, 1, precision)]
    products = 3 * (targets.LAUNCH + 1e12 / peak)
    copies = 2 * (targets.LAUNCH + 1e10 / chip.bandwidth)
    found = estimate(Reading(0, kernels=kernels, collectives=[], doubles=False), chip, monkeypatch)
    assert found.compute_milliseconds == pytest.approx(1e3 * (products + copies))


def test_a_tpus_program_takes_its_cycles(monkeypatch):
    chip = CHIP._replace(clock=2e9)
    found = estimate(Reading(6e6, kernels=[], collectives=[], doubles=False), chip, monkeypatch)
    assert found.compute_milliseconds == pytest.approx(3)


def estimate(reading, chip, monkeypatch):
    """What a program needs on a chip, if its text reads like this."""
    memory = types.SimpleNamespace(
        argument_size_in_bytes=0,
        output_size_in_bytes=0,
        alias_size_in_bytes=0,
        temp_size_in_bytes=0,
    )
    compiled = types.SimpleNamespace(as_text=str, memory_analysis=lambda: memory)
    program = types.SimpleNamespace(compile=lambda compiler_options: compiled)
    monkeypatch.setattr(targets.compiled_text, "read", lambda *_: reading)
    return targets.compile_for(dataclasses.replace(here(), chip=chip), program, lambda scope: None)


def test_operations_without_an_estimate_are_noted():
    rows = [
        Row("vmap", 0, "", True, unknown_operations=3),
        Row("map", 1, "", True, unknown_operations=12),
    ]
    assert (
        estimating.rests_on(here(), rows)
        == f"{here().rests_on}; up to 12 operations without an estimate count as 0"
    )
    assert estimating.rests_on(here(), [Row("map", 1, "", True)]) == here().rests_on


def test_the_fastest_that_fits_is_recommended():
    rows = [Row("vmap", 0, "ring", False), Row("chunk", 8, "ring", True, milliseconds=2.0)]
    assert estimating.recommended(rows[1]) == {"plan": "chunk", "chunk": 8, "exchange": "ring"}
    assert (
        dataclasses.replace(rows[0], exchange="").name == "vmap"
        and rows[1].name == "chunk of 8, ring"
    )
    assert ProgramEstimate(1, 2, 3, 0, 0.5, 0.25, (), False, 0).total_bytes == 6


@pytest.mark.parametrize(
    "target", ["tpu", "tpu:v5e", "tpu:v9:2x2", "tpu:v5e:4", "cuda:h100:0", "cuda:b7:8", "cpu:x:2"]
)
def test_unknown_targets_are_refused(target):
    with pytest.raises(
        pfl.ArgumentError,
        match=r"target=.*: accepted: tpu:NAME:SHAPE with v5e, v5p, v6e, .*cuda:NAME",
    ):
        targets.find(target)


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_frozen_parameters_are_on_a_device_once(number):
    """In bfloat16, whatever the number of clients; devices that share a model hold parts."""
    mlp = pfl.models.MLP(hidden=(1024,), outputs=3)
    frozen = mlp.init(jax.random.key(0), jnp.zeros((1, 5)))
    model = pfl.Model(mlp, frozen=frozen, trainable=pfl.adapters.lora(rank=1, where="Dense_1"))
    execution = pfl.Execution(devices=4, model_devices=number)

    def of(clients):
        return experiment(pfl.Local(), clients=clients, model=model, execution=execution)

    rows = [estimating.prepare(of(clients), here(devices=4), 1, "")[0] for clients in (4, 8)]
    assert {row.frozen_bytes for row in rows} == {2 * ((5 * 1024 + 1024 + 1024 * 3) // number + 3)}
    adapters = 4 * (1024 // number + 3)
    # and data
    assert rows[1].arguments_bytes - rows[0].arguments_bytes == pytest.approx(
        number * adapters, rel=0.3
    )
    assert rows[0].arguments_bytes > rows[0].frozen_bytes + number * adapters
    assert estimating.held_once(rows) == [
        f"each device holds the frozen parameters once: {readable(rows[0].frozen_bytes)} of the arguments"
    ]


@pytest.mark.parametrize("refused", [False, True])
def test_a_tpus_compiler_leaves_the_environment_as_it_was(monkeypatch, refused):
    seen = {}
    own = {"TPU_WORKER_HOSTNAMES": "mine"}
    for name in targets.HERE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")

    def topology(**_):
        seen.update({name: os.environ[name] for name in targets.HERE})
        if refused:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such shape")
        return types.SimpleNamespace(devices=jax.devices()[:1])

    monkeypatch.setitem(sys.modules, "libtpu", types.ModuleType("libtpu"))
    monkeypatch.setattr(targets.topologies, "get_topology_desc", topology)
    with (
        pytest.raises(pfl.ArgumentError, match="no such shape")
        if refused
        else contextlib.nullcontext()
    ):
        targets.find("tpu:v5e:2x2")
    assert (
        seen == targets.HERE | own
        and {name: os.environ[name] for name in targets.HERE if name in os.environ} == own
    )


@pytest.mark.parametrize(
    ("target", "package", "extra"),
    [("tpu:v5e:2x2", "libtpu", "tpu-target"), ("cuda:h100:4", "jax_cuda12_plugin", "gpu-target")],
)
def test_a_missing_compiler_is_named(target, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        pfl.ArgumentError, match=rf"target={target}: needs .*pip install 'pfljax\[{extra}\]'"
    ):
        targets.find(target)
