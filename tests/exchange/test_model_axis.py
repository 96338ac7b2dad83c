"""One client's model on two devices: the same states as on one device, with the parameters spread."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from jax.sharding import PartitionSpec

import pfljax as pfl
from pfljax.contract.types import ClientOutput, ClientReport, Upload
from pfljax.exchange.model_axis import spread_axis
from pfljax.exchange.plan import make_plan
from pfljax.run import memory
from pfljax.run.replicates import ONE
from pfljax.stores.registry import STORES

SIZES = (4, 3, 5, 2)
FEDERATION = toys.make_federation(SIZES, features=32)
HIDDEN = (64, 32)  # the first layer's outputs are spread, and the second one's inputs
# the dimension that is cut, and a device's part
KERNELS = {(32, 64): (2, (32, 32)), (64, 32): (1, (32, 32))}
MAP = ("map", 0)
VMAP = ("vmap", 0)
CHUNK = ("chunk", 2)


@pytest.mark.parametrize(
    ("shape", "devices", "leading", "expected"),
    [
        ((8, 64, 32), 2, 1, 1),  # the largest
        ((8, 32, 32), 2, 1, 2),  # of equals the last
        ((2048, 64, 33), 2, 1, 1),  # the leading dimension stays
        ((2048, 64, 33), 2, 0, 0),
        ((8, 99, 64), 4, 1, 2),  # 99 does not divide
        ((8, 33, 33), 2, 1, None),
        ((8, 64, 8), 2, 1, None),  # small
        ((), 2, 1, None),
        ((8, 64, 32), 1, 1, None),
    ],
)
def test_the_largest_dimension_that_divides_is_spread(shape, devices, leading, expected):
    assert spread_axis(shape, devices, leading) == expected


def client(models, row, data):
    """Contributions to two models, of which some are not sent."""
    scores = jnp.tanh(models["w"] @ data["x"][...]).sum(axis=1)
    update = {"w": models["w"] * scores[:, None, None], "s": scores}
    row = {"r": row["r"] + update["w"].sum(axis=0)}
    return ClientOutput(row, Upload(update), ClientReport(scores.mean()), sent=scores > 0)


def exchanged(plan):
    """(what four clients with four models exchange, the compiled text)."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    models = {"w": normal(4, 32, 64)}
    rows = {"r": normal(4, 32, 64)}
    data = {"x": normal(4, 64)}

    def put(leaf, leading):
        return jax.device_put(leaf, plan.sharding(leaf, by_rows=True, leading=leading))

    def spread(stack):
        return jax.tree.map(lambda leaf: put(leaf, 1), stack)

    args = (
        spread(models),
        np.array([[0, 3], [1, 2], [2, 0], [1, 3]], np.int32),
        spread(rows),
        put(data["x"], None),
    )
    run = jax.jit(
        lambda models, index, rows, x: plan.exchange(
            client, models, index, rows, {"x": x}, topology="peers"
        )
    )
    compiled = run.lower(*args).compile()
    return compiled(*args), compiled.as_text()


@pytest.fixture(scope="module")
def on_one_device():
    return exchanged(make_plan("map", devices=1))[0]


@pytest.mark.parametrize(
    ("peers", "kind"),
    [
        ("gather", VMAP),
        ("ring", MAP),
        pytest.param("ring", CHUNK, marks=pytest.mark.slow),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("gather", MAP), ("gather", CHUNK), ("ring", VMAP))
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_only_parts_of_models_travel(peers, kind, on_one_device):
    (rows, sums), text = exchanged(make_plan(*kind, devices=4, peers=peers, model_devices=2))
    toys.assert_trees_close((rows, sums), on_one_device, rtol=1e-5, atol=1e-5)
    assert sums.sent.any() and not sums.sent.all()
    for leaf in (rows["r"], sums.upload.update["w"]):
        assert leaf.sharding.spec == PartitionSpec("clients", None, "model")
        assert {each.data.shape for each in leaf.addressable_shards} == {(2, 32, 32)}
    found = re.findall(
        r"= (.+?) (all-gather|collective-permute|all-reduce|reduce-scatter|all-to-all)\(", text
    )
    moved = {shape for shapes, _ in found for shape in re.findall(r"f32\[([\d,]+)\]", shapes)}
    assert not [shape for shape in moved if shape.endswith("32,64")]
    assert [shape for shape in moved if shape.endswith("32,32")]


def problem_of(plan, cohort, optimizer, hidden=HIDDEN):
    options = {"hidden": hidden, "batch_size": 2, "keep_optimizer": True}
    return toys.make_problem(FEDERATION, optimizer, plan=plan, cohort=cohort, **options)


@functools.cache
def states(name, cohort, plan, rounds=2):
    own = (optax.adam(0.05), HIDDEN[:1]) if name == "federico" else (optax.sgd(0.1),)
    problem = problem_of(make_plan(*plan), cohort, *own)
    algorithm = toys.make_algorithm(name, problem, **{"neighbors": 1} if name == "federico" else {})
    return toys.train(algorithm, problem, FEDERATION.client_data, rounds)[0]


def assert_spread(stack, rows):
    """Large kernels are cut; everything else is whole, with these rows on a device."""
    assert any(leaves["kernel"].shape[1:] in KERNELS for leaves in stack.values())
    for leaves in stack.values():
        cut, part = KERNELS.get(leaves["kernel"].shape[1:], (None, leaves["kernel"].shape[1:]))
        first = ("clients",) if rows < leaves["kernel"].shape[0] else (None,) if cut else ()
        spec = PartitionSpec(*first, *[None] * ((cut or 1) - 1), *["model"] * bool(cut))
        assert leaves["kernel"].sharding.spec == spec
        assert {each.data.shape for each in leaves["kernel"].addressable_shards} == {(rows, *part)}
        assert {each.data.shape[0] for each in leaves["bias"].addressable_shards} == {rows}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(MAP, marks=pytest.mark.slow),
        pytest.param(VMAP, marks=pytest.mark.slow),
        pytest.param(CHUNK, marks=pytest.mark.long),
    ],
    ids=["map", "vmap", "chunk"],
)
def test_a_servers_model_on_two_devices_trains_as_on_one(kind):
    """Clients have different numbers of steps, so the devices of one client wait for each other only."""
    found = states("fedavg", 0, (*kind, 4, "auto", 2))[-1]
    expected = states("fedavg", 0, ("map", 0, 1))[-1]
    toys.assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_spread(found.models, 1)


@pytest.mark.long
@pytest.mark.parametrize("cohort", [0, 2, 3])
@pytest.mark.parametrize(
    ("kind", "chunk", "peers"), [("map", 0, "ring"), ("vmap", 0, "gather"), ("chunk", 2, "ring")]
)
def test_federicos_models_on_two_devices_train_as_on_one(kind, chunk, peers, cohort):
    """Also of sampled cohorts, whose rows visit other devices."""
    expected = states("federico", cohort, ("map", 0, 1))[-1]
    found = states("federico", cohort, (kind, chunk, 4, peers, 2))[-1]
    toys.assert_trees_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_spread(found.models, 2)
    kernels = [leaf for leaf in jax.tree.leaves(found.optimizer) if leaf.shape[-2:] == (32, 64)]
    # Adam's moments
    assert len(kernels) == 2 and all(leaf.sharding.spec[-1] == "model" for leaf in kernels)


def execution(**fields):
    return pfl.Execution(**{"plan": "map", "devices": 4, "model_devices": 2} | fields)


def run(out, devices, model_devices, rounds, **options):
    where = execution(devices=devices, model_devices=model_devices)
    local = pfl.LocalTraining(optax.sgd(0.1, momentum=0.9), batch_size=2, keep_optimizer=True)
    made = pfl.Run(pfl.Local(), FEDERATION, pfl.models.MLP(HIDDEN), local, execution=where)
    return made.train(
        rounds=rounds, out=out, eval_every=1, checkpoint_every=1, progress=False, **options
    )


@pytest.mark.slow
def test_a_checkpoint_resumes_on_any_number_of_devices_of_a_model(tmp_path):
    """From 2 x 2 to one device and back; scores and states are those of one device throughout."""
    run(tmp_path / "run", 4, 2, 1)
    run(tmp_path / "run", 1, 1, 2, resume=True)
    found = run(tmp_path / "run", 4, 2, 3, resume=True)
    expected = run(None, 1, 1, 3)
    toys.assert_trees_close(found.state, expected.state, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.results["loss_test"], expected.results["loss_test"], rtol=1e-4)
    assert_spread(found.state.models, 2)
    assert dict(found.summary["plan"])["plan"].endswith("2 x 2 devices, each model on 2")


@pytest.mark.slow
def test_a_device_needs_memory_for_its_parts_only():
    """Arguments of the compiled rounds: half of the models' and momenta's bytes, besides what is small."""

    def arguments(model_devices):
        plan = make_plan("map", devices=2 * model_devices, model_devices=model_devices)
        experiment = toys.make_experiment(
            "local", problem_of(plan, 0, optax.sgd(0.1, momentum=0.9)), FEDERATION, plan=plan
        )
        store = STORES["device"]
        data = store.put(plan, ONE, [FEDERATION.client_data], len(SIZES))
        return memory.memory_plan(
            store.lower_segment(experiment, data, plan, 1, ONE).program.compile()
        ).arguments

    large = 2 * 2 * 2 * 32 * 64 * 4  # models and momenta of two clients, two kernels each
    assert arguments(1) - arguments(2) == pytest.approx(large / 2, abs=64)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"model_devices": 3},
            "model_devices=3: accepted: a number that divides the 4 devices of a process",
        ),
        (
            {"model_devices": 8},
            "model_devices=8: accepted: a number that divides the 4 devices of a process",
        ),
        ({"client_store": "host"}, "model_devices=2: accepted with client_store=host: 1"),
        ({"client_store": "disk"}, "model_devices=2: accepted with client_store=disk: 1"),
        ({"plan": "python"}, "model_devices=2: accepted with plan=python: 1"),
    ],
)
def test_what_cannot_be_spread_is_refused_in_a_line(fields, text):
    with pytest.raises(pfl.ArgumentError, match=f"^{text}$"):
        pfl.Run(pfl.FedAvg(), FEDERATION, pfl.models.MLP(()), execution=execution(**fields))


def test_one_device_of_a_model_is_the_mesh_of_clients():
    assert make_plan("map", devices=4).mesh.axis_names == ("clients",)
    plan = make_plan("map", devices=4, model_devices=2)
    assert dict(plan.mesh.shape) == {"clients": 2, "model": 2} and plan.num_devices == 2
    assert [device.id for device in plan.mesh.devices.flat] == [0, 1, 2, 3]
