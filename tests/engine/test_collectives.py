"""What the devices say to each other, read off the compiled round."""

import re

import jax
import jax.numpy as jnp
import pytest
import toys

from pfljax.engine.plan import make_plan
from pfljax.engine.rounds import make_round
from pfljax.training import loop

FEATURES, CLASSES = 6, 5
CLIENTS = 64  # so that a gathered stack, (64, ...), is like nothing else


def collectives(name, peers, cohort, kind=("map", 0)):
    """(operation, sizes of its results) of a round on four devices."""
    federation = toys.make_federation([3] * CLIENTS, features=FEATURES, classes=CLASSES)
    problem = toys.make_problem(federation, plan=make_plan(*kind, devices=4, peers=peers), cohort=cohort)
    algorithm = toys.make_algorithm(name, problem)
    clients = loop.place(problem.plan, federation.client_data, CLIENTS)
    shape = jax.eval_shape(algorithm.init, jax.random.key(0), clients)
    shardings = toys.shardings(algorithm, problem, clients)
    state = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), shape, shardings)
    one_round = make_round(algorithm, problem.plan, CLIENTS, cohort or CLIENTS)
    lowered = jax.jit(one_round, out_shardings=(shardings, None)).lower(
        jax.random.key(0), jax.ShapeDtypeStruct((), jnp.int32), state, clients
    )
    found = re.findall(r"= (.+?) (all-gather|collective-permute|all-reduce)(?:-start)?\(", lowered.compile().as_text())
    return [(op, re.findall(r"(\w+)\[([\d,]*)\]", shapes)) for shapes, op in found]


def gathered(found):
    return [(kind, shape) for op, results in found if op == "all-gather" for kind, shape in results]


EVERY_KIND = pytest.mark.parametrize("kind", [("map", 0), ("chunk", 5)])  # 16 clients a device do not divide by 5


@EVERY_KIND
@pytest.mark.parametrize("cohort", [0, 16])
def test_own_models_are_gathered_nowhere(cohort, kind):
    found = collectives("local", "gather", cohort, kind)
    assert gathered(found) == []
    assert "all-reduce" in {op for op, _ in found}  # of the mean loss: the reader sees collectives


@EVERY_KIND
@pytest.mark.parametrize("name", ["federico", "fedfomo", "dfedem"])
@pytest.mark.parametrize("cohort", [0, 16])
def test_a_ring_gathers_no_models(name, cohort, kind):
    if name == "dfedem" and cohort:
        pytest.skip("its mixing matrix is for all clients")
    found = collectives(name, "ring", cohort, kind)
    assert not [kind for kind, _ in gathered(found) if kind == "f32"]
    assert "collective-permute" in {op for op, _ in found}
    shapes = [shape.split(",") for kind, shape in gathered(collectives(name, "gather", cohort)) if kind == "f32"]
    stack = [str(cohort or CLIENTS), str(FEATURES), str(CLASSES)]
    assert stack in [[shape[0], *shape[-2:]] for shape in shapes]
