"""A network that generates models: an embedding -> an MLP -> one linear head for each leaf of a model's parameters.

Its parameters are a tree {"trunk": layers, "kernel": leaves (H, ...), "bias": leaves (...)}; the trunk outputs H
features.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pfljax.contract import tree
from pfljax.contract.types import Array, ClientData, Key, Params, PyTree
from pfljax.local.problem import Problem
from pfljax.models import Model


def init(key: Key, model: Model, bias: Params, widths: tuple[int, ...], spread: Array | float) -> PyTree:
    """A hypernetwork that generates models near `bias`.

    Args:
        key: Random key for everything but the bias.
        model: Network of the generated models.
        bias: An initial model.
        widths: Sizes of the embedding and of the trunk's layers up to H.
        spread: Standard deviation of a generated leaf around its bias, relative to that of the bias's entries, for
            features of size 1.
    """
    trunk_key, head_key = jax.random.split(key)
    dense = jax.nn.initializers.he_normal()
    keys = jax.random.split(trunk_key, len(widths) - 1)
    trunk = [{"kernel": dense(keys[n], widths[n : n + 2]), "bias": jnp.zeros(widths[n + 1])} for n in range(len(keys))]

    def head(key, written, leaf):
        scale = 0.0 if written else spread * leaf.std() / widths[-1] ** 0.5
        return (scale * jax.random.normal(key, (widths[-1], *leaf.shape))).astype(leaf.dtype)

    leaves, treedef = jax.tree.flatten(bias)
    keys = jax.tree.unflatten(treedef, list(jax.random.split(head_key, len(leaves))))
    statistics = model.statistics(bias) or jax.tree.map(lambda _: False, bias)
    return {"trunk": trunk, "kernel": jax.tree.map(head, keys, statistics, bias), "bias": bias}


def generate(network: PyTree, embeddings: Array) -> Params:
    """Generates models (n, ...) from embeddings (n, E)."""
    features = embeddings
    for number, layer in enumerate(network["trunk"]):
        features = jax.nn.relu(features) if number else features
        features = features @ layer["kernel"] + layer["bias"]
    return jax.tree.map(jnp.add, tree.mix(features, network["kernel"]), network["bias"])


def embedded(
    problem: Problem, optimizer: optax.GradientTransformation, key: Key, learned: PyTree, data: ClientData
) -> Params:
    """The model of a client unseen in training: it learns an embedding for a fixed hypernetwork.

    Args:
        problem: The problem of the method.
        optimizer: Optimizer for the embedding.
        key: The client's key.
        learned: {"network": the hypernetwork, "embeddings": the K clients' embeddings (K, E)}; it starts from their
            mean.
        data: The client's data.
    """
    model_of = lambda own: tree.first(generate(learned["network"], own[None]))

    def one_round(number, carry):
        own, kept = carry
        theta, back = jax.vjp(model_of, own)
        start, round_key = problem.solver.optimizer.init(theta), jax.random.fold_in(key, number)
        trained, _, _ = problem.solver.fit(round_key, theta, start, data.train, round_number=number)
        updates, kept = optimizer.update(back(tree.subtract(theta, trained))[0], kept, own)
        return own + updates, kept

    own = learned["embeddings"].mean(axis=0)
    own, _ = jax.lax.fori_loop(0, problem.rounds, one_round, (own, optimizer.init(own)))
    return model_of(own)


def beside_statistics(model: Model, optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimizer for {"network": a hypernetwork, ...}, which does not generate batch statistics.

    These are biases updated by SGD at rate 1, which sets them to the mean of the clients' statistics.
    """
    optimizers: dict[Hashable, Any] = {"net": optimizer, "statistic": optax.sgd(1.0), "fixed": optax.set_to_zero()}

    def label(parameters: PyTree) -> PyTree:
        labels = jax.tree.map(lambda _: "net", parameters)
        if (written := model.statistics(parameters["network"]["bias"])) is not None:
            for part, kind in (("bias", "statistic"), ("kernel", "fixed")):
                labels["network"][part] = jax.tree.map(lambda s, kind=kind: kind if s else "net", written)
        return labels

    return optax.partition(optimizers, label)
