"""Networks whose predictions or training depend on what else is in the mini-batch."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import pfljax as pfl
from pfljax import models
from pfljax.training.mixing import unevenly_filled

RNG = np.random.default_rng(0)


class Images(nn.Module):
    """A convolution of what it takes for one image: mini-batches of images without channels."""

    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.relu(nn.Conv(4, (3, 3))(x)).reshape(x.shape[0], -1))


class Mixed(nn.Module):
    """A linear model of inputs, or with outputs, that are changed by a function of the mini-batch."""

    num_classes: int
    inputs: str = "none"

    @nn.compact
    def __call__(self, x):
        x = CHANGES[self.inputs](x)
        return nn.Dense(self.num_classes)(x)


CHANGES = {
    "none": lambda x: x,
    "centered over axis 0": lambda x: x - x.mean(axis=0),
    "softmax over axis 0": lambda x: jax.nn.softmax(x, axis=0),
    "divided by the largest": lambda x: x / jnp.abs(x).max(),
    "divided by their number": lambda x: x / x.shape[0] ** 0.5,
    "in reverse": lambda x: x[::-1],
    "the place added": lambda x: x + jnp.arange(x.shape[0])[:, None],
    "the neighbor added": lambda x: x + jnp.roll(x, 1, axis=0),
    "normalized by itself": lambda x: x / (1e-6 + jnp.linalg.norm(x, axis=-1, keepdims=True)),
    "sorted": lambda x: jnp.sort(x, axis=-1),
}


class OfNNX(nnx.Module):
    def __init__(self, num_classes, rngs):
        self.head = nnx.Linear(4, num_classes, rngs=rngs)

    def __call__(self, x):
        return self.head(x - x.mean(axis=0))


class OfTokens(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(
            nn.Embed(8, 4)(x).mean(axis=0)[None].repeat(x.shape[0], 0).reshape(x.shape[0], -1)
        )


class OfDicts(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(
            jnp.concatenate([x["a"], jax.nn.softmax(x["b"], axis=0)], axis=-1)
        )


class Plain(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(x)


class OwnStatistics(nn.Module):
    """Statistics of all positions of a mini-batch, padding included."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(x.shape[-1]))
        if train and not self.is_initializing():
            mean.value = 0.9 * mean.value + 0.1 * x.mean(axis=0)
        return nn.Dense(self.num_classes)(x - mean.value)


class Normalized(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(self.num_classes)(nn.BatchNorm(use_running_average=not train)(x))


def floats(*shape):
    return RNG.normal(size=(24, *shape)).astype(np.float32)


def clients_of(x, sizes=(6, 6, 6, 6), **options):
    client = np.repeat(np.arange(len(sizes)), sizes)
    num = len(client)
    x = jax.tree.map(lambda leaf: leaf[:num], x)
    test = np.concatenate([np.arange(size) < 2 for size in sizes])
    options = {"client": client, "is_test": test, "standardize": False} | options
    return pfl.Federation.from_arrays(x, np.arange(num) % 2, **options)


def start(model, clients, **options):
    run = pfl.Run(
        pfl.FedAvg(), clients, model, pfl.LocalTraining(optax.sgd(0.1), batch_size=2), **options
    )
    return run.train(rounds=1)


def test_gray_images_without_a_channel_axis_into_a_convolution_are_refused():
    with pytest.raises(
        pfl.ArgumentError, match=r"^model=Images: a prediction depends on .*x\[\.\.\., None\]"
    ):
        start(Images(2), clients_of(floats(8, 8)))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        pytest.param(
            Mixed(2, change), floats(4), id=change, marks=() if number == 0 else pytest.mark.slow
        )
        for number, change in enumerate(list(CHANGES)[1:8])
    ]
    + [
        pytest.param(OfNNX, floats(4), id="NNX", marks=pytest.mark.slow),
        pytest.param(
            OfTokens(2), RNG.integers(8, size=(24, 5)), id="tokens", marks=pytest.mark.slow
        ),
        pytest.param(
            OfDicts(2), {"a": floats(3), "b": floats(2)}, id="dicts", marks=pytest.mark.slow
        ),
        pytest.param(
            {"good": Plain(2), "bad": Mixed(2, "in reverse")},
            floats(4),
            id="two",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_network_that_mixes_examples_is_refused(model, x):
    method = pfl.methods.FedProto() if isinstance(model, dict) else pfl.FedAvg()
    with pytest.raises(
        pfl.ArgumentError, match=r"^model=.*: a prediction depends on the other examples"
    ):
        pfl.Run(method, clients_of(x), model).train(rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("change", list(CHANGES)[8:])
def test_a_network_that_keeps_examples_apart_is_accepted(change):
    start(Mixed(2, change), clients_of(floats(4)))


@pytest.mark.slow
def test_every_entry_refuses_it():
    clients = clients_of(floats(4), validation_fraction=0.3)
    model = Mixed(2, "in reverse")
    entries = [
        lambda: pfl.Simulation(pfl.FedAvg(), clients, model),
        lambda: pfl.compare([pfl.FedAvg(), pfl.Local()], clients, model, rounds=1),
        lambda: pfl.tune(pfl.FedProx(), clients, model, rounds=1, learning_rates=(0.1, 0.01)),
    ]
    for entry in entries:
        with pytest.raises(pfl.ArgumentError, match="a prediction depends on the other examples"):
            entry()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes", "told"),
    [
        (OwnStatistics(2), (6, 5), True),  # three examples in batches of two
        (OwnStatistics(2), (6, 4), False),
        (Normalized(2), (6, 5), False),
    ],
)
def test_statistics_that_see_padding_are_told_where_it_matters(model, sizes, told):
    """Where every mini-batch is full, or the examples are repeated equally often, it does not."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pfl.Run(
            pfl.FedAvg(), clients_of(floats(4), sizes), model, pfl.LocalTraining(optax.sgd(0.1))
        ).train(rounds=1)
    texts = [str(each.message) for each in seen if str(each.message).startswith("model:")]
    assert len(texts) == told
    assert (
        not told
        or "a layer other than BatchNorm of Flax or PyTorch sees the examples that fill mini-batches up"
        in texts[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", ["all", "test", "train"])
def test_tokens_out_of_range_are_told_as_losses_that_are_not_finite_from_the_start(part, said):
    """Not as training that diverged: no learning rate helps."""

    class Tokens(nn.Module):
        num_classes: int

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.num_classes)(nn.Embed(8, 4)(x).mean(axis=1))

    x = RNG.integers(8, size=(24, 5))
    in_test = np.arange(24) % 6 < 2
    x[{"all": in_test | True, "test": in_test, "train": ~in_test}[part], 0] = 12
    run = pfl.Run(pfl.FedAvg(), clients_of(x), Tokens(2), pfl.LocalTraining(optax.sgd(0.1)))
    with pytest.raises(pfl.RunError) as error:
        run.train(rounds=1)
    said.append(str(error.value))
    (line,) = [each for each in said if "the initial models: " in each]
    where = "train" if part == "train" else "test"
    assert f"on its {where} examples" in line and "no learning rate helps" in line
    assert not any("smaller learning rate" in each for each in said)


def test_clients_with_unevenly_filled_mini_batches_are_counted():
    """Mini-batches of 4: the last ones have 4, 1, 3, 2, 3 and 0 examples; one client has none."""
    solver = pfl.LocalTraining(optax.sgd(0.1), batch_size=4).bind(
        models.build(Plain(2), (4,), "classification", 2)
    )
    sizes = np.array([8, 5, 3, 6, 7, 0])
    assert unevenly_filled(solver, sizes, 8) == 4  # no mask: all that are not full
    normalized = pfl.LocalTraining(optax.sgd(0.1), batch_size=4)
    normalized = normalized.bind(models.build(Normalized(2), (4,), "classification", 2))
    assert unevenly_filled(normalized, sizes, 8) == 2  # 1 and 2 examples are repeated equally often
