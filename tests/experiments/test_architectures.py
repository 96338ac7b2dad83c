"""The architectures that are timed are the same networks in Linen, NNX and PyTorch."""

import importlib.util
import math

import jax
import pytest

from experiments.architectures import ARCHITECTURES, __main__, linen
from pfljax import models
from pfljax.models.structure import by_path

# PyTorch's recurrent layers of 128 add a second bias to each of their gates but the one that Flax's GRU has twice, too.
MORE_BIASES = {"LSTM 2 x 128": 2 * 4 * 128, "GRU 2 x 128": 2 * 2 * 128}


def num_parameters(work, module):
    """Number of parameters, without batch statistics."""
    federation = __main__.clients_of(work._replace(num_clients=2, examples=4))
    dtype = federation.train.x.dtype
    model = models.build(module, work.shape, federation.task, federation.num_classes, dtype=dtype)
    kept = by_path(lambda path: path not in model.network.statistics, model.network.shapes)
    pairs = zip(jax.tree.leaves(model.network.shapes), jax.tree.leaves(kept), strict=True)
    return sum(math.prod(leaf.shape) for leaf, counts in pairs if counts)


FAST = ("McMahan's CNN", "LSTM 2 x 128")  # the others are in the long suite


def each_of_nnx():
    """The architectures that are there in NNX, too."""
    names = [name for name, work in ARCHITECTURES.items() if work.nnx]
    assert set(FAST) <= set(names)
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", each_of_nnx())
def test_linen_and_nnx_have_the_same_parameters(name):
    from experiments.architectures import nnx

    work = ARCHITECTURES[name]
    assert num_parameters(work, getattr(nnx, work.nnx)) == num_parameters(work, work.make())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pytorch_has_the_same_parameters(name):
    torch = pytest.importorskip("torch")
    from experiments import benchmark

    work = ARCHITECTURES[name]
    theirs = sum(leaf.numel() for leaf in benchmark.network_in_torch(torch, work).parameters())
    assert theirs == num_parameters(work, work.make()) + MORE_BIASES.get(name, 0)


def test_a_module_of_pytorch_is_timed_on_its_own_layout():
    torch = pytest.importorskip("torch")
    if importlib.util.find_spec("torchax") is None:
        pytest.skip("needs the extra torch")
    from experiments import benchmark

    work = ARCHITECTURES["McMahan's CNN"]._replace(num_clients=2, examples=4)
    federation = __main__.clients_of(work, channels_first=True)
    assert federation.train.x.shape[2:] == (1, 28, 28)
    module = benchmark.network_in_torch(torch, work)
    model = __main__.model_of(module, federation)
    theirs = sum(leaf.numel() for leaf in module.parameters())
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.network.shapes)) == theirs


def test_tokens_are_followed_by_their_targets():
    work = ARCHITECTURES["decoder 2 x 64"]
    split = __main__.clients_of(work._replace(num_clients=2, examples=4)).train
    assert split.x[...].max() < linen.TOKENS and (split.y[..., :-1] == split.x[...][..., 1:]).all()


@pytest.mark.slow
def test_the_catalog_s_networks_are_those_of_users():
    """Networks that stand both in pfljax and here have the same parameters."""
    names = {
        "McMahan's CNN": "mcmahan_cnn",
        "LeNet": "lenet",
        "CNN 3 x 128": "cnn",
        "MobileNet-V2": "mobilenet_v2",
        "VGG-11": "vgg11",
    }
    for name, own in names.items():
        work = ARCHITECTURES[name]
        model = models.make(own, work.shape, "classification", linen.CLASSES)
        ours = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.network.shapes))
        assert ours == num_parameters(work, work.make())
