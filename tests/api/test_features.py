"""Features behind frozen layers: computed once, and the same figures as computing them in every step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.api import features

RNG = np.random.default_rng(0)
VIT = pfl.models.ViT(outputs=3, patch=2, width=4, depth=2, heads=2, hidden=4)
LAST = [pfl.adapters.lora(rank=1, where="block_1"), "head"]


def vit(trainable=LAST, module=VIT, shape=(4, 4, 1), **options):
    return pfl.Model(
        module,
        frozen=module.init(jax.random.key(1), jnp.zeros((1, *shape))),
        trainable=trainable,
        **options,
    )


def images(**options):
    x = RNG.normal(size=(36, 4, 4, 1))
    y = RNG.integers(3, size=36)
    return pfl.Federation.from_arrays(x, y, np.arange(36) % 3, **options)


def trained(clients, model, method=None, rounds=2, local=None, out=None, resume=False, **execution):
    local = local or pfl.LocalTraining(optax.sgd(0.1), batch_size=4)
    run = pfl.Run(
        method or pfl.Ditto(), clients, model, local, execution=pfl.Execution(**execution)
    )
    return run.train(rounds, out=out, resume=resume, progress=False, eval_every=1)


def same(a, b):
    for old, new in zip(a.history, b.history, strict=True):
        for name in ("train_loss", "loss", "accuracy"):
            np.testing.assert_allclose(old.get(name, 0), new.get(name, 0), rtol=1e-5, atol=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        a.state.rows,
        b.state.rows,
    )


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_figures_are_those_of_computing_them_in_every_step(store):
    clients = images(validation_fraction=0.2)
    cached = trained(clients, vit(), client_store=store)
    whole = trained(clients, vit(), client_store=store, cache_features=False)
    assert cached.experiment.features and not whole.experiment.features
    # four patches and the class token
    assert cached.experiment.federation.train.x.shape[2:] == (5, 4)
    same(cached, whole)
    x = np.float32(RNG.normal(size=(4, 4, 4, 1)))
    np.testing.assert_allclose(cached.predict(x), whole.predict(x), atol=1e-5)
    exported = [result.export(1)[1] for result in (cached, whole)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *exported)


@pytest.mark.long
def test_a_run_goes_on_without_them(tmp_path):
    """They are no part of a run's identity."""
    clients = images()
    trained(clients, vit(), rounds=1, out=tmp_path / "run")
    resumed = trained(
        clients, vit(), rounds=2, out=tmp_path / "run", resume=True, cache_features=False
    )
    same(resumed, trained(clients, vit()))


@pytest.mark.long
def test_tokens_and_heads_that_methods_read_features_of():
    """kNN-Per reads the head's inputs, which are then the features themselves."""
    clients = images()
    for method in (pfl.methods.KNNPer(), pfl.FedPer()):
        same(
            *(
                trained(clients, vit("head"), method, cache_features=cache)
                for cache in (True, False)
            )
        )
    decoder = pfl.models.Transformer(outputs=5, width=4, depth=2, heads=2, hidden=4)
    model = pfl.Model(
        decoder,
        frozen=decoder.init(jax.random.key(1), jnp.zeros((1, 6), jnp.int32)),
        trainable=pfl.adapters.lora(rank=1, where="block_1"),
        frozen_dtype="float32",
    )
    x = RNG.integers(5, size=(12, 6))
    tokens = pfl.Federation.from_arrays(x, np.roll(x, -1, 1), np.arange(12) % 2)
    cached, whole = (trained(tokens, model, cache_features=cache) for cache in (True, False))
    assert cached.experiment.features
    same(cached, whole)


@pytest.mark.slow
def test_each_example_is_computed_once(monkeypatch):
    seen = []
    compute = features.computing

    def counted(*args):
        fn = compute(*args)
        return lambda x: (seen.append(len(x)), fn(x))[1]

    monkeypatch.setattr(features, "computing", counted)
    monkeypatch.setattr(features, "FILL", 0.0)  # in a file, too
    result = trained(images(), vit(), rounds=3)
    assert sum(seen) in (36, 37)  # a pool's last row is zeros
    assert np.isfinite(result.history[-1]["loss"])


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.relu(nn.Dense(6, name="first")(x.reshape(len(x), -1)))
        x = nn.Dense(5, name="second")(nn.Dropout(0.5, deterministic=not train)(x))
        return nn.Dense(3, name="last")(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "local", "why"),
    [
        (lambda: vit(pfl.adapters.lora(rank=1)), {}, "no single array"),
        pytest.param(
            lambda: vit([pfl.adapters.lora(rank=1, where="block"), "head"]),
            {},
            "of the products precede",
            marks=pytest.mark.long,
        ),
        (lambda: vit("last", Dropped()), {}, "random numbers, such as for dropout"),
        pytest.param(vit, {"dtype": "bfloat16"}, "computes in bfloat16", marks=pytest.mark.long),
        pytest.param(
            vit, {"augment": "crop_flip"}, "mini-batches are augmented", marks=pytest.mark.long
        ),
        pytest.param(
            vit,
            {"attack": pfl.Attack("backdoor", attackers=0.3)},
            "attackers stamp a trigger on inputs",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_plan_says_why_they_are_not_cached(model, local, why, said):
    attack = local.pop("attack", None)
    local = pfl.LocalTraining(optax.sgd(0.1), **local)
    pfl.Run(pfl.Local(), images(), model(), local, attack=attack).train(1, progress=False)
    line = next(line for line in said if line.split()[0] == "features")
    assert "computed in every step: " in line and why in line
