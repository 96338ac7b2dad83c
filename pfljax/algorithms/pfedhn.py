"""pFedHN: a hypernetwork at the server generates every client's model.

Shamsian, Navon, Fetaya, Chechik, "Personalized federated learning using hypernetworks" (ICML 2021). The server holds an
embedding v_k for each client and a hypernetwork h with parameters phi: an MLP and one linear head per leaf.

    A round: client k receives theta_k = h(v_k; phi), trains it, and sends the change delta_k;
    (v, phi) take a step of the server's optimizer along the vector-Jacobian products of theta_k with -delta_k, averaged
    over the cohort. The server regenerates all models; client k predicts with theta_k.

Departures from the paper: A cohort takes part in a round, where the paper has one client, and the server takes a single
step along the mean over the cohort. The authors initialize the trunk as PyTorch does, so its features are small and
nearly the same for all clients. With one client per round this is stable at the authors' rates, and He's is not. In a
mean over a cohort, models of different clients move apart faster with He's. So `initialization` follows the protocol.
The heads' biases start as an initial model, and the generated part is small next to it, so that clients start from
models of the usual scale; the authors' heads start like their trunk. Batch statistics are not generated: all clients
receive the mean of those that came back. The server's optimizer has momentum and clips the gradient's norm at 50, as in
the authors' code, but has no weight decay; clients do not clip. Newcomers learn an embedding, starting from the mean
embedding, with phi fixed, for as many rounds as the run has. The server holds H times the parameters of a model (H is
the trunk's width) and all K models.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import hypernetwork
from pfljax.algorithms.common.one_each import one_for_each
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, ClientOutput, First, Prediction, Report, Start
from pfljax.local.problem import Problem


@method(keeps="nothing", travels="its generated model down, its update up")
@dataclasses.dataclass(frozen=True)
class PFedHN:
    """pFedHN (Shamsian et al., 2021): a hypernetwork at the server generates every client's model."""

    rate: float = knob(0.01, at_least=0, grid=(0.001, 0.003, 0.01, 0.03), help="server learning rate")
    optimizer: Literal["sgd", "adam"] = knob("sgd", help="server optimizer")
    momentum: float = knob(0.9, at_least=0, below=1, grid=(0.0, 0.9), help="momentum of the server's SGD")
    clip: float = knob(50.0, above=0, infinite=True, help="largest norm of the server's gradient; inf: any")
    initialization: Literal["torch", "he"] | None = knob(
        None, help="of the trunk, PyTorch's or He's; not given: torch with one client per round, otherwise he"
    )
    hidden: int = knob(100, at_least=1, at_most=100_000, grid=(50, 100), help="H, width of the hidden layers")
    layers: int = knob(3, at_least=0, at_most=100, grid=(1, 2, 3), help="number of hidden layers after the first")
    embedding: int = knob(0, at_least=0, at_most=100_000, help="size of an embedding; 0: 1 + K / 4, rounded down")
    spread: float = knob(0.1, at_least=0, help="standard deviation between initial models, over that within one")

    def build(self, problem: Problem) -> Algorithm:
        make = optax.adam if self.optimizer == "adam" else functools.partial(optax.sgd, momentum=self.momentum)
        step = optax.chain(optax.clip_by_global_norm(self.clip), make(self.rate))
        descent = hypernetwork.beside_statistics(problem, step)
        torch = (self.initialization or ("torch" if problem.cohort_size == 1 else "he")) == "torch"
        widths = (self.embedding or 1 + problem.num_clients // 4, *[self.hidden] * (1 + self.layers))
        generate = lambda learned: hypernetwork.generate(*learned)

        def start(key, clients):
            bias = tree.first(problem.init_models(key, 1))
            learned = hypernetwork.start(key, problem, bias, widths, self.spread, torch)
            return Start(learned, generate(learned), descent.init(learned))

        def first_row(key, client, start):
            return First(problem.kept_optimizers(tree.stack_one(start.server.network.bias)))

        def client_update(context, models, kept, data):
            trained, kept, losses = problem.fit(context, models, kept, data.train)
            return ClientOutput(kept, tree.subtract(trained, models), {"loss": losses[0]}, (data.train.size > 0)[None])

        def server_update(key, state, aggregate):
            came = (aggregate.count > 0).sum()
            _, back = jax.vjp(generate, state.server)
            slope = back(tree.scale(aggregate.upload, -1 / jnp.maximum(came, 1)))[0]
            learned, optimizer = hypernetwork.descended(descent, slope, state.server, state.optimizer, came > 0)
            return state._replace(server=learned, models=generate(learned), optimizer=optimizer), {}

        return one_for_each(
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            predict=lambda context, models, row, data: Prediction(models),
            adapt=lambda context, models, data: hypernetwork.newcomer(problem, step, context, data),
            report=Report(scored="each client's generated model"),
        )
