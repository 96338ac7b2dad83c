"""Communication between devices in the compiled round."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from toy_methods import PARAMETERS, data_of, make, neighbors, step_to_mean

from pfljax.contract.types import ClientOutput, ClientReport, Upload
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_plan
from pfljax.exchange.rounds import make_round

CLIENTS = 64  # so that a gathered stack, (64, ...), is like nothing else


def push(context, models, row, data):
    upload = jax.tree.map(lambda leaf: leaf[0], models)
    return ClientOutput(
        row, Upload(upload), ClientReport(jnp.zeros(())), mixing_weights=jnp.full((4,), 0.25)
    )


def look_up(context, row, cohort):
    absent = cohort.position(jnp.arange(CLIENTS)) < 0
    return jnp.where(absent.sum() < CLIENTS, neighbors(3)(context, row, cohort), 0)


METHODS = {
    "own": make(step_to_mean, topology="own"),
    "peers": make(step_to_mean, topology="peers", download=neighbors(3)),
    "looks_up": make(step_to_mean, topology="peers", download=look_up),
    "push": make(push, topology="push", download=neighbors(3)),
}


@functools.cache
def collectives(name, peers, cohort, kind=("map", 0)):
    """(operation, sizes of its results) of a round on four devices."""
    algorithm = METHODS[name]
    plan = make_plan(*kind, devices=4, peers=peers)
    clients = data_of([3] * CLIENTS)

    def spread(leaf, rows):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=plan.sharding(leaf, by_rows=rows)
        )

    shape = jax.eval_shape(
        functools.partial(lifting.init, algorithm, plan), jax.random.key(0), clients
    )
    state = jax.tree.map(lambda leaf: spread(leaf, False), shape)
    state = state._replace(clients=jax.tree.map(lambda leaf: spread(leaf, True), shape.clients))
    one_round = make_round(algorithm, plan, cohort or CLIENTS)
    lowered = jax.jit(
        one_round, out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state), None)
    ).lower(
        jax.random.key(0),
        jax.ShapeDtypeStruct((), jnp.int32),
        state,
        jax.tree.map(lambda leaf: spread(leaf, True), clients),
    )
    found = re.findall(
        r"= (.+?) (all-gather|collective-permute|all-reduce)(?:-start)?\(",
        lowered.compile().as_text(),
    )
    return [(op, re.findall(r"(\w+)\[([\d,]*)\]", shapes)) for shapes, op in found]


def gathered(found):
    return [(kind, shape) for op, results in found if op == "all-gather" for kind, shape in results]


# 16 clients a device do not divide by 5
MAP = ("map", 0)
CHUNK = ("chunk", 5)


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("cohort", "kind"), [(16, CHUNK), long(0, MAP), long(0, CHUNK), long(16, MAP)]
)
def test_own_models_are_gathered_nowhere(cohort, kind):
    found = collectives("own", "gather", cohort, kind)
    assert gathered(found) == []
    assert "all-reduce" in {op for op, _ in found}  # of the mean loss: the reader sees collectives


@pytest.mark.parametrize(
    ("cohort", "name", "kind"),
    [
        (16, "peers", MAP),
        (0, "push", CHUNK),
        *(long(cohort, "peers", kind) for cohort, kind in ((16, CHUNK), (0, MAP), (0, CHUNK))),
        *(long(cohort, "push", kind) for cohort, kind in ((16, CHUNK), (0, MAP), (16, MAP))),
    ],
)
def test_a_ring_gathers_no_models(name, cohort, kind):
    found = collectives(name, "ring", cohort, kind)
    assert not [kind for kind, _ in gathered(found) if kind == "f32"]
    assert "collective-permute" in {op for op, _ in found}


@pytest.mark.parametrize("cohort", [long(0), 16])
def test_only_received_models_are_gathered(cohort):
    """Peers' models travel; under push, clients receive none."""
    stack = ("f32", f"{cohort or CLIENTS},{PARAMETERS}")
    assert stack in gathered(collectives("peers", "gather", cohort))
    assert not [
        kind for kind, _ in gathered(collectives("push", "gather", cohort)) if kind == "f32"
    ]


def test_to_look_up_the_cohort_takes_no_collectives():
    """Independent ones could starve each other on the two threads of a small CPU."""
    assert collectives("looks_up", "gather", 16) == collectives("peers", "gather", 16)
