"""Runs of frozen networks: what is held, sent and kept, in every store, and weights from files."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from safetensors.numpy import save_file

import pfljax as pfl
from pfljax.contract.held import taking
from pfljax.models.transformers import ViT
from pfljax.run.replicates import ONE
from pfljax.stores.registry import store_of

LOCAL = pfl.LocalTraining(optax.sgd(0.05), batch_size=8)
WIDTH = 24
DEPTH = 1
RANK = 2
VIT = ViT(patch=4, width=WIDTH, depth=DEPTH, heads=2)
# A (width, r) and B (r, width) for q, k, v and the output; the MLP's two products; a head with 10 classes.
OF_ATTENTION = 4 * RANK * 2 * WIDTH
OF_MLP = 2 * RANK * 5 * WIDTH
OF_HEAD = 10 * WIDTH + 10
TRAINABLE = [pfl.adapters.lora(RANK, "attention/|mlp/"), "head"]


@pytest.fixture(scope="module")
def clients():
    return pfl.data.digits(
        num_clients=4, partition=pfl.partitions.LabelGroups(groups=2), train_examples=16
    )


def weights(seed=0):
    return VIT.clone(outputs=10).init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)))["params"]


def model(seed=0, trainable=tuple(TRAINABLE)):
    return pfl.Model(VIT, frozen=weights(seed), trainable=trainable)


def run(clients, method=None, **options):
    return pfl.Run(method or pfl.Ditto(), clients, model(), LOCAL, **options)


@pytest.mark.slow
def test_only_adapters_are_kept_and_sent(clients, said):
    """4 bytes for each trained number, counted by hand; the state's rows have nothing else."""
    num = OF_ATTENTION + OF_MLP + OF_HEAD
    found = run(clients).train(rounds=2, eval_every=2)
    assert any("frozen parameters, held once" in line for line in said)
    assert sum(leaf.size for leaf in jax.tree.leaves(found.state.models)) == num
    # SGD has none
    assert sum(leaf.size for leaf in jax.tree.leaves(found.state.rows)) == num * clients.num_clients
    last = found.summary["last"]  # bytes per client until now, in two rounds
    assert last["bytes_down"] == 2 * 4 * num
    assert 2 * 4 * num <= last["bytes_up"] <= 2 * 4 * (num + 2)  # with its number of examples


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["device", "host"])
def test_the_program_takes_the_frozen_arrays_and_contains_none(clients, kept):
    """All frozen parameters, in bfloat16, are among its arguments; no constant in its text has over 1 KB."""
    experiment = run(clients, execution=pfl.Execution(client_store=kept)).experiment
    store = store_of(experiment)
    plan = experiment.problem.plan
    data = store.put(plan, ONE, [experiment.federation.client_data], clients.num_clients)
    lowered = store.lower_segment(experiment, data, plan, 1, ONE)
    frozen = sum(leaf.size for leaf in jax.tree.leaves(weights())) - OF_HEAD
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(lowered.frozen["frozen"])) == 2 * frozen
    constants = re.findall(r'dense<"0x([0-9A-F]+)">', lowered.program.as_text())
    assert all(len(digits) <= 2 * 1024 for digits in constants)
    given = [
        leaf for leaf in jax.tree.leaves(lowered.program.in_avals) if leaf.dtype == jnp.bfloat16
    ]
    assert sum(leaf.size for leaf in given) == frozen


KINDS = (pfl.Ditto(), pfl.FedeRiCo(neighbors=1), pfl.methods.FedEM(components=2))
OPTIONS = ({"client_store": "disk"}, {"plan": "vmap"}, {"client_store": "host"}, {"plan": "python"})


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param(
            method,
            options,
            marks=pytest.mark.slow if at == number and at != 1 else pytest.mark.long,
        )
        for at, method in enumerate(KINDS)
        for number, options in enumerate(OPTIONS)
    ],
)
def test_stores_and_plans_agree(method, options, clients):
    def of(**options):
        return run(clients, method, execution=pfl.Execution(**options)).train(
            rounds=2, eval_every=2
        )

    expected = of(plan="map")
    found = of(**options)
    np.testing.assert_allclose(found.results["loss_test"], expected.results["loss_test"], rtol=1e-3)


@pytest.mark.long
def test_a_run_belongs_to_its_frozen_parameters(clients, tmp_path):
    """Resuming with another backbone is refused, and named; with the same one, it goes on as if never stopped."""
    out = tmp_path / "run"
    run(clients).train(rounds=1, eval_every=1, out=out)
    other = pfl.Run(pfl.Ditto(), clients, model(seed=1), LOCAL)
    with pytest.raises(pfl.ArgumentError, match="frozen parameters"):
        other.train(rounds=2, eval_every=1, out=out, resume=True)
    resumed = run(clients).train(rounds=2, eval_every=1, out=out, resume=True)
    whole = run(clients).train(rounds=2, eval_every=1)
    np.testing.assert_array_equal(resumed.results["loss_test"], whole.results["loss_test"])


@pytest.mark.long
def test_a_loaded_model_is_whole(clients, tmp_path):
    """The exported module with its merged parameters predicts what the run does."""
    found = run(clients, pfl.Local()).train(rounds=2, eval_every=2)
    module, variables = found.export(1)
    x = clients.test.x[1, :3]
    expected = jax.nn.softmax(module.apply(variables, x))
    np.testing.assert_allclose(found.predict(x, client=1), expected, atol=1e-5)


@pytest.mark.slow
def test_weights_from_a_file(clients, tmp_path):
    """Names with dots are paths; the head in the file is for other classes and begins anew."""
    flat = {
        ".".join(path): np.asarray(leaf)
        for path, leaf in traverse_util.flatten_dict(weights()).items()
    }
    flat |= {"head.kernel": np.zeros((WIDTH, 7), np.float32), "head.bias": np.zeros(7, np.float32)}
    save_file(flat, tmp_path / "vit.safetensors")
    saved = pfl.models.weights.Saved(tmp_path / "vit.safetensors")

    def of(frozen):
        return pfl.Run(
            pfl.Local(), clients, pfl.Model(VIT, frozen=frozen, trainable="head"), LOCAL, seed=1
        )

    found = of(saved).experiment.problem.model.adapted.frozen_on_host["frozen"]
    np.testing.assert_array_equal(
        found["patches/kernel"], weights()["patches"]["kernel"].astype(jnp.bfloat16)
    )
    assert "head/kernel" not in found
    del flat["norm.scale"]
    save_file(flat, tmp_path / "short.safetensors")
    flat["norm.scale"] = np.zeros(3, np.float32)
    save_file(flat, tmp_path / "wrong.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"weights")
    cases = {
        "short": rf"short.safetensors: lacks norm/scale \({WIDTH},\), which are not trained",
        "wrong": rf"wrong.safetensors: norm/scale has shape \(3,\); accepted: \({WIDTH},\)",
        "broken": "is no safetensors file",
    }
    for name, text in cases.items():
        with pytest.raises(pfl.ArgumentError, match=text):
            of(pfl.models.weights.Saved(tmp_path / f"{name}.safetensors"))
    with pytest.raises(
        pfl.ArgumentError, match=r"no file .*absent\.safetensors; weights are not downloaded"
    ):
        pfl.models.weights.Saved(tmp_path / "absent.safetensors")
    with pytest.raises(pfl.ArgumentError, match="layout=resnext: accepted: vit, dinov2, dinov3, "):
        pfl.models.weights.Saved(tmp_path / "vit.safetensors", "resnext")


@pytest.mark.slow
def test_one_set_of_weights_for_networks_with_other_heads(tmp_path):
    """A model without data of its own is built for data with 10 classes, and then for 4."""
    flat = {
        "/".join(path): np.asarray(leaf)
        for path, leaf in traverse_util.flatten_dict(weights()).items()
    }
    save_file(flat, tmp_path / "vit.safetensors")
    for frozen in (weights(), pfl.models.weights.Saved(tmp_path / "vit.safetensors")):
        given = pfl.Model(VIT, frozen=frozen, trainable="head")
        for classes in (10, 4):
            built = pfl.models.build(given, (8, 8, 1), "classification", classes)
            kernel = built.init(jax.random.key(1))["head"]["kernel"]
            assert kernel.shape == (WIDTH, classes)
            assert bool((kernel == weights()["head"]["kernel"][:, :classes]).all()) == (
                classes == 10
            )


@pytest.mark.long
def test_a_second_frozen_network_keeps_its_own_arrays(clients):
    """A teacher within another network's program computes with its own parameters, not with the program's."""
    student, teacher = (
        pfl.models.build(model(seed), (8, 8, 1), "classification", 10) for seed in (0, 1)
    )
    x = clients.test.x[0, :2]
    params = teacher.init(jax.random.key(0))
    both = taking(student.network, lambda: (student.apply(params, x), teacher.apply(params, x)))
    own, other = jax.jit(both)(frozen=student.network.frozen_on_host)
    np.testing.assert_allclose(own, student.apply(params, x), atol=1e-5)
    np.testing.assert_allclose(other, teacher.apply(params, x), atol=1e-5)
    assert np.abs(own - other).max() > 0.01
