"""A network that generates models: an embedding -> an MLP -> one linear head for each leaf of a model's parameters.

The MLP is the trunk, which outputs H features. A part of a model has None in place of leaves that
are not generated.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from pfljax.contract import tree
from pfljax.contract.types import Array, ClientContext, ClientData, Key, Params, PyTree
from pfljax.local.problem import Problem
from pfljax.local.solver import TrainState


class Network(NamedTuple):
    """The parameters of a hypernetwork.

    Attributes:
        trunk: The trunk's layers, a list of {"kernel": (inputs, outputs), "bias": (outputs,)}.
        kernel: The heads' kernels, leaves (H, ...).
        bias: The heads' biases, leaves (...).
    """

    trunk: PyTree
    kernel: PyTree
    bias: Params


class Learned(NamedTuple):
    """What the server trains.

    Attributes:
        network: The hypernetwork's parameters.
        embeddings: The clients' embeddings (K, E), or the parameters of a network that computes them.
    """

    network: Network
    embeddings: Any


# ---- Initial networks.


def init(
    key: Key,
    problem: Problem,
    bias: Params,
    widths: tuple[int, ...],
    spread: Array | float,
    torch: bool = False,
) -> Network:
    """A hypernetwork that generates models near `bias`.

    Args:
        key: Random key for everything but the bias.
        problem: The problem of the method.
        bias: An initial model, or a part of it.
        widths: Sizes of the embedding and of the trunk's layers up to H.
        spread: Standard deviation of a generated leaf around its bias, relative to that of the
            bias's entries, for features of size 1, or with `torch` for a feature vector of length 1.
        torch: Whether the trunk is initialized as in PyTorch, which makes the features small, about
            1 all together; otherwise as by He et al., whose features keep the size of an
            embedding's entries, about 1 each.
    """
    trunk_key, head_key = jax.random.split(key)
    num_features = widths[-1]

    # The trunk, and the length that its feature vectors then have
    if torch:
        init_layer = torch_layer
        feature_length = 1.0
    else:
        init_layer = he_layer
        feature_length = num_features**0.5
    layer_keys = jax.random.split(trunk_key, len(widths) - 1)
    trunk = [
        init_layer(layer_keys[n], inputs=widths[n], outputs=widths[n + 1])
        for n in range(len(layer_keys))
    ]

    def head_kernel(key: Key, is_statistic: bool, leaf: Array) -> Array:
        """Batch statistics are not generated: their kernels are 0, and stay so."""
        scale = 0.0 if is_statistic else spread * leaf.std() / feature_length
        kernel = scale * jax.random.normal(key, (num_features, *leaf.shape))
        return kernel.astype(leaf.dtype)

    # The heads: a random kernel for each leaf of the bias
    leaves, treedef = jax.tree.flatten(bias)
    head_keys = jax.random.split(head_key, len(leaves))
    keys = jax.tree.unflatten(treedef, list(head_keys))
    is_statistic = problem.model.statistics(bias)
    if is_statistic is None:
        is_statistic = jax.tree.map(lambda _: False, bias)
    kernel = jax.tree.map(head_kernel, keys, is_statistic, bias)
    return Network(trunk, kernel, bias)


def init_learned(
    key: Key,
    problem: Problem,
    bias: Params,
    widths: tuple[int, ...],
    spread: Array | float,
    torch: bool = False,
) -> Learned:
    """A hypernetwork, see `init`, and a random embedding for each of K clients."""
    num_clients = problem.num_clients
    # The numbers below K are those of initial models.
    learned_key = jax.random.fold_in(key, num_clients)
    embedding_key, network_key = jax.random.split(learned_key)

    def draw_embedding(client: Array) -> Array:
        client_key = jax.random.fold_in(embedding_key, client)
        return jax.random.normal(client_key, widths[:1])

    embeddings = problem.plan.over_rows(draw_embedding, jnp.arange(num_clients))
    network = init(
        network_key,
        problem,
        bias=bias,
        widths=widths,
        spread=spread,
        torch=torch,
    )
    return Learned(network, embeddings)


def he_layer(key: Key, inputs: int, outputs: int) -> dict[str, Array]:
    """A dense layer that keeps the size of rectified inputs (He et al., 2015)."""
    kernel = jax.nn.initializers.he_normal()(key, (inputs, outputs))
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def torch_layer(key: Key, inputs: int, outputs: int) -> dict[str, Array]:
    """PyTorch's `Linear`: weights and biases are uniform between -1 and 1 over the root of the number of inputs."""
    rows = jax.random.uniform(key, (inputs + 1, outputs), minval=-1, maxval=1) / inputs**0.5
    return {"kernel": rows[:-1], "bias": rows[-1]}


# ---- What networks compute.


def mlp(layers: PyTree, inputs: Array) -> Array:
    """Outputs (n, H) of dense layers for inputs (n, E), with rectifiers between them."""
    for number, layer in enumerate(layers):
        if number:
            inputs = nn.relu(inputs)
        dense = nn.Dense(len(layer["bias"]))
        inputs = cast(Array, dense.apply({"params": layer}, inputs))
    return inputs


def generate(network: Network, embeddings: Array) -> Params:
    """Generates models (n, ...) from embeddings (n, E)."""
    features = mlp(network.trunk, embeddings)
    products = tree.mix(features, network.kernel)
    return tree.add(products, network.bias)


# ---- The server's step.


def server_optimizer(
    problem: Problem, optimizer: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """An optimizer for `Learned`: the given one, but for batch statistics, which are not generated.

    These are the heads' biases for which SGD at rate 1 sets the mean of the clients' statistics. The
    kernels of their heads stay 0.
    """
    optimizers: dict[Hashable, optax.GradientTransformation] = {
        "net": optimizer,
        "statistic": optax.sgd(1.0),
        "fixed": optax.set_to_zero(),
    }

    def label(learned: Learned) -> Learned:
        """The optimizer of each leaf."""
        labels = jax.tree.map(lambda _: "net", learned)
        is_statistic = problem.model.statistics(learned.network.bias)
        if is_statistic is None:
            return labels
        bias = jax.tree.map(lambda flag: "statistic" if flag else "net", is_statistic)
        kernel = jax.tree.map(lambda flag: "fixed" if flag else "net", is_statistic)
        network = labels.network._replace(bias=bias, kernel=kernel)
        return labels._replace(network=network)

    return optax.partition(optimizers, label)


def take_step(
    optimizer: optax.GradientTransformationExtraArgs,
    gradient: Learned,
    learned: Learned,
    opt_state: PyTree,
    is_received: Array,
) -> tuple[Learned, PyTree]:
    """A step of the server.

    Args:
        optimizer: The result of `server_optimizer`.
        gradient: A gradient in `learned`.
        learned: What the server trains, before the step.
        opt_state: The optimizer's state, before the step.
        is_received: () bool: whether some client sent something; otherwise nothing changes.

    Returns:
        `learned` and `opt_state` after the step.
    """
    updates, new_opt_state = optimizer.update(gradient, opt_state, learned)
    new_learned = cast(Learned, optax.apply_updates(learned, updates))
    learned = tree.where(is_received, new_learned, learned)
    opt_state = tree.where(is_received, new_opt_state, opt_state)
    return learned, opt_state


# ---- Clients unseen in training.


def train_newcomer(
    problem: Problem,
    optimizer: optax.GradientTransformation,
    learned: Learned,
    context: ClientContext,
    data: ClientData,
    rest: Params = None,
) -> Params:
    """The model (...) of a client unseen in training: it learns an embedding for a fixed hypernetwork.

    It starts from the mean embedding, and learns for as many rounds as the run has.

    Args:
        problem: The problem of the method; its local training changes what is generated.
        optimizer: Optimizer for the embedding.
        learned: The hypernetwork and the embeddings of the run's clients.
        context: The client's context; its key determines the mini-batches.
        data: The client's data.
        rest: The leaves that are not generated, with None in place of the others; None: all are
            generated.
    """
    solver = problem.solver

    def model_of(embedding: Array) -> Params:
        model = tree.first(generate(learned.network, embedding[None]))
        return model if rest is None else tree.combine(model, rest)

    def one_round(
        number: Array, carry: tuple[Array, PyTree, PyTree]
    ) -> tuple[Array, PyTree, PyTree]:
        embedding, embedding_opt_state, lasting = carry

        # Train the generated model, as in a round of the run.
        model, pull_back = jax.vjp(model_of, embedding)
        params, statistics = solver.without_statistics(model)
        start = TrainState(params, statistics, opt_state=solver.resumed(params, lasting))
        key = jax.random.fold_in(context.key, number)
        trained, _ = solver.fit(key, start, data.train, round_number=number)

        # Take a step along the vector-Jacobian product of the model with minus its change.
        (gradient,) = pull_back(tree.subtract(model, trained.whole))
        updates, embedding_opt_state = optimizer.update(gradient, embedding_opt_state, embedding)
        embedding = cast(Array, optax.apply_updates(embedding, updates))
        return embedding, embedding_opt_state, solver.lasting(trained.opt_state, params)

    # What lasts of the local optimizer's state goes from round to round, too.
    mean_embedding = learned.embeddings.mean(axis=0)
    initial = solver.begin(model_of(mean_embedding))
    lasting = solver.lasting(initial.opt_state, initial.params)
    carry = (mean_embedding, optimizer.init(mean_embedding), lasting)
    embedding, _, _ = jax.lax.fori_loop(0, problem.rounds, one_round, carry)
    return model_of(embedding)
