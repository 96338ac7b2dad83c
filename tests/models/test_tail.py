"""Networks that are cut after their frozen layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pfljax import models
from pfljax.models.tail import cut_network, features_before_cut

INPUTS = 3
HIDDEN = 5
OUTPUTS = 2


class ThreeLayers(nn.Module):
    """Dense layers with rectifiers between them."""

    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(HIDDEN, name="first")(x))
        hidden = nn.relu(nn.Dense(HIDDEN, name="second")(hidden))
        return nn.Dense(OUTPUTS, name="last")(hidden)


def network(trainable):
    """The network, of which only some layers are trained, and all its variables."""
    module = ThreeLayers()
    variables = module.init(jax.random.key(0), jnp.zeros((1, INPUTS)))
    model = models.Model(module, frozen=variables, trainable=trainable, frozen_dtype="float32")
    return models.build(model, (INPUTS,), "classification", OUTPUTS).network, variables


def test_features_are_the_outputs_of_the_frozen_layers():
    full, variables = network(["second", "last"])
    cut = cut_network(full)
    x = np.random.default_rng(0).normal(size=(7, INPUTS)).astype(np.float32)
    layer = variables["params"]["first"]
    hidden = np.maximum(x @ layer["kernel"] + layer["bias"], 0)

    assert cut.example.shape[1:] == (HIDDEN,)
    features = features_before_cut(cut, jnp.asarray(x))
    np.testing.assert_allclose(features, hidden, rtol=1e-5, atol=1e-6)


def test_layers_before_all_frozen_ones_leave_no_features():
    full, _ = network("first")
    assert "no single array" in cut_network(full)


def test_a_frozen_layer_whose_outputs_methods_may_read_is_not_cut_off():
    full, _ = network("last")
    assert "frozen hidden layer" in cut_network(full)
