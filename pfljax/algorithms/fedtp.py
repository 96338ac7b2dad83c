"""FedTP: a hypernetwork at the server generates every client's attention projections; the rest is averaged.

Li, Cai, Wang, Tang, Ding, Lin, Shi, "FedTP: federated learning by Transformer personalization"
(TNNLS 2023).

    A round: client k trains theta and p_k = h(v_k; phi),
        the query, key and value projections of all attention layers;
    theta <- sum_k n_k theta_k / sum_k n_k;
    the server's h and embeddings v take a step of SGD along sum_k n_k g_k / sum_k n_k,
        g_k the vector-Jacobian product of p_k with minus its change, in phi and v_k.

Departures from the authors' code: h's heads begin near an initial model's projections, theirs as
PyTorch's layers do. Biases of projections, which theirs lack, are generated, too. The default rate is
for some hundred rounds; theirs is the clients', 0.01 for 1500. Newcomers learn an embedding, from
the mean one, with the rest fixed, for all rounds.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import optax

from pfljax.algorithms.common import hypernetwork, layers
from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.algorithms.common.hypernetwork import Learned
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Params,
    Prediction,
    PyTree,
    Traffic,
    Trained,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


class Server(NamedTuple):
    """The server's state, besides theta.

    Attributes:
        learned: The hypernetwork's parameters phi, and the embeddings v.
        opt_state: The state of the optimizer for these.
    """

    learned: Learned
    opt_state: PyTree


@method(
    keeps="nothing",
    travels="its attention projections down, their change up; all else both ways",
)
@dataclasses.dataclass(frozen=True)
class FedTP:
    """FedTP (Li et al., 2023): a hypernetwork generates each client's attention projections; the rest is averaged.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedTP(server_learning_rate=0.03, embedding=32)
        FedTP(server_learning_rate=0.03, server_momentum=0.9, weight_decay=0.001, hidden=150,
              layers=3, embedding=32, spread=0.1, personal='(^|/)(query|key|value)/')
    """

    server_learning_rate: float = hyperparameter(
        0.1, at_least=0, grid=(0.01, 0.03, 0.1), help="server learning rate", former="rate"
    )
    server_momentum: float = hyperparameter(
        0.9,
        at_least=0,
        below=1,
        grid=(0.0, 0.9),
        help="momentum of the server's SGD",
        former="momentum",
    )
    weight_decay: float = hyperparameter(
        0.001, at_least=0, help="weight decay of v and phi", former="decay"
    )
    hidden: int = hyperparameter(
        150, at_least=1, at_most=100_000, grid=(50, 150), help="width of the hidden layers"
    )
    layers: int = hyperparameter(
        3,
        at_least=0,
        at_most=100,
        grid=(1, 2, 3),
        help="number of hidden layers after the first",
    )
    embedding: int = hyperparameter(
        128, at_least=1, at_most=100_000, grid=(32, 128), help="size of an embedding"
    )
    spread: float = hyperparameter(
        0.1, at_least=0, help="standard deviation between initial models, over that within one"
    )
    personal: str = hyperparameter(
        "(^|/)(query|key|value)/",
        help="regular expression that paths of what is generated contain",
    )

    def build(self, problem: Problem) -> Algorithm:
        shapes = problem.model.network.shapes
        hidden_widths = [self.hidden] * (1 + self.layers)
        widths = (self.embedding, *hidden_widths)
        optimizer = optax.chain(
            optax.add_decayed_weights(self.weight_decay),
            optax.sgd(self.server_learning_rate, self.server_momentum),
        )
        server_optimizer = hypernetwork.server_optimizer(problem, optimizer)

        # ---- The projections p, and the rest of a model, theta.

        # A model's parameters -> a tree of bools: which leaves are projections
        is_projection = layers.named(problem, self.personal, method="fedtp", needs="attention")

        def is_theta(params: Params) -> PyTree:
            return tree.complement(is_projection(params))

        def split(params: Params) -> tuple[Params, Params]:
            """A model's projections p, and theta; None in place of the leaves left out."""
            return tree.partition(params, is_projection(params))

        def generate(learned: Learned, clients: Array) -> Params:
            """p_k = h(v_k; phi) for clients (n,), leaves (n, ...)."""
            embeddings = learned.embeddings[clients]
            return hypernetwork.generate(learned.network, embeddings)

        def projections_of(context: ClientContext) -> Params:
            """p_k of the context's client, leaves (1, ...)."""
            return generate(context.server.learned, context.client[None])

        # ---- The client.

        def train(context: ClientContext, theta: Params, row: PyTree, data: ClientData) -> Trained:
            # Train theta, with its batch statistics, and p_k = h(v_k; phi).
            context, theta = problem.whole(context, theta)
            projections = projections_of(context)
            models = tree.combine(theta, projections)
            trained = problem.fit(context, models, data.train)
            new_projections, new_theta = split(trained.models)

            # The server averages theta_k, and computes g_k from p_k's change.
            change = tree.subtract(new_projections, projections)
            report = {
                "client": context.client,
                "size": data.train.size,
                "change": tree.first(change),
            }
            return trained._replace(models=new_theta, report=report)

        # ---- The server.

        def first_server(key: Key, theta: Params, clients: ClientData) -> Server:
            """The generated projections are at first near those of an initial model."""
            projections, _ = split(problem.init_global(key))
            learned = hypernetwork.init_learned(
                key, problem, bias=projections, widths=widths, spread=self.spread, torch=True
            )
            return Server(learned, server_optimizer.init(learned))

        def server_step(received: Received, server: Server) -> ServerStep:
            """The server's step on phi and v; theta takes the clients' mean update."""
            # n_k, of the clients that sent something
            weight = received.sent * received.report["size"]
            total_weight = weight.sum()

            # sum_k n_k g_k / sum_k n_k: the product of all p_k with minus their weighted changes
            def generate_cohort(learned: Learned) -> Params:
                return generate(learned, received.report["client"])

            _, pull_back = jax.vjp(generate_cohort, server.learned)
            share = weight / total_weight.clip(1)
            cotangent = tree.scale(received.report["change"], -share)
            (gradient,) = pull_back(cotangent)

            # A step of SGD along it
            learned, opt_state = hypernetwork.take_step(
                server_optimizer,
                gradient,
                server.learned,
                server.opt_state,
                is_received=total_weight > 0,
            )
            return ServerStep(server=Server(learned, opt_state))

        # ---- What a client predicts with.

        def predict(
            context: ClientContext, theta: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            projections = projections_of(context)
            return Prediction(tree.combine(theta, projections))

        def adapt(context: ClientContext, theta: Params, data: ClientData) -> Prediction:
            """Newcomers train only an embedding, on the changes of projections, with theta fixed."""
            projection_problem = problem.part(is_projection(shapes))
            model = hypernetwork.train_newcomer(
                projection_problem,
                optimizer=optimizer,
                learned=context.server.learned,
                context=context,
                data=data,
                rest=tree.first(theta),
            )
            return Prediction.single(model)

        # ---- Accounting.

        def traffic(counted: Traffic) -> Traffic:
            """Of the server's state, a client downloads only its projections."""
            projections, _ = split(shapes)
            return counted._replace(server=tree.num_bytes(projections))

        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1),
            first_server=first_server,
            server_step=server_step,
            shared=is_theta,
            predict=predict,
            adapt=adapt,
            report=MethodReport("the global model with each client's generated projections"),
            traffic=traffic,
        )
