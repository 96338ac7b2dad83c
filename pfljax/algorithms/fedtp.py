"""FedTP: a hypernetwork at the server generates every client's attention projections; the rest is averaged.

Li, Cai, Wang, Tang, Ding, Lin, Shi, "FedTP: federated learning by Transformer personalization" (TNNLS 2023).

    A round: client k trains theta and p_k = h(v_k; phi), the query, key and value projections of all attention layers;
    theta <- sum_k n_k theta_k / sum_k n_k; the server's h and embeddings v take a step of SGD along
    sum_k n_k g_k / sum_k n_k, g_k the vector-Jacobian product of p_k with minus its change, in phi and v_k.

Departures from the authors' code: h's heads begin near an initial model's projections, theirs as PyTorch's layers do.
Biases of projections, which theirs lack, are generated, too. The default rate is for some hundred rounds; theirs is the
clients', 0.01 for 1500. Newcomers learn an embedding, from the mean one, with the rest fixed, for all rounds.
"""

from __future__ import annotations

import dataclasses

import jax
import optax

from pfljax.algorithms.common import average, averaging, hypernetwork, layers, weighted
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, ClientOutput, Prediction, Report, Start
from pfljax.local.problem import Problem


@method(keeps="nothing", travels="its attention projections down, their change up; all else both ways")
@dataclasses.dataclass(frozen=True)
class FedTP:
    """FedTP (Li et al., 2023): a hypernetwork generates each client's attention projections; the rest is averaged."""

    rate: float = knob(0.1, at_least=0, grid=(0.01, 0.03, 0.1), help="server learning rate")
    momentum: float = knob(0.9, at_least=0, below=1, grid=(0.0, 0.9), help="momentum of the server's SGD")
    decay: float = knob(0.001, at_least=0, help="weight decay of v and phi")
    hidden: int = knob(150, at_least=1, at_most=100_000, grid=(50, 150), help="width of the hidden layers")
    layers: int = knob(3, at_least=0, at_most=100, grid=(1, 2, 3), help="number of hidden layers after the first")
    embedding: int = knob(128, at_least=1, at_most=100_000, grid=(32, 128), help="size of an embedding")
    spread: float = knob(0.1, at_least=0, help="standard deviation between initial models, over that within one")
    personal: str = knob("(^|/)(query|key|value)/", help="regular expression that paths of what is generated contain")

    def build(self, problem: Problem) -> Algorithm:
        shapes, personal = problem.model.network.shapes, layers.named(problem, self.personal, "fedtp", "attention")
        alone, split = problem.part(personal(shapes)), lambda params: tree.partition(params, personal(params))
        step = optax.chain(optax.add_decayed_weights(self.decay), optax.sgd(self.rate, self.momentum))
        descent = hypernetwork.beside_statistics(problem, step)
        generate = lambda learned, of: hypernetwork.generate(learned.network, learned.embeddings[of])
        whole = lambda context, models: tree.combine(models, tree.stack_one(generate(context.server, context.client)))

        def start(key, clients):
            own, theta = split(problem.init_models(key, 1))
            widths = (self.embedding, *[self.hidden] * (1 + self.layers))
            learned = hypernetwork.start(key, problem, tree.first(own), widths, self.spread, torch=True)
            return Start(learned, theta, descent.init(learned))

        def client_update(context, models, kept, data):
            received = whole(context, models)
            trained, kept, losses = problem.fit(context, received, kept, data.train)
            update = tree.subtract(split(trained)[1], models)
            upload, sent = weighted(update, data.train.size)
            change = tree.first(split(tree.subtract(trained, received))[0])
            told = {"loss": losses[0], "client": context.client, "size": data.train.size, "change": change}
            return ClientOutput(kept, upload, told, sent)

        def server_update(key, state, aggregate):
            told, weight = aggregate.report, aggregate.sent[:, 0] * aggregate.report["size"]
            back = jax.vjp(lambda learned: generate(learned, told["client"]), state.server)[1]
            slope = back(tree.scale(told["change"], -weight / weight.sum().clip(1)))[0]
            server, opt = hypernetwork.descended(descent, slope, state.server, state.optimizer, weight.sum() > 0)
            return state._replace(server=server, models=average(state.models, aggregate), optimizer=opt), {}

        functions = {"start": start, "client_update": client_update, "server_update": server_update}
        return averaging(
            problem,
            **functions,
            row=lambda key, client, models: problem.kept_optimizers(problem.init_models(key, 1)),
            predict=lambda context, models, row, data: Prediction(whole(context, models)),
            adapt=lambda context, models, data: hypernetwork.newcomer(alone, step, context, data, tree.first(models)),
            traffic=lambda counted: counted._replace(server=tree.num_bytes(split(shapes)[0])),
            report=Report("the global model with each client's generated projections"),
        )
