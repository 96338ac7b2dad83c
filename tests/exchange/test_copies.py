"""Copies in memory in the compiled round."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toys

from pfljax.algorithms import METHODS
from pfljax.exchange.plan import make_plan
from pfljax.exchange.rounds import make_round

CLIENTS = 13  # so that a loop of 13 steps is one over clients, and (13, ...) a stack of them


def computations(text):
    """The lines of each computation of a module, by name."""
    heads = re.findall(
        r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL
    )
    return {name: lines.splitlines() for name, lines in heads}


def loops_over_clients(text):
    """The names of the computations that run once for every client."""
    lines = computations(text)
    found = set()
    for line in text.splitlines():
        if f'"known_trip_count":{{"n":"{CLIENTS}"}}' in line:
            found.update(re.findall(r"body=%?([\w.\-]+)", line))
    waiting = list(found)
    while waiting:
        called = re.findall(
            r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", "\n".join(lines[waiting.pop()])
        )
        waiting += [name for name in called if name not in found]
        found.update(called)
    return {name: lines[name] for name in found}


def copied_stacks(text):
    """Copies of whole stacks (at least one entry per client and coordinate) made for every client."""
    copies = re.compile(r"= \w+\[(\d+(?:,\d+)+)\]\S* copy\(")
    shapes = [
        m[1].split(",")
        for lines in loops_over_clients(text).values()
        for m in map(copies.search, lines)
        if m
    ]
    return [
        shape
        for shape in shapes
        if str(CLIENTS) in shape and np.prod([int(n) for n in shape]) >= CLIENTS * 24
    ]


def compiled(name, optimizer):
    federation = toys.make_federation((5,) * CLIENTS, features=24)
    plan = make_plan("map", devices=1)
    network = toys.required(name, 24, 16) or {"hidden": (16,)}
    problem = toys.make_problem(federation, optimizer, plan=plan, batch_size=2, **network)
    algorithm = toys.make_algorithm(name, problem)
    clients = jax.tree.map(jnp.asarray, federation.client_data)
    state = jax.eval_shape(
        functools.partial(toys.init, algorithm, problem), jax.random.key(0), clients
    )
    one_round = jax.jit(make_round(algorithm, plan, CLIENTS), donate_argnums=2)
    return one_round.lower(jax.random.key(0), jnp.int32(0), state, clients).compile().as_text()


# A client of federico_centralized works on all K models, by definition.
ON_ONE = [name for name in METHODS if name != "federico_centralized"]


@toys.each_method(ON_ONE, fast=("scaffold",), slow=("local", "fedem", "apple"))
def test_no_client_s_step_copies_the_stack_of_all(name):
    text = compiled(name, optax.adam(0.1))
    assert loops_over_clients(text)
    assert copied_stacks(text) == []


def test_copies_in_loops_over_clients_are_found():
    def step(stack, at):  # reads a row again after another has been written
        row = jax.lax.dynamic_slice_in_dim(stack, at, 1)
        return jax.lax.dynamic_update_slice_in_dim(
            stack, row + 1, CLIENTS - 1 - at, 0
        ), row + stack[at]

    stack = jnp.zeros((CLIENTS, 24))
    text = (
        jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(CLIENTS)))
        .lower(stack)
        .compile()
        .as_text()
    )
    assert copied_stacks(text)
