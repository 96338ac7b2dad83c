"""A network that generates models: an embedding -> an MLP -> one linear head for each leaf of a model's parameters.

The MLP is the trunk, which outputs H features. A part of a model has None in place of leaves that are not generated.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.contract import tree
from pfljax.contract.types import Array, ClientContext, ClientData, Key, Params, Prediction, PyTree
from pfljax.local.problem import Problem


class Network(NamedTuple):
    """The parameters: the trunk's layers, and the heads' kernels, leaves (H, ...), and biases, leaves (...)."""

    trunk: PyTree
    kernel: PyTree
    bias: Params


class Learned(NamedTuple):
    """What the server learns: the hypernetwork, and the clients' embeddings (K, E) or what computes them."""

    network: Network
    embeddings: Any


def init(
    key: Key, problem: Problem, bias: Params, widths: tuple[int, ...], spread: Array | float, torch: bool = False
) -> Network:
    """A hypernetwork that generates models near `bias`.

    Args:
        key: Random key for everything but the bias.
        problem: The problem of the method.
        bias: An initial model, or a part of it.
        widths: Sizes of the embedding and of the trunk's layers up to H.
        spread: Standard deviation of a generated leaf around its bias, relative to that of the bias's entries, for
            features of size 1, or with `torch` for a feature vector of length 1.
        torch: Whether the trunk is initialized as in PyTorch, which makes the features small, about 1 all together;
            otherwise as by He et al., whose features keep the size of an embedding's entries, about 1 each.
    """
    trunk_key, head_key = jax.random.split(key)
    keys = jax.random.split(trunk_key, len(widths) - 1)
    dense, length = (torch_layer, 1.0) if torch else (he_layer, widths[-1] ** 0.5)
    trunk = [dense(keys[n], *widths[n : n + 2]) for n in range(len(keys))]

    def head(key, written, leaf):
        scale = 0.0 if written else spread * leaf.std() / length
        return (scale * jax.random.normal(key, (widths[-1], *leaf.shape))).astype(leaf.dtype)

    leaves, treedef = jax.tree.flatten(bias)
    keys = jax.tree.unflatten(treedef, list(jax.random.split(head_key, len(leaves))))
    statistics = problem.model.statistics(bias) or jax.tree.map(lambda _: False, bias)
    return Network(trunk, jax.tree.map(head, keys, statistics, bias), bias)


def start(
    key: Key, problem: Problem, bias: Params, widths: tuple[int, ...], spread: Array | float, torch: bool = False
) -> Learned:
    """A hypernetwork, see `init`, and a random embedding for each of K clients."""
    own_key, network_key = jax.random.split(jax.random.fold_in(key, problem.num_clients))
    draw = lambda client: jax.random.normal(jax.random.fold_in(own_key, client), widths[:1])
    embeddings = problem.plan.over_rows(draw, jnp.arange(problem.num_clients))
    return Learned(init(network_key, problem, bias, widths, spread, torch), embeddings)


def he_layer(key: Key, inputs: int, outputs: int) -> dict[str, Array]:
    """A dense layer that keeps the size of rectified inputs (He et al., 2015)."""
    return {"kernel": jax.nn.initializers.he_normal()(key, (inputs, outputs)), "bias": jnp.zeros(outputs)}


def torch_layer(key: Key, inputs: int, outputs: int) -> dict[str, Array]:
    """PyTorch's `Linear`: weights and biases are uniform between -1 and 1 over the root of the number of inputs."""
    both = jax.random.uniform(key, (inputs + 1, outputs), minval=-1, maxval=1) / inputs**0.5
    return {"kernel": both[:-1], "bias": both[-1]}


def mlp(layers: PyTree, inputs: Array) -> Array:
    """Outputs (n, H) of dense layers for inputs (n, E), with rectifiers between them."""
    for number, layer in enumerate(layers):
        inputs = jax.nn.relu(inputs) if number else inputs
        inputs = inputs @ layer["kernel"] + layer["bias"]
    return inputs


def generate(network: Network, embeddings: Array) -> Params:
    """Generates models (n, ...) from embeddings (n, E)."""
    return jax.tree.map(jnp.add, tree.mix(mlp(network.trunk, embeddings), network.kernel), network.bias)


def newcomer(
    problem: Problem,
    optimizer: optax.GradientTransformation,
    context: ClientContext,
    data: ClientData,
    rest: Params | None = None,
) -> Prediction:
    """As `Algorithm.adapt`: the model of a client unseen in training: it learns an embedding for a fixed hypernetwork.

    It starts from the mean embedding.

    Args:
        problem: The problem of the method.
        optimizer: Optimizer for the embedding.
        context: The client's context; the server's state is what it has `Learned`.
        data: The client's data.
        rest: What of the model is not generated, with None in place of what is; None: nothing.
    """
    learned: Learned = context.server
    whole = lambda part: part if rest is None else tree.combine(part, rest)
    model_of = lambda own: whole(tree.first(generate(learned.network, own[None])))

    def one_round(number, carry):
        own, kept, counts = carry
        theta, back = jax.vjp(model_of, own)
        start = solver.resumed(theta, counts)
        round_key = jax.random.fold_in(context.key, number)
        trained, state, _ = solver.fit(round_key, theta, start, data.train, round_number=number)
        updates, kept = optimizer.update(back(tree.subtract(theta, trained))[0], kept, own)
        return own + updates, kept, solver.lasting(state, theta)

    solver = problem.solver
    own = learned.embeddings.mean(axis=0)
    theta = model_of(own)
    counts = solver.lasting(solver.optimizer.init(theta), theta)
    own, _, _ = jax.lax.fori_loop(0, problem.rounds, one_round, (own, optimizer.init(own), counts))
    return Prediction.one(model_of(own))


def descended(
    descent: optax.GradientTransformationExtraArgs, slope: Learned, learned: Learned, state: PyTree, came: Array
) -> tuple[Learned, PyTree]:
    """What is learned and the optimizer's state after a step along a gradient, if anything `came` back: () bool."""
    updates, moved = descent.update(slope, state, learned)
    new = optax.apply_updates(learned, updates), moved
    return jax.tree.map(lambda a, b: jnp.where(came, a, b), new, (learned, state))


def beside_statistics(
    problem: Problem, optimizer: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """The optimizer for what is `Learned`; a hypernetwork does not generate batch statistics.

    These are biases updated by SGD at rate 1, which sets them to the mean of the clients' statistics.
    """
    optimizers: dict[Hashable, Any] = {"net": optimizer, "statistic": optax.sgd(1.0), "fixed": optax.set_to_zero()}

    def label(learned: Learned) -> Learned:
        labels, written = jax.tree.map(lambda _: "net", learned), problem.model.statistics(learned.network.bias)
        if written is None:
            return labels
        mark = lambda kind: jax.tree.map(lambda statistic: kind if statistic else "net", written)
        return labels._replace(network=labels.network._replace(bias=mark("statistic"), kernel=mark("fixed")))

    return optax.partition(optimizers, label)
