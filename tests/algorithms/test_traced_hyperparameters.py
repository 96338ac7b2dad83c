"""Values of a hyperparameter share a kernel: `build` accepts traced numbers, with the same results as Python's."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import optax
import pytest
import toys

from pfljax.algorithms import METHODS
from pfljax.exchange.rounds import make_round
from pfljax.settings.fields import value_type

OTHERWISE = 0.5  # for hyperparameters that are not given by default


def numbers_of(name):
    """The hyperparameters that may be traced, with their defaults."""
    hints = typing.get_type_hints(METHODS[name])
    fields = [field for field in dataclasses.fields(METHODS[name]) if not field.metadata["static"]]
    numbers = {
        field.name: field.default for field in fields if value_type(hints[field.name]) is float
    }
    return {
        hyperparameter: OTHERWISE if value is None else value
        for hyperparameter, value in numbers.items()
    }


def rounds_of(name):
    """Hyperparameters -> (the state after two rounds, what clients predict with, what newcomers predict with)."""
    federation = toys.make_federation((3, 5, 2, 4))
    network = {"hidden": (3,)} | toys.required(name)
    problem = toys.make_problem(federation, optax.sgd(0.1), batch_size=2, **network)
    clients = jax.tree.map(jnp.asarray, federation.client_data)
    key = jax.random.key(0)

    def play(hyperparameters, learning_rate=0.1):
        algorithm = toys.make_algorithm(
            name, problem._replace(learning_rate=learning_rate), **hyperparameters
        )
        one_round = make_round(algorithm, problem.plan, problem.cohort_size)
        state = toys.init(algorithm, problem, key, clients)
        state = jax.lax.fori_loop(
            0, 2, lambda number, state: one_round(key, number, state, clients)[0], state
        )
        return state, *(
            serve(algorithm, problem, key, state, clients) for serve in (toys.predict, toys.adapt)
        )

    return play


def forms(tree):
    """Shapes and types of all leaves."""
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


TRACED = [name for name in METHODS if numbers_of(name)]


@pytest.mark.parametrize("name", ["fedavgm", "pfedme", "clustered"])  # of all: the slow test below
def test_numbers_may_be_traced(name):
    play = rounds_of(name)
    hyperparameters = numbers_of(name)
    traced = jax.eval_shape(
        play,
        {hyperparameter: jnp.float32(value) for hyperparameter, value in hyperparameters.items()},
    )
    assert forms(traced) == forms(jax.eval_shape(lambda: play(hyperparameters)))


def test_the_learning_rate_may_be_traced():
    play = rounds_of("q_ffl")
    traced = jax.eval_shape(lambda rate: play({}, rate), jnp.float32(0.1))
    assert forms(traced) == forms(jax.eval_shape(lambda: play({})))


@toys.each_method(among=TRACED, fast=("fedavgm",), slow=toys.VARIED)
def test_a_traced_number_counts_as_it_does_in_python(name):
    play = rounds_of(name)
    hyperparameters = numbers_of(name)
    traced = jax.jit(play)(
        {hyperparameter: jnp.float32(value) for hyperparameter, value in hyperparameters.items()}
    )
    toys.assert_trees_close(traced, jax.jit(lambda: play(hyperparameters))(), rtol=1e-5, atol=1e-6)
