"""Random numbers of methods: nothing that a client draws has the key of something else.

The contract tests check every method with its defaults; these are cases in which more is drawn.
"""

import functools

import jax
import numpy as np
import pytest
import toys
from keys import misused

from pfljax.exchange.rounds import make_round

SIZES = (4, 3)
CLASSES = 3


def federation_of(sizes=SIZES):
    return toys.make_federation(sizes, "classification", seed=3)


def with_dropout(federation, loss=None, **options):
    """A problem whose training draws numbers for each mini-batch of two."""
    model = toys.Dropped(federation.num_classes)
    return toys.make_problem(federation, model=model, batch_size=2, loss=loss, **options)


class SeenKeys:
    """A loss that notes the key of each call on real examples.

    Attributes:
        noted: The keys' data, in the order of the calls.
    """

    def __init__(self, federation):
        self.loss = with_dropout(federation).solver.loss
        self.noted = []

    def __call__(self, params, x, y, key=None):
        if key is not None:
            jax.debug.callback(self.note, jax.random.key_data(key.key))
        return self.loss(params, x, y, key)

    def note(self, data):
        self.noted.append(tuple(np.asarray(data).ravel().tolist()))


@pytest.mark.parametrize(
    ("name", "hyperparameters"),
    [
        ("fednova", {"max_epochs": 3}),  # which draws the number of epochs
        ("floco", {}),  # a point for each mini-batch
        ("pfedhn", {}),  # embeddings and a hypernetwork
    ],
)
def test_no_key_is_used_twice(name, hyperparameters):
    federation = federation_of()
    problem = with_dropout(federation)
    algorithm = toys.make_algorithm(name, problem, **hyperparameters)
    clients = federation.client_data
    begin = functools.partial(toys.init, algorithm, problem)
    one_round = make_round(algorithm, problem.plan, problem.cohort_size)

    first = jax.make_jaxpr(begin, return_shape=True)(jax.random.key(0), clients)
    assert misused(first[0].jaxpr) == []
    later = jax.make_jaxpr(one_round)(jax.random.key(0), np.int32(0), first[1], clients)
    assert misused(later.jaxpr) == []


def test_pfedmb_learns_its_weights_and_its_branches_with_keys_of_their_own():
    federation = federation_of()
    loss = SeenKeys(federation)
    problem = with_dropout(federation, loss=loss)
    algorithm = toys.make_algorithm("pfedmb", problem)
    toys.train(algorithm, problem, federation.client_data, rounds=1)
    jax.effects_barrier()
    steps = sum(-(-size // 2) for size in SIZES)
    assert len(loss.noted) == 2 * steps
    assert len(set(loss.noted)) == 2 * steps


def test_newcomers_of_a_hypernetwork_draw_anew_in_each_round():
    federation = federation_of()
    loss = SeenKeys(federation)
    problem = with_dropout(federation, loss=loss, rounds=3)
    algorithm = toys.make_algorithm("pfedhn", problem)
    state = toys.start(algorithm, problem, federation.client_data)
    newcomer = federation_of((4,)).client_data
    toys.adapt(algorithm, problem, jax.random.key(1), state, newcomer)
    jax.effects_barrier()
    steps = 3 * 2
    assert len(loss.noted) == steps
    assert len(set(loss.noted)) == steps
