"""pFedHN: a hypernetwork at the server generates every client's model.

Shamsian, Navon, Fetaya, Chechik, "Personalized federated learning using hypernetworks" (ICML 2021).
The server holds an embedding v_k for each client and a hypernetwork h with parameters phi: an MLP
and one linear head per leaf.

    A round: client k receives theta_k = h(v_k; phi), trains it, and sends the change delta_k;
    (v, phi) take a step of the server's optimizer along the vector-Jacobian products of theta_k with
        -delta_k, averaged over the cohort.
    The server regenerates all models; client k predicts with theta_k.

Departures from the paper: A cohort takes part in a round, where the paper has one client, and the
server takes a single step along the mean over the cohort. The authors initialize the trunk as
PyTorch does, so its features are small and nearly the same for all clients. With one client per
round this is stable at the authors' rates, and He's is not. In a mean over a cohort, models of
different clients move apart faster with He's. So `initialization` follows the protocol. The heads'
biases start as an initial model, and the generated part is small next to it, so that clients start
from models of the usual scale; the authors' heads start like their trunk. Batch statistics are not
generated: all clients receive the mean of those that came back. The server's optimizer has momentum
and clips the gradient's norm at 50, as in the authors' code, but has no weight decay; clients do not
clip. Newcomers learn an embedding, starting from the mean embedding, with phi fixed, for as many
rounds as the run has. The server holds H times the parameters of a model (H is the trunk's width)
and all K models.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import hypernetwork
from pfljax.algorithms.common.hypernetwork import Learned
from pfljax.algorithms.common.one_each import one_for_each
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Key,
    MethodReport,
    Metrics,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Upload,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="nothing", travels="its generated model down, its update up")
@dataclasses.dataclass(frozen=True)
class PFedHN:
    """pFedHN (Shamsian et al., 2021): a hypernetwork at the server generates every client's model.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.PFedHN(server_learning_rate=0.003, hidden=50)
        PFedHN(server_learning_rate=0.003, server_optimizer='sgd', server_momentum=0.9,
               clip=50.0, initialization=None, hidden=50, layers=3, embedding=0, spread=0.1)
    """

    server_learning_rate: float = hyperparameter(
        0.01,
        at_least=0,
        grid=(0.001, 0.003, 0.01, 0.03),
        help="server learning rate",
        former="rate",
    )
    server_optimizer: Literal["sgd", "adam"] = hyperparameter(
        "sgd", help="server optimizer", former="optimizer"
    )
    server_momentum: float = hyperparameter(
        0.9,
        at_least=0,
        below=1,
        grid=(0.0, 0.9),
        help="momentum of the server's SGD",
        former="momentum",
    )
    clip: float = hyperparameter(
        50.0, above=0, infinite=True, help="largest norm of the server's gradient; inf: any"
    )
    initialization: Literal["torch", "he"] | None = hyperparameter(
        None,
        help="initialization of the trunk, PyTorch's or He's. Default: torch with one client per round, "
        "otherwise he",
    )
    hidden: int = hyperparameter(
        100, at_least=1, at_most=100_000, grid=(50, 100), help="H, width of the hidden layers"
    )
    layers: int = hyperparameter(
        3,
        at_least=0,
        at_most=100,
        grid=(1, 2, 3),
        help="number of hidden layers after the first",
    )
    embedding: int = hyperparameter(
        0,
        at_least=0,
        at_most=100_000,
        help="size of an embedding; 0: 1 + K / 4, rounded down",
    )
    spread: float = hyperparameter(
        0.1, at_least=0, help="standard deviation between initial models, over that within one"
    )

    def build(self, problem: Problem) -> Algorithm:
        embedding_size = self.embedding or 1 + problem.num_clients // 4
        widths = (embedding_size, *[self.hidden] * (1 + self.layers))
        default = "torch" if problem.cohort_size == 1 else "he"
        initialization = self.initialization or default

        if self.server_optimizer == "adam":
            optimizer = optax.adam(self.server_learning_rate)
        else:
            optimizer = optax.sgd(self.server_learning_rate, momentum=self.server_momentum)
        optimizer = optax.chain(optax.clip_by_global_norm(self.clip), optimizer)
        server_optimizer = hypernetwork.server_optimizer(problem, optimizer)

        # ---- The client.

        def client_update(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> ClientOutput:
            trained = problem.fit(context, models, data.train)
            return ClientOutput(
                row=(),
                upload=Upload(tree.subtract(trained.models, models)),
                report=ClientReport(trained.losses[0]),
                opt_state=trained.opt_state,
                sent=(data.train.size > 0)[None],
            )

        # ---- The server. Its state is (v, phi).

        def generate(learned: Learned) -> Params:
            """theta_k = h(v_k; phi) of all clients, (K, ...)."""
            return hypernetwork.generate(learned.network, learned.embeddings)

        def start(key: Key, clients: ClientData) -> Start:
            learned = hypernetwork.init_learned(
                key,
                problem,
                bias=problem.init_global(key),
                widths=widths,
                spread=self.spread,
                torch=initialization == "torch",
            )
            return Start(learned, generate(learned), server_optimizer.init(learned))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # Vector-Jacobian products of theta_k with -delta_k, averaged over the cohort
            num_received = (aggregate.num_sent > 0).sum()
            mean = tree.scale(aggregate.upload.update, -1 / jnp.maximum(num_received, 1))
            _, pull_back = jax.vjp(generate, state.server.state)
            (gradient,) = pull_back(mean)

            learned, opt_state = hypernetwork.take_step(
                server_optimizer,
                gradient,
                state.server.state,
                state.opt_state,
                is_received=num_received > 0,
            )
            return state.with_server(learned).with_models(generate(learned), opt_state), {}

        # ---- What a client predicts with.

        def predict(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            return Prediction(models)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            model = hypernetwork.train_newcomer(problem, optimizer, context.server, context, data)
            return Prediction.single(model)

        return one_for_each(
            start=start,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            adapt=adapt,
            report=MethodReport(scored="each client's generated model"),
        )
