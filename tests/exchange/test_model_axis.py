"""One client's model on two devices: the same states as on one device, with the parameters spread."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
import toys
from jax.sharding import PartitionSpec

from pfljax.exchange.model_axis import parts
from pfljax.exchange.plan import make_plan

SIZES = (4, 3, 5, 2)
FEDERATION = toys.make_federation(SIZES, features=32)
HIDDEN = (64, 32)  # the first layer's outputs are spread, and the second one's inputs
KERNELS = {"Dense_0": (2, (32, 32)), "Dense_1": (1, (32, 32))}  # the dimension that is cut, and a device's part
PLANS = [("map", 0), ("vmap", 0), ("chunk", 2)]


def problem_of(plan, cohort):
    return toys.make_problem(
        FEDERATION, optax.adam(0.05), plan=plan, cohort=cohort, hidden=HIDDEN, batch_size=2, keep_optimizer=True
    )


@functools.cache
def states(name, cohort, plan, rounds=2):
    problem = problem_of(make_plan(*plan), cohort)
    algorithm = toys.make_algorithm(name, problem)
    return toys.train(algorithm, problem, FEDERATION.client_data, rounds)[0]


def assert_spread(stack, rows):
    """The two large kernels are cut; everything else is whole, with these rows on a device."""
    for layer, leaves in stack.items():
        cut, part = KERNELS.get(layer, (None, leaves["kernel"].shape[1:]))
        first = ("clients",) if rows < leaves["kernel"].shape[0] else (None,) if cut else ()
        spec = PartitionSpec(*first, *[None] * ((cut or 1) - 1), *["model"] * bool(cut))
        assert leaves["kernel"].sharding.spec == spec
        assert {each.data.shape for each in leaves["kernel"].addressable_shards} == {(rows, *part)}
        assert {each.data.shape[0] for each in leaves["bias"].addressable_shards} == {rows}


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind[0])
@pytest.mark.parametrize(("name", "peers"), [("fedavg", "auto"), ("federico", "gather"), ("federico", "ring")])
@pytest.mark.parametrize("cohort", [0, 3])
def test_models_on_two_devices_train_as_on_one(name, peers, kind, cohort):
    expected = states(name, cohort, ("map", 0, 1))[-1]
    found = states(name, cohort, (*kind, 4, peers, 2))[-1]
    toys.assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)
    rows = 1 if name == "fedavg" else 2
    assert_spread(found.models, rows)
    if name == "federico":  # Adam's moments of the first layer
        kernels = [leaf for leaf in jax.tree.leaves(found.optimizer) if leaf.shape[-2:] == (32, 64)]
        assert len(kernels) == 2 and all(leaf.sharding.spec[-1] == "model" for leaf in kernels)
