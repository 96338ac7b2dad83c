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

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import classes, heads, networks, pairs
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Mode,
    Params,
    Prediction,
    PyTree,
    Split,
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Pair, Personal, Problem
from pfljax.settings.method import hyperparameter, method

ADDED = "conditional"  # the branch of E and V beside the model's own


@method(
    keeps="its head",
    travels="the body, embeddings of classes and a conditional valve, both ways",
)
@dataclasses.dataclass(frozen=True)
class GPFL:
    """GPFL (Zhang et al., 2023): global and personalized features, steered by shared embeddings of the classes.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.GPFL(alignment=0.0001)
        GPFL(alignment=0.0001, weight_decay=0.1)
    """

    alignment: float = hyperparameter(
        0.01,
        at_least=0,
        grid=(0.0001, 0.01),
        help="lambda, pull of features to their embedding",
        former="strength",
    )
    weight_decay: float = hyperparameter(
        0.1,
        at_least=0,
        grid=(0.0, 0.1, 1.0),
        help="mu, weight decay of the embeddings and the valve",
        former="mu",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        solver = problem.solver
        num_classes = classes.required(problem, "gpfl", per_position=False)
        num_features = classes.num_features(problem)

        def init_head(params: Params) -> Params:
            return heads.head_of(problem, params)

        def personal_logits(
            shared: Params, head: Params, own_context: Array, x: PyTree, mode: Mode = None
        ) -> tuple[Array, Array]:
            """h_k(V(z, e_k)) (B, C), and z (B, F)."""
            params = with_head(shared, head)
            z = model.features(params, x, mode)
            return model.head(params, valve(shared[ADDED], z, own_context)), z

        def personal_loss(
            shared: Params, head: Params, own_context: Array, x: PyTree, y: Array, mode: Mode = None
        ) -> tuple[Array, Array]:
            """CE(h_k(V(z, e_k)), y) of each example, by a shift of the network's own logits; and z (B, F)."""
            params = with_head(shared, head)
            logits, z = personal_logits(shared, head, own_context, x, mode)
            shift = logits - model.apply(params, x, mode)
            return solver.loss(params, x, y, mode, shift=shift), z

        # ---- The client.

        def first_model(key: Key) -> Params:
            """theta, E and V."""
            params = problem.init_global(key)
            _, body = tree.partition(params, model.mask(params, 1))
            # Clients' models take the numbers below num_clients.
            added_key = jax.random.fold_in(key, problem.num_clients)
            return body | {ADDED: init_added(added_key, num_classes, num_features)}

        def first_row(key: Key, client: Array) -> Personal:
            """h_k. A client's row is its head."""
            return problem.init_personal(key, client, init_head)

        def train(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Trained:
            # g = mean_c E_c and e_k = sum_c p_kc E_c, as received.
            received = tree.first(models)[ADDED]["embeddings"]
            global_context = received.mean(axis=0)
            own_context = mean_embedding(received, data.train)

            def loss(pair: Pair, x: PyTree, y: Array, mode: Mode = None) -> Array:
                added = pair.shared[ADDED]
                label_loss, z = personal_loss(pair.shared, pair.personal, own_context, x, y, mode)
                # CE(cos(V(z, g), E), y)
                z = valve(added, z, global_context)
                cosines = unit(z) @ unit(added["embeddings"]).T
                category_loss = optax.losses.softmax_cross_entropy_with_integer_labels(cosines, y)
                # lambda |V(z, g) - E_y as received|
                distance = norm(z - received[y])[..., 0]
                return label_loss + category_loss + self.alignment * distance

            def objective(pair: Pair, memory: PyTree, batch: Batch) -> tuple[Array, PyTree]:
                """The mean loss + mu / 2 |(E, V)|^2."""
                added = pair.shared[ADDED]
                decay = self.weight_decay / 2 * tree.inner(added, added)
                return solver.with_loss(loss).mean_loss(pair, batch) + decay, memory

            direction = pairs.joint(objective)
            trained, _ = problem.descend_pair(context, models, personal, data.train, direction)
            return trained

        # ---- What a client predicts with: h_k(V(z, e_k)).

        def predict(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Prediction:
            embeddings = tree.first(models)[ADDED]["embeddings"]
            return Prediction(inputs=(personal.params, mean_embedding(embeddings, data.train)))

        def apply(models: Params, inputs: tuple[Params, Array], x: PyTree) -> Array:
            head, own_context = inputs
            logits, _ = personal_logits(tree.first(models), head, own_context, x)
            return logits

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train a head with theta, E and V fixed."""
            shared = tree.first(models)
            own_context = mean_embedding(shared[ADDED]["embeddings"], data.train)

            def loss(head: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                label_loss, _ = personal_loss(shared, head, own_context, x, y, mode)
                return label_loss

            objective = solver.with_loss(loss).mean_loss
            head = problem.train_newcomer(context, data, objective, part=init_head)
            return Prediction(inputs=(head, own_context))

        return averaging(
            problem,
            train=train,
            ledger=Ledger(
                gradients=1,
                unaccounted="a client's class counts, which personalize its features",
            ),
            first_row=first_row,
            first_model=first_model,
            predict=predict,
            apply=apply,
            adapt=adapt,
            report=MethodReport("each client's own head on its personalized features"),
        )


def with_head(shared: Params, head: Params) -> Params:
    """The network's parameters: a head on the shared body."""
    body = {name: part for name, part in shared.items() if name != ADDED}
    return tree.combine(head, body)


def mean_embedding(embeddings: Array, train: Split) -> Array:
    """e_k = sum_c p_kc E_c (F,), for a client's shares p_kc of examples of class c."""
    shares = classes.counts(train, len(embeddings)) / jnp.maximum(train.size, 1)
    return shares @ embeddings


def init_added(key: Key, num_classes: int, num_features: int) -> Params:
    """E and V at first: E is normal, V is drawn as in PyTorch."""
    keys = jax.random.split(key, 5)
    return {
        "embeddings": jax.random.normal(keys[0], (num_classes, num_features)),
        "gamma": networks.init_normalized_layer(keys[1], keys[2], num_features, num_features),
        "beta": networks.init_normalized_layer(keys[3], keys[4], num_features, num_features),
    }


def valve(added: Params, z: Array, context: Array) -> Array:
    """V(z, e) = relu((1 + gamma(e)) z + beta(e)) for features z (B, F) and a context e (F,)."""
    gamma = conditional(added["gamma"], context)
    beta = conditional(added["beta"], context)
    return jax.nn.relu((1 + gamma) * z + beta)


def conditional(layer: Params, context: Array) -> Array:
    """LayerNorm(relu(affine(e)))."""
    hidden = jax.nn.relu(networks.affine(layer, context))
    return networks.normalized(layer, hidden)


def norm(rows: Array) -> Array:
    """The norm (..., 1) of each row (..., F), differentiable at 0."""
    squares = jnp.square(rows).sum(axis=-1, keepdims=True)
    return jnp.sqrt(jnp.maximum(squares, 1e-12))


def unit(rows: Array) -> Array:
    """Rows over their norms."""
    return rows / norm(rows)
