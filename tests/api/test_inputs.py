"""Inputs that are trees of arrays, and integers that stay integers: as if they were one float array."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data.statistics import digest
from pfljax.data.variants import match_classes, pad_alike, split_unseen
from pfljax.training import describe

RNG = np.random.default_rng(0)
NUM = 60
CLASSES = 3
OWNER = np.sort(np.arange(NUM) % 4)
# a multiple of 4 bytes: all are pooled
IMAGE = RNG.integers(0, 4, size=(NUM, 3, 2, 1)).astype(np.uint8)
META = RNG.normal(size=(NUM, 5)).astype(np.float32)
Y = (META[:, 0] > 0).astype(int) + (IMAGE[:, 0, 0, 0] > 1)
TREE = {"image": IMAGE, "meta": META}
LOCAL = pfl.LocalTraining(optax.sgd(0.1), batch_size=5)
FLAT = np.concatenate([IMAGE.reshape(NUM, -1).astype(np.float32), META], axis=1)


class Linear(nn.Module):
    """A linear model of all arrays of a tree, concatenated, or of a single array."""

    num_classes: int

    @nn.compact
    def __call__(self, x):
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(x)]
        return nn.Dense(self.num_classes)(jnp.concatenate(flat, axis=1))


def federation(x, **options):
    return pfl.Federation.from_arrays(
        x, Y, client=OWNER, **{"standardize": False, "validation_fraction": 0.2} | options
    )


def train(
    x, method=None, *, store: Any = "device", devices=1, out=None, unseen=None, **training
) -> Any:
    """A result on two clients of four a round, in mini-batches whose last is not full."""
    local = dataclasses.replace(LOCAL, **training)
    execution = pfl.Execution("map", devices=devices, client_store=store)
    options = {"execution": execution, "unseen": unseen, "participation": 0.5}
    clients = x if isinstance(x, pfl.Federation) else federation(x)
    return pfl.Run(method or pfl.FedAvg(), clients, Linear(CLASSES), local, **options).train(
        3, out=out
    )


@functools.cache
def trained(kind, method=None):
    """The result on a tree, or on its arrays concatenated."""
    return train({"tree": TREE, "flat": FLAT}[kind], method)


def softmax(scores):
    exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def test_a_tree_is_stacked_array_by_array():
    clients = federation(TREE)
    assert repr(clients).count("x {'image': (3, 2, 1), 'meta': (5,)}") == 1
    found = clients.train.x
    flat = federation(FLAT).train
    for k, size in enumerate(clients.train.size):
        image = found["image"][k, :size]
        meta = found["meta"][k, :size]
        assert image.dtype == np.uint8 and meta.dtype == np.float32
        np.testing.assert_array_equal(
            np.concatenate([image.reshape(size, -1), meta], axis=1), flat.x[k, :size]
        )
        assert not found["image"][k, size:].any() and not found["meta"][k, size:].any()


def test_pixels_stay_bytes_and_other_integers_stay_integers():
    for images in (IMAGE, {"image": IMAGE}):
        stacked = jax.tree.leaves(
            federation(images).train.x, is_leaf=lambda leaf: hasattr(leaf, "pool")
        )[0]
        assert stacked.pool.dtype == np.uint8 and stacked.pool.nbytes == IMAGE.size
    pixels = federation(IMAGE)
    floats = federation(IMAGE.astype(np.float32))
    assert 4 * pixels.train.x.pool.nbytes == floats.train.x.pool.nbytes
    assert pixels.inputs == floats.inputs == jax.ShapeDtypeStruct((3, 2, 1), np.float32)
    tokens = federation(RNG.integers(-3, 9, size=(NUM, 2)).astype(np.int16))
    assert tokens.train.x.dtype == tokens.inputs.dtype == np.int32


@pytest.mark.long
def test_pixels_train_as_the_same_floats():
    """A network that subtracts from its inputs would be wrong on bytes, which wrap."""

    class Shifted(Linear):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1) - 2)

    found = [
        pfl.Run(pfl.FedAvg(), federation(x), Shifted(CLASSES), LOCAL).train(rounds=3)
        for x in (IMAGE, IMAGE.astype(np.float32))
    ]
    np.testing.assert_array_equal(*(jax.tree.leaves(each.state.models)[1] for each in found))
    assert found[0].loss == found[1].loss
    x = IMAGE[:4] + 0.5  # predictions take floats, too
    np.testing.assert_array_equal(found[0].predict(x, client=1), found[1].predict(x, client=1))


# The slow ones send or keep examples.
@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [None, pfl.methods.FedAvgData(0.2), pytest.param(pfl.methods.KNNPer(), marks=pytest.mark.long)],
)
def test_a_tree_trains_as_its_arrays_concatenated(method):
    tree = trained("tree", method)
    flat = trained("flat", method)
    np.testing.assert_allclose(tree.per_client_accuracy, flat.per_client_accuracy)
    assert tree.loss == pytest.approx(flat.loss, rel=1e-5)
    np.testing.assert_allclose(tree.predict(TREE), flat.predict(FLAT), rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_runs_of_several_seeds_share_a_kernel():
    def runs():
        return [
            pfl.Run(pfl.FedAvg(), federation(TREE), Linear(CLASSES), LOCAL, seed=seed)
            for seed in (0, 1)
        ]

    together = pfl.train_replicates(runs(), rounds=2)
    apart = [run.train(rounds=2) for run in runs()]
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one.predict(TREE), other.predict(TREE), rtol=1e-4)


@pytest.mark.slow
def test_pools_of_every_array_are_spread_over_devices(monkeypatch):
    monkeypatch.setattr("pfljax.exchange.pools.GAIN", 0.0)  # examples stay pooled
    found = train(TREE, devices=2)
    np.testing.assert_allclose(found.predict(TREE), trained("tree").predict(TREE), rtol=1e-5)


def test_predictions_are_those_of_numpy():
    result = trained("tree")
    layer = result.export(client=2)[1]["params"]["Dense_0"]
    scores = FLAT @ np.float64(layer["kernel"]) + np.float64(layer["bias"])
    np.testing.assert_allclose(result.predict(TREE, client=2), softmax(scores), rtol=1e-4)


@pytest.mark.slow
def test_all_stores_give_the_same_figures(tmp_path):
    on_device = trained("tree")
    elsewhere = train(TREE, store="disk", out=tmp_path / "run")
    assert elsewhere.loss == pytest.approx(on_device.loss, rel=1e-6)
    np.testing.assert_allclose(elsewhere.predict(TREE), on_device.predict(TREE), rtol=1e-5)
    made = {
        "method": pfl.FedAvg(),
        "model": Linear(CLASSES),
        "clients": federation(TREE),
        "local": LOCAL,
    }
    again = pfl.load(tmp_path / "run", **made)
    np.testing.assert_allclose(again.predict(TREE), elsewhere.predict(TREE), rtol=1e-6)


@pytest.mark.long
def test_private_gradients_are_clipped_over_all_arrays():
    """One example's gradient of the concatenated arrays: the norm is that of both parts together."""
    privacy = pfl.Privacy(clip_norm=0.3)
    tree = train(TREE, privacy=privacy)
    flat = train(FLAT, privacy=privacy)
    free = trained("tree")
    kernels = [each.state.models["Dense_0"]["kernel"] for each in (tree, flat, free)]
    np.testing.assert_allclose(kernels[0], kernels[1], rtol=1e-5, atol=1e-6)
    assert np.abs(kernels[0] - kernels[2]).max() > 1e-3


@pytest.mark.long
def test_newcomers_with_trees_are_scored():
    found = []
    for x in (TREE, FLAT):
        seen, unseen = split_unseen(federation(x), 0.25, seed=1)
        found.append(train(seen, unseen=unseen).summary["unseen"]["accuracy"])
    assert found[0] == found[1] > 0


def test_a_fingerprint_of_the_data_covers_every_array():
    changed = {"image": IMAGE, "meta": META + (np.arange(NUM) == 7)[:, None].astype(np.float32)}
    assert digest(federation(TREE)) == digest(federation(dict(reversed(TREE.items()))))
    assert digest(federation(TREE)) != digest(federation(changed))


def test_trees_are_padded_array_by_array():
    rows = np.arange(NUM) != NUM - 1
    fewer = pfl.Federation.from_arrays(
        {k: v[rows] for k, v in TREE.items()}, Y[rows], client=OWNER[rows]
    )
    small, large = pad_alike([fewer, pfl.Federation.from_arrays(TREE, Y, client=OWNER)])
    for name in TREE:
        assert small.train.x[name].shape == large.train.x[name].shape
        np.testing.assert_array_equal(small.train.x[name][1, :3], fewer.train.x[name][1, :3])


class Pair(NamedTuple):
    a: Any
    b: Any


def test_each_array_is_scaled_on_its_own():
    tokens = RNG.integers(9, size=(NUM, 4))
    for make in (Pair, lambda *both: both):
        clients = federation(make(tokens, 3 * META + 1), standardize=True)
        a, b = clients.train.x
        assert a.dtype == np.int32 and type(clients.train.x) is type(make(1, 2))
        assert clients.scaling
        kept, scaled = clients.scaling(make(tokens, 3 * META + 1))
        np.testing.assert_array_equal(kept, tokens)
        index = clients.train.x[1].index
        train = scaled[index[index >= 0]]
        np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(train.std(axis=0), 1, rtol=1e-5)
        assert {row.tobytes() for row in b.pool} == {row.tobytes() for row in 3 * META + 1}
        read = clients.standardized.train.x[1].rows(np.arange(NUM))
        assert {row.tobytes() for row in read} == {row.tobytes() for row in scaled}


def test_the_scaling_of_a_tree_is_told_and_that_of_training_is_used():
    clients = federation(TREE, standardize=True)
    assert (
        describe.inputs(clients.scaling, clients.inputs)
        == "standardized: mean 0 and standard deviation 1 per channel or feature"
    )
    assert match_classes(clients, clients) is clients
    unseen = match_classes(
        federation({"image": IMAGE, "meta": 2 * META}, standardize=True), clients
    )
    assert unseen.scaling is clients.scaling


def test_a_tuple_of_examples_is_an_array():
    np.testing.assert_array_equal(federation(tuple(META)).train.x.pool, META)


REFUSED = [
    (
        {"image": IMAGE, "meta": META[1:]},
        r"^x\['meta'\]: has 59 rows, but x\['image'\] has 60; accepted: one per",
    ),
    (
        {"image": IMAGE, "meta": META[:, 0]},
        r"^x\['meta'\]: has shape \(60,\); accepted: \(n, \*features\)",
    ),
    ({"names": np.array(["a"] * NUM)}, r"^x\['names'\]: is <U1; accepted: numbers$"),
    (
        {"meta": np.where(META[8, 1] == META, np.nan, META)},
        r"^x\['meta'\]: is NaN or infinite in 1 rows; .* row 8$",
    ),
    ({"meta": np.zeros((NUM, 0))}, r"^x\['meta'\]: is empty, with shape \(60, 0\)"),
    ({}, r"^x: has no arrays; accepted: \(n, \*features\), or a dict"),
]


@pytest.mark.parametrize(("x", "said"), REFUSED)
def test_a_wrong_array_is_named(x, said):
    with pytest.raises(ArgumentError, match=said):
        federation(x)


def test_what_needs_one_array_says_so():
    with pytest.raises(ArgumentError, match=r"^partition: latent needs x to be one array"):
        federation(TREE, partition=data.partitions.Latent())
    with pytest.raises(ArgumentError, match=r"^augment=crop_flip: needs images .*'meta': \(5,\)"):
        pfl.Run(
            pfl.FedAvg(), federation(TREE), Linear(CLASSES), pfl.LocalTraining(augment="crop_flip")
        )
    with pytest.raises(
        ArgumentError, match=r"^model=MLP: fails on inputs of shape \{'image': \(2, 3, 2, 1\), .*: "
    ):
        pfl.Run(pfl.FedAvg(), federation(TREE), pfl.models.MLP())


def test_predictions_need_the_arrays_of_training():
    accepted = r"accepted: \{'image': '\(B, 3, 2, 1\)', 'meta': '\(B, 5\)'\}$"
    for x in (
        META,
        {"image": IMAGE},
        {"image": IMAGE, "meta": META[:, 1:]},
        {"image": IMAGE[1:], "meta": META},
    ):
        with pytest.raises(ArgumentError, match=rf"^x: .*{accepted}"):
            trained("tree").predict(x, client=0)
