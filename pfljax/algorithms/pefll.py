"""PeFLL: an embedding network describes a client by its examples, and a hypernetwork makes its model of that.

Scott, Zakerinia, Lampert, "PeFLL: personalized federated learning by learning to learn" (ICLR 2024,
Algorithm 1).

    A round: client k receives the embedding network phi and sends v_k = mean_i phi(x_i, y_i) over
        its examples;
    it receives theta_k = h((v_k - m) / s), trains it, and sends the change delta_k;
    it receives the vector-Jacobian product of theta_k with -delta_k in v_k,
        and sends that of v_k with it in phi;
    phi and the hypernetwork h take a step of the server's Adam along the means of their products
        over the cohort.
    Client k, also a newcomer, predicts with theta_k of the final phi and h: it trains nothing.

Departures from the paper: m and s, the mean and standard deviation of a descriptor's entries, are
from random inputs, where the authors' code takes the first client's examples. v_k is over all
examples. phi is an MLP of inputs and one-hot labels. Predictions are not limited to the classes that
a client has. h begins as in pFedHN, near an initial model, and does not generate batch statistics.
As in the authors' code with Adam, no parameters of phi and h decay; clients do not clip their
gradients. The default rate is for some hundred rounds (theirs: 2e-4 for 5000).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import classes, hypernetwork
from pfljax.algorithms.common.hypernetwork import Learned, Network
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Params,
    Prediction,
    PyTree,
    Split,
    Start,
    State,
    Topology,
    Traffic,
    Upload,
)
from pfljax.local.batches import masked, sum_over_examples
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

PROBES = 100  # number of random inputs


class Server(NamedTuple):
    """What the server keeps beside phi, the model that clients download.

    Attributes:
        network: The hypernetwork h.
        center: () m.
        scale: () s.
    """

    network: Network
    center: Array
    scale: Array


@method(
    keeps="nothing",
    travels="the embedding network, descriptors and models, and changes of all three",
)
@dataclasses.dataclass(frozen=True)
class PeFLL:
    """PeFLL (Scott et al., 2024): a network describes a client, and a hypernetwork makes its model of that.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.PeFLL(server_learning_rate=0.003)
        PeFLL(server_learning_rate=0.003, clip=50.0, hidden=100, layers=3, embedding=0,
              spread=0.1)
    """

    server_learning_rate: float = hyperparameter(
        0.001,
        at_least=0,
        grid=(0.0003, 0.001, 0.003),
        help="the server's learning rate",
        former="rate",
    )
    clip: float = hyperparameter(
        50.0, above=0, infinite=True, help="largest norm of the server's gradient; inf: any"
    )
    hidden: int = hyperparameter(
        100,
        at_least=1,
        at_most=100_000,
        grid=(50, 100),
        help="width of both networks' hidden layers",
    )
    layers: int = hyperparameter(
        3,
        at_least=0,
        at_most=100,
        grid=(1, 2, 3),
        help="number of h's hidden layers after the first",
    )
    embedding: int = hyperparameter(
        0, at_least=0, at_most=100_000, help="size of a descriptor; 0: 1 + K / 4, at least 8"
    )
    spread: float = hyperparameter(
        0.1, at_least=0, help="standard deviation between initial models, over that within one"
    )

    def build(self, problem: Problem) -> Algorithm:
        classes.required(problem, "pefll", per_position=False)
        size = self.embedding or max(1 + problem.num_clients // 4, 8)
        phi_widths = (self.hidden, self.hidden, size)
        network_widths = (size, *[self.hidden] * (1 + self.layers))
        optimizer = optax.chain(
            optax.clip_by_global_norm(self.clip), optax.adam(self.server_learning_rate)
        )
        server_optimizer = hypernetwork.server_optimizer(problem, optimizer)

        def model_of(server: Server, v: Array) -> Params:
            """theta_k = h((v_k - m) / s), stacked (1, ...)."""
            scaled = (v - server.center) / server.scale
            return hypernetwork.generate(server.network, scaled[None])

        # ---- The client.

        def client_update(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> ClientOutput:
            # v_k = mean_i phi(x_i, y_i)
            phi = tree.first(models)
            v = descriptor(phi, data.train)

            # theta_k = h((v_k - m) / s), trained
            def own_model(v: Array) -> Params:
                return model_of(context.server, v)

            theta, pull_back = jax.vjp(own_model, v)
            trained = problem.fit(context, theta, data.train)
            change = tree.subtract(theta, trained.models)  # -delta_k

            # The product of theta_k with -delta_k in v_k, and that of v_k with it in phi
            (v_gradient,) = pull_back(change)
            phi_gradient = descriptor_product(phi, data.train, v_gradient)
            return ClientOutput(
                row=(),
                upload=Upload(tree.stack_one(phi_gradient)),
                report=ClientReport(
                    loss=trained.losses[0],
                    entries={"descriptor": v, "change": tree.first(change)},
                ),
                opt_state=trained.opt_state,
                sent=(data.train.size > 0)[None],
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            own_key = jax.random.fold_in(key, problem.num_clients)
            network_key, phi_key, probe_key = jax.random.split(own_key, 3)
            phi = init_embedder(phi_key, problem, phi_widths)
            network = hypernetwork.init(
                network_key, problem, problem.init_global(key), network_widths, self.spread
            )

            # m and s, from random inputs
            v = probe(phi, probe_key)
            scale = jnp.where(size > 1, v.std(), 1)
            opt_state = server_optimizer.init(Learned(network, phi))
            return Start(Server(network, v.mean(), scale), tree.stack_one(phi), opt_state)

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            server: Server = state.server.state
            report = aggregate.report.entries
            num_received = aggregate.num_sent[0]
            share = 1 / jnp.maximum(num_received, 1)

            # The mean product of h over the cohort
            scaled = (report["descriptor"] - server.center) / server.scale

            def generate_cohort(network: Network) -> Params:
                return hypernetwork.generate(network, scaled)

            _, pull_back = jax.vjp(generate_cohort, server.network)
            change = tree.scale(report["change"], aggregate.sent[:, 0] * share)
            (network_gradient,) = pull_back(change)

            # The mean product of phi, and a step along both
            phi_gradient = tree.scale(tree.first(aggregate.upload.update), share)
            learned, opt_state = hypernetwork.take_step(
                server_optimizer,
                Learned(network_gradient, phi_gradient),
                Learned(server.network, tree.first(state.models)),
                state.opt_state,
                is_received=num_received > 0,
            )
            state = state.with_server(server._replace(network=learned.network))
            return state.with_models(tree.stack_one(learned.embeddings), opt_state), {}

        # ---- What a client predicts with.

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            v = descriptor(tree.first(models), data.train)
            return Prediction(model_of(context.server, v))

        def predict(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            return adapt(context, models, data)

        # ---- Accounting.

        def traffic(counted: Traffic) -> Traffic:
            """Of the server's state, a client downloads theta_k and a product in v_k."""
            return counted._replace(server=tree.num_bytes(problem.model.network.shapes) + 4 * size)

        return Algorithm(
            start=start,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            adapt=adapt,
            topology=Topology.SHARED,
            ledger=Ledger(
                gradients=1,
                unaccounted="the descriptors, and the embedding network's gradients",
            ),
            report=MethodReport("each client's generated model"),
            traffic=traffic,
        )


# ---- The embedding network phi: an MLP of inputs and one-hot labels, averaged over examples.


def init_embedder(key: Key, problem: Problem, widths: tuple[int, ...]) -> PyTree:
    """The MLP's layers; `widths` are those of hidden layers and of the descriptor."""
    inputs = jax.tree.leaves(problem.model.example_input)
    num_inputs = sum(math.prod(leaf.shape[1:]) for leaf in inputs)
    sizes = (num_inputs + problem.model.output_shape[-1], *widths)
    keys = jax.random.split(key, len(widths))
    return [
        hypernetwork.he_layer(keys[n], inputs=sizes[n], outputs=sizes[n + 1])
        for n in range(len(widths))
    ]


def probe(phi: PyTree, key: Key) -> Array:
    """(E,) the mean output for random inputs."""
    inputs = jax.random.normal(key, (PROBES, input_size(phi)))
    return hypernetwork.mlp(phi, inputs).mean(axis=0)


def descriptor(phi: PyTree, split: Split) -> Array:
    """v (E,), the mean output for a client's examples; zeros without any."""

    def sum_outputs(x: PyTree, y: Array, mask: Array) -> Array:
        x, y = masked(x, y, mask)
        outputs = hypernetwork.mlp(phi, with_labels(phi, x, y))
        return jnp.where(mask[:, None], outputs, 0).sum(axis=0)

    return sum_over_examples(sum_outputs, split) / jnp.maximum(split.size, 1)


def descriptor_product(phi: PyTree, split: Split, cotangent: Array) -> PyTree:
    """The vector-Jacobian product of a client's v with `cotangent` (E,), in phi."""

    def sum_products(x: PyTree, y: Array, mask: Array) -> PyTree:
        x, y = masked(x, y, mask)
        inputs = with_labels(phi, x, y)

        def product(phi: PyTree) -> Array:
            return jnp.where(mask, hypernetwork.mlp(phi, inputs) @ cotangent, 0).sum()

        return jax.grad(product)(phi)

    return tree.scale(sum_over_examples(sum_products, split), 1 / jnp.maximum(split.size, 1))


def with_labels(phi: PyTree, x: PyTree, y: Array) -> Array:
    """(B, D) flat inputs, then one-hot labels."""
    inputs = [jnp.float32(leaf.reshape(len(y), -1)) for leaf in jax.tree.leaves(x)]
    num_classes = input_size(phi) - sum(leaf.shape[1] for leaf in inputs)
    return jnp.concatenate([*inputs, jax.nn.one_hot(y, num_classes)], axis=1)


def input_size(phi: PyTree) -> int:
    """D, the number of inputs and labels."""
    return len(phi[0]["kernel"])
