"""GPFL: global and personalized features of the same body, steered by shared embeddings of the classes.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, "GPFL: simultaneously learning global and personalized feature information
for personalized federated learning" (ICCV 2023).

    z = f(x; theta) are features, E (C, F) embeddings of the classes, and V the conditional valve:
        V(z, e) = relu((1 + gamma(e)) z + beta(e)),  gamma and beta each LayerNorm(relu(affine(e))).
    A round: client k receives theta, E and V; with its share p_kc of examples of class c, g = mean_c E_c and
    e_k = sum_c p_kc E_c, as received. It takes steps in theta, E, V and its own head h_k on
        CE(h_k(V(z, e_k)), y) + CE(cos(V(z, g), E), y) + lambda |V(z, g) - E_y as received| + mu / 2 |(E, V)|^2;
    theta, E, V <- their means, weighted by n_k; h_k stays.  Client k predicts with h_k(V(z, e_k)).

Departures from the paper: In the authors' code, |.| is the norm of a mini-batch's matrix; here it is the mean of the
examples' norms. There, g and e_k are those of the embeddings before the last aggregation; here they are of those
received. All parameters are trained with the solver's optimizer. Newcomers train a head with theta, E and V fixed, for
as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import beside, classes, heads
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, Key, Ledger, Params, Prediction, PyTree, Report, Split, Start
from pfljax.local.problem import OwnModel, Problem

ADDED = "conditional"  # the branch of E and V beside the model's own
EPSILON = 1e-5  # of the layer normalization, as in PyTorch
length = lambda rows: jnp.sqrt(jnp.maximum(jnp.square(rows).sum(axis=-1, keepdims=True), 1e-12))  # differentiable at 0


@method(keeps="its head", travels="the body, embeddings of classes and a conditional valve, both ways")
@dataclasses.dataclass(frozen=True)
class GPFL:
    """GPFL (Zhang et al., 2023): global and personalized features, steered by shared embeddings of the classes."""

    strength: float = knob(0.01, at_least=0, grid=(0.0001, 0.01), help="lambda, pull of features to their embedding")
    mu: float = knob(0.1, at_least=0, grid=(0.0, 0.1, 1.0), help="weight decay of the embeddings and the valve")

    def build(self, problem: Problem) -> Algorithm:
        model, solver, num_classes = problem.model, problem.solver, classes.required(problem, "gpfl", places=False)
        width = classes.num_features(problem)

        def train(context, models, row, data):
            received = tree.first(models)[ADDED]["embeddings"]
            loss = objective(problem, received, personal(received, data.train), self.strength)

            def decayed(pair, batch):
                decay = self.mu / 2 * tree.inner(pair.shared[ADDED], pair.shared[ADDED])
                return solver.with_loss(loss).mean_loss(pair, batch.of_model(0)) + decay

            def gradient(pair, memory, batch):
                return *jax.value_and_grad(decayed)(pair, batch(0)), memory

            models, row, value, _ = beside.descend(problem, context, models, row, data.train, gradient)
            return models, row, value[None]

        def start(key, clients):
            models = problem.init_models(key, 1)
            body = tree.partition(models, model.mask(models, 1))[1]
            own_key = jax.random.fold_in(key, problem.num_clients)  # clients' models take the numbers below
            return Start(models=body | {ADDED: tree.stack_one(initial(own_key, num_classes, width))})

        def row(key, client, models):
            head = heads.head_of(problem, problem.init_model(key, client))
            return beside.Row(OwnModel(head, solver.optimizer.init(head)), problem.kept_optimizers(models))

        def predicting(models, head, data):
            return Prediction(inputs=(head, personal(tree.first(models)[ADDED]["embeddings"], data.train)))

        def apply(models, inputs, x):
            (head, context), shared = inputs, tree.first(models)
            params = whole(shared, head)
            return model.head(params, valve(shared[ADDED], model.features(params, x), context))

        def adapt(context, models, data):
            init_key, train_key = jax.random.split(context.key)
            shared, head = tree.first(models), heads.head_of(problem, model.init(init_key))
            own = personal(shared[ADDED]["embeddings"], data.train)
            alone = solver.with_loss(lambda head, *example: classified(problem, shared, head, own, *example)[0])
            context = context._replace(key=train_key)
            head = problem.alone(context, head, data, rounds=problem.rounds, objective=alone.mean_loss)
            return predicting(models, head, data)

        return averaging(
            problem,
            start=start,
            row=row,
            train=train,
            predict=lambda context, models, row, data: predicting(models, row.own.model, data),
            apply=apply,
            adapt=adapt,
            ledger=Ledger(gradients=1, unaccounted="a client's class counts, which personalize its features"),
            report=Report("each client's own head on its personalized features"),
        )


def whole(shared: Params, head: Params) -> Params:
    """The network's parameters, of what is shared and a head."""
    return tree.combine(head, {name: part for name, part in shared.items() if name != ADDED})


def personal(embeddings: Array, train: Split) -> Array:
    """e_k (F,), the mean of the embeddings of a client's classes, by their shares."""
    return classes.counts(train, len(embeddings)) / jnp.maximum(train.size, 1) @ embeddings


def classified(problem: Problem, shared: Params, head: Params, context: Array, x: PyTree, y: Array, *key: Key) -> tuple:
    """CE(h(V(z, e)), y) of each example, by a shift of the network's own logits, and the features z."""
    params, model = whole(shared, head), problem.model
    z = model.features(params, x, *key)
    logits = model.head(params, valve(shared[ADDED], z, context))
    return problem.solver.loss(params, x, y, *key, shift=logits - model.apply(params, x, *key)), z


def objective(problem: Problem, received: Array, own: Array, strength: Array | float) -> Callable[..., Array]:
    """The loss of each example, without the weight decay: a function of a `Pair`, x, y and perhaps a key.

    Args:
        problem: The problem of the method.
        received: E (C, F).
        own: e_k (F,).
        strength: lambda.
    """

    def loss(pair, x, y, *key):
        added = pair.shared[ADDED]
        value, z = classified(problem, pair.shared, pair.own, own, x, y, *key)
        z = valve(added, z, received.mean(axis=0))
        cosine = (z / length(z)) @ (added["embeddings"] / length(added["embeddings"])).T
        category = optax.losses.softmax_cross_entropy_with_integer_labels(cosine, y)
        return value + category + strength * length(z - received[y])[..., 0]

    return loss


def initial(key: Key, num_classes: int, width: int) -> Params:
    """E and V at first, drawn as PyTorch does: E is normal, and weights and biases of V are uniform."""
    keys = jax.random.split(key, 5)
    bound = width**-0.5

    def layer(weights, biases):
        weight = jax.random.uniform(weights, (width, width), minval=-bound, maxval=bound)
        bias = jax.random.uniform(biases, (width,), minval=-bound, maxval=bound)
        return {"weight": weight, "bias": bias, "gain": jnp.ones(width), "offset": jnp.zeros(width)}

    return {
        "embeddings": jax.random.normal(keys[0], (num_classes, width)),
        "gamma": layer(*keys[1:3]),
        "beta": layer(*keys[3:]),
    }


def valve(added: Params, z: Array, context: Array) -> Array:
    """V(z, e) for features z (B, F) and a context e (F,)."""

    def conditional(layer):
        h = jax.nn.relu(context @ layer["weight"] + layer["bias"])
        h = (h - h.mean()) / jnp.sqrt(h.var() + EPSILON)
        return h * layer["gain"] + layer["offset"]

    return jax.nn.relu((1 + conditional(added["gamma"])) * z + conditional(added["beta"]))
