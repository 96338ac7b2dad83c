"""PeFLL: an embedding network describes a client by its examples, and a hypernetwork makes its model of that.

Scott, Zakerinia, Lampert, "PeFLL: personalized federated learning by learning to learn" (ICLR 2024, Algorithm 1).

    A round: client k receives the embedding network phi and sends v_k = mean_i phi(x_i, y_i) over its examples;
    it receives theta_k = h((v_k - m) / s), trains it, and sends the change delta_k;
    it receives the vector-Jacobian product of theta_k with -delta_k in v_k, and sends that of v_k with it in phi;
    phi and the hypernetwork h take a step of the server's Adam along the means of their products over the cohort.
    Client k, also a newcomer, predicts with theta_k of the final phi and h: it trains nothing.

Departures from the paper: m and s, the mean and standard deviation of a descriptor's entries, are from random inputs,
where the authors' code takes the first client's examples. v_k is over all examples. phi is an MLP of inputs and
one-hot labels. Predictions are not limited to the classes that a client has. h begins as in pFedHN, near an initial
model, and does not generate batch statistics. As in the authors' code with Adam, no parameters of phi and h decay;
clients do not clip their gradients. The default rate is for some hundred rounds (theirs: 2e-4 for 5000).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import classes, embedder, hypernetwork
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, Ledger, Prediction, Report, Start
from pfljax.local.problem import Problem


class Server(NamedTuple):
    """The hypernetwork h, and m and s, both ()."""

    network: hypernetwork.Network
    center: Array
    scale: Array


@method(keeps="nothing", travels="the embedding network, descriptors and models, and changes of all three")
@dataclasses.dataclass(frozen=True)
class PeFLL:
    """PeFLL (Scott et al., 2024): a network describes a client, and a hypernetwork makes its model of that."""

    rate: float = knob(0.001, at_least=0, grid=(0.0003, 0.001, 0.003), help="the server's learning rate")
    clip: float = knob(50.0, above=0, infinite=True, help="largest norm of the server's gradient; inf: any")
    hidden: int = knob(100, at_least=1, at_most=100_000, grid=(50, 100), help="width of both networks' hidden layers")
    layers: int = knob(3, at_least=0, at_most=100, grid=(1, 2, 3), help="number of h's hidden layers after the first")
    embedding: int = knob(0, at_least=0, at_most=100_000, help="size of a descriptor; 0: 1 + K / 4, at least 8")
    spread: float = knob(0.1, at_least=0, help="standard deviation between initial models, over that within one")

    def build(self, problem: Problem) -> Algorithm:
        classes.required(problem, "pefll", places=False)
        size = self.embedding or max(1 + problem.num_clients // 4, 8)
        step = optax.chain(optax.clip_by_global_norm(self.clip), optax.adam(self.rate))
        descent = hypernetwork.beside_statistics(problem, step)

        def start(key, clients):
            network_key, phi_key, probe_key = jax.random.split(jax.random.fold_in(key, problem.num_clients), 3)
            phi = embedder.init(phi_key, problem, (self.hidden, self.hidden, size))
            widths, bias = (size, *[self.hidden] * (1 + self.layers)), tree.first(problem.init_models(key, 1))
            network = hypernetwork.init(network_key, problem, bias, widths, self.spread)
            v = embedder.probed(phi, probe_key)
            optimizer = descent.init(hypernetwork.Learned(network, phi))
            scale = jnp.where(size > 1, v.std(), 1)
            return Start(Server(network, v.mean(), scale), tree.stack_one(phi), optimizer)

        def model_of(server, v):
            return tree.first(hypernetwork.generate(server.network, ((v - server.center) / server.scale)[None]))

        def client_update(context, models, kept, data):
            phi = tree.first(models)
            v = embedder.described(phi, data.train)
            theta, back = jax.vjp(lambda v: model_of(context.server, v), v)
            trained, kept, losses = problem.fit(context, tree.stack_one(theta), kept, data.train)
            change = tree.subtract(theta, tree.first(trained))
            slope = embedder.pulled_back(phi, data.train, back(change)[0])
            report = {"loss": losses[0], "descriptor": v, "change": change}
            return ClientOutput(kept, tree.stack_one(slope), report, (data.train.size > 0)[None])

        def server_update(key, state, aggregate):
            (network, center, scale), came = state.server, aggregate.count[0]
            share = 1 / jnp.maximum(came, 1)
            change = tree.scale(aggregate.report["change"], aggregate.sent[:, 0] * share)
            v = (aggregate.report["descriptor"] - center) / scale
            of_network = jax.vjp(lambda network: hypernetwork.generate(network, v), network)[1](change)[0]
            slope = hypernetwork.Learned(of_network, tree.scale(tree.first(aggregate.upload), share))
            before = hypernetwork.Learned(network, tree.first(state.models))
            learned, optimizer = hypernetwork.descended(descent, slope, before, state.optimizer, came > 0)
            server, models = state.server._replace(network=learned.network), tree.stack_one(learned.embeddings)
            return state._replace(server=server, models=models, optimizer=optimizer), {}

        def adapt(context, models, data):
            return Prediction.one(model_of(context.server, embedder.described(tree.first(models), data.train)))

        down = tree.num_bytes(problem.model.network.shapes) + 4 * size  # theta_k and a product
        return averaging(
            problem,
            start=start,
            row=lambda key, client, models: problem.kept_optimizers(problem.init_models(key, 1)),
            client_update=client_update,
            server_update=server_update,
            predict=lambda context, models, row, data: adapt(context, models, data),
            adapt=adapt,
            averages=False,
            traffic=lambda counted: counted._replace(server=down),
            ledger=Ledger(gradients=1, unaccounted="the descriptors, and the embedding network's gradients"),
            report=Report("each client's generated model"),
        )
