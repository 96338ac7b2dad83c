"""What clients that come after training predict with, by hand: one function of NumPy for each method.

A newcomer that trains alone does so from the method's models, for as many steps as the method's listing says.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import networks
import numpy as np
import pytest
import quadratics
from by_hand import entry, newcomers_by_hand
from networks import BODY, HEAD


class Newcomer(NamedTuple):
    """A method, and what its newcomers predict with.

    Attributes:
        method: The name of the method.
        reference: (rounds, newcomers, k) -> the models (J, ...) of newcomer k, where `rounds` are those of training and
            `newcomers` has the same functions for the newcomers' own data.
        options: As of `by_hand.play`.
    """

    method: str
    reference: Callable[..., Any]
    options: dict[str, Any] | None = None


def ditto(rounds, newcomers, k):
    """Trains a model from w, regularized toward w, for as many rounds as the run has."""
    w = entry(rounds.states[-1], "models")[0]
    steps = rounds.problem.rounds * rounds.epochs
    return [newcomers.descend(k, w, lambda v: 2.0 * (v - w), steps)]


def fedfomo(rounds, newcomers, k):
    """One step of Eq. 3 and 5 from the mean of all models, on the validation examples."""
    theta = entry(rounds.states[-1], "models")
    mean = theta.mean(axis=0)

    def loss(model):
        return quadratics.loss_of(newcomers.federation, k, model, "validation")

    gains = np.array([loss(mean) - loss(model) for model in theta])
    weights = np.maximum(gains / np.linalg.norm(theta - mean, axis=1), 0)
    return [mean + weights / weights.sum() @ (theta - mean)]


def per_fedavg(rounds, newcomers, k):
    """Two steps at rate alpha from the global model."""
    theta = entry(rounds.states[-1], "models")[0]
    for _ in range(2):
        theta = theta - 0.05 * newcomers.gradient(k, theta)
    return [theta]


def pfedme(rounds, newcomers, k):
    """The theta of least f(theta) + lambda / 2 |theta - w|^2; lambda is 2."""
    w = entry(rounds.states[-1], "models")[0]
    matrix, vector = quadratics.quadratic(newcomers.federation, k)
    return [np.linalg.solve(2 * matrix + 2.0 * np.eye(len(w)), 2 * vector + 2.0 * w)]


def fedah(rounds, newcomers, k):
    """Trains the head from the global one, for two epochs in each of the run's rounds."""
    model = networks.row(entry(rounds.states[-1], "models"), 0)
    steps = 2 * rounds.problem.rounds
    return [networks.descend(model, *newcomers.examples(k), rounds.rate, steps, layers=(HEAD,))]


def flute(rounds, newcomers, k):
    """Trains a head of its own on the shared body, for two epochs in each of the run's rounds."""
    init_key = jax.random.split(jax.random.fold_in(jax.random.key(0), k))[0]
    initial = rounds.problem.model.init(init_key)
    body = networks.row(entry(rounds.states[-1], f"models.{BODY}"), 0)
    model = {BODY: body, HEAD: jax.tree.map(np.float64, initial[HEAD])}
    steps = 2 * rounds.problem.rounds
    return [networks.descend(model, *newcomers.examples(k), rounds.rate, steps, layers=(HEAD,))]


def perada(rounds, newcomers, k):
    """Trains a model from w, regularized toward w by a strength of 0.7."""
    w = networks.row(entry(rounds.states[-1], "models"), 0)
    model = w
    for _ in range(rounds.problem.rounds * rounds.epochs):
        slopes = networks.gradient(model, *newcomers.examples(k))
        slopes = jax.tree.map(lambda slope, a, b: slope + 0.7 * (a - b), slopes, model, w)
        model = networks.step(model, slopes, rounds.rate)
    return [model]


def fedavg_plus(rounds, newcomers, k):
    """Trains the global model for two epochs."""
    return [newcomers.descend(k, entry(rounds.states[-1], "models")[0], steps=2)]


def fedexp(rounds, newcomers, k):
    """The mean of the last two global models."""
    before, last = (entry(state, "models") for state in rounds.states[-2:])
    return (before + last) / 2


def pfedgraph(rounds, newcomers, k):
    """Trains from the mean of what clients receive, for as many rounds as the run has."""
    start = entry(rounds.states[-1], "models").mean(axis=0)
    return [newcomers.descend(k, start, steps=rounds.problem.rounds * rounds.epochs)]


def initial(rounds, k):
    """The parameters of newcomer k before training."""
    key = jax.random.split(jax.random.fold_in(jax.random.key(0), k))[0]
    return jax.tree.map(np.float64, rounds.problem.model.init(key))


def trained_alone(rounds, newcomers, k, model, layers=(BODY, HEAD), epochs=2):
    """A network after training of some layers, for as many rounds as the run has."""
    steps = epochs * rounds.problem.rounds
    return [networks.descend(model, *newcomers.examples(k), rounds.rate, steps, layers=layers)]


def lg_fedavg(rounds, newcomers, k):
    """Trains lower layers of its own under the shared ones."""
    head = networks.row(rounds.states[-1].models[HEAD], 0)
    return trained_alone(rounds, newcomers, k, initial(rounds, k) | {HEAD: head}, (BODY,))


def fedrep(rounds, newcomers, k):
    """Trains a head of its own on the shared body, for the head's three epochs."""
    body = networks.row(rounds.states[-1].models[BODY], 0)
    return trained_alone(rounds, newcomers, k, initial(rounds, k) | {BODY: body}, (HEAD,), epochs=3)


def fedpac(rounds, newcomers, k):
    """As FedRep."""
    body = networks.row(rounds.states[-1].models[BODY], 0)
    return trained_alone(rounds, newcomers, k, initial(rounds, k) | {BODY: body}, (HEAD,), epochs=3)


def fedgh(rounds, newcomers, k):
    """Trains a whole model, which starts with the global head."""
    head = networks.row(rounds.states[-1].models[HEAD], 0)
    return trained_alone(rounds, newcomers, k, initial(rounds, k) | {HEAD: head})


def fedrod(rounds, newcomers, k):
    """Trains a head of its own, whose logits are added to those of the global model."""
    theta = networks.row(rounds.states[-1].models, 0)
    x, y = newcomers.examples(k)
    own = initial(rounds, k)[HEAD]
    for _ in range(rounds.problem.rounds * rounds.epochs):
        slopes = networks.gradient(theta | {HEAD: own}, x, y, networks.logits(theta, x))
        own = networks.step({HEAD: own}, slopes, rounds.rate, [HEAD])[HEAD]
    return own


def feddbe(rounds, newcomers, k):
    """Trains a vector alone, which is added to the features, on the plain loss."""
    theta = networks.row(rounds.states[-1].models, 0)
    kernel = theta[HEAD]["kernel"]
    x, y = newcomers.examples(k)
    own = np.zeros(len(kernel))
    for _ in range(rounds.problem.rounds * rounds.epochs):
        of_logits = networks.gradient(theta, x, y, own @ kernel)[HEAD]["bias"]
        own = own - rounds.rate * kernel @ of_logits
    return own


def pefll(rounds, newcomers, k):
    """Trains nothing: the hypernetwork's model for the descriptor of its examples."""
    server = jax.tree.map(np.float64, rounds.states[-1].server.state)
    x, y = newcomers.examples(k)
    phi = networks.row(rounds.states[-1].models, 0)
    descriptor = networks.forward(phi, np.concatenate([x, np.eye(3)[y]], axis=1))[0].mean(axis=0)
    scaled = (descriptor - server.center) / server.scale
    features = networks.forward(server.network.trunk, scaled[None])[0][0]
    heads = server.network
    return [
        jax.tree.map(
            lambda kernel, bias: np.tensordot(features, kernel, 1) + bias, heads.kernel, heads.bias
        )
    ]


def fedem(rounds, newcomers, k):
    """Takes an E-step from equal weights of the components."""
    return mixture_after(1, entry(rounds.states[-1], "models"), newcomers, k)


def dfedem(rounds, newcomers, k):
    """Takes three E-steps from equal weights of the components, which are means over the clients."""
    return mixture_after(3, entry(rounds.states[-1], "models").mean(axis=0), newcomers, k)


def mixture_after(steps, theta, newcomers, k):
    """Weights of the components theta (M, d) after E-steps (Eq. 8 and 9)."""
    x, y = newcomers.examples(k)
    losses = (np.append(x, np.ones((len(x), 1)), axis=1) @ theta.T - y[:, None]) ** 2
    pi = np.full(len(theta), 1 / len(theta))
    for _ in range(steps):
        q = pi * np.exp(-losses)
        pi = (q / q.sum(axis=1, keepdims=True)).mean(axis=0)
    return pi


def fedbabu(rounds, newcomers, k):
    """Trains the body and the common head, for four epochs."""
    state = rounds.states[-1]
    model = {
        BODY: networks.row(state.models[BODY], 0),
        HEAD: networks.row(state.server.state[HEAD], 0),
    }
    return [networks.descend(model, *newcomers.examples(k), rounds.rate, 4)]


def fml(rounds, newcomers, k):
    """Trains a model on 0.3 CE + 0.7 KL from the meme, which stays."""
    meme = networks.row(rounds.states[-1].models, 0)
    x, y = newcomers.examples(k)
    targets = 0.3 * np.eye(3)[y] + 0.7 * networks.softmax(networks.logits(meme, x))
    steps = rounds.problem.rounds * rounds.epochs
    return [networks.descend(initial(rounds, k), x, targets, rounds.rate, steps)]


def fedproto(rounds, newcomers, k):
    """Trains a model whose features are pulled toward the prototypes, which stay, by a strength of 3."""
    prototypes = rounds.states[-1].models
    mean = np.float64(prototypes.mean[0])
    known = np.asarray(prototypes.count[0]) > 0
    x, y = newcomers.examples(k)
    model = initial(rounds, k)
    for _ in range(rounds.problem.rounds * rounds.epochs):
        apart = networks.features(model, x) - mean[y]
        pull = 3.0 * 2 * apart / mean.shape[1] / len(y) * known[y][:, None]
        model = networks.step(model, networks.gradient(model, x, y, pull=pull), rounds.rate)
    return [model]


def l2sgd(rounds, newcomers, k):
    """Trains the mean of all models for a round."""
    return [newcomers.descend(k, entry(rounds.states[-1], "models")[0])]


def fedbuff(rounds, newcomers, k):
    """The newest model."""
    return [entry(rounds.states[-1], "models")[0]]


NEWCOMERS = [
    Newcomer("ditto", ditto, {"hyperparameters": {"mu": 2.0}}),
    Newcomer("fedfomo", fedfomo, {"rounds": 0}),
    Newcomer("fedem", fedem, {"rounds": 0, "part": "weights"}),
    Newcomer(
        "dfedem", dfedem, {"rounds": 0, "hyperparameters": {"newcomer_steps": 3}, "part": "weights"}
    ),
    Newcomer(
        "fedbabu", fedbabu, {"rounds": 0, "hidden": (6,), "hyperparameters": {"tune_epochs": 4}}
    ),
    Newcomer("fml", fml, {"rounds": 0, "hidden": (6,), "hyperparameters": {"alpha": 0.3}}),
    Newcomer(
        "fedproto", fedproto, {"rounds": 1, "hidden": (6,), "hyperparameters": {"alignment": 3.0}}
    ),
    Newcomer("fedbuff", fedbuff, {"rounds": 1}),
    Newcomer("l2sgd", l2sgd, {"rounds": 0}),
    Newcomer(
        "per_fedavg",
        per_fedavg,
        {"rounds": 0, "hyperparameters": {"personal_learning_rate": 0.05, "adapt_steps": 2}},
    ),
    Newcomer(
        "pfedme",
        pfedme,
        {
            "rounds": 0,
            "hyperparameters": {"mu": 2.0, "personal_steps": 400, "personal_learning_rate": 0.05},
        },
    ),
    Newcomer("fedah", fedah, {"rounds": 0, "hidden": (6,), "hyperparameters": {"head_epochs": 2}}),
    Newcomer("flute", flute, {"rounds": 0, "hidden": (6,), "hyperparameters": {"head_epochs": 2}}),
    Newcomer(
        "perada",
        perada,
        {"rounds": 0, "hidden": (6,), "hyperparameters": {"mu": 0.7, "share": 0.3}},
    ),
    Newcomer("fedavg_plus", fedavg_plus, {"rounds": 0, "hyperparameters": {"tune_epochs": 2}}),
    Newcomer("fedexp", fedexp, {"rounds": 1}),
    Newcomer("pfedgraph", pfedgraph, {"rounds": 1, "hyperparameters": {"mu": 0.0}}),
    Newcomer("lg_fedavg", lg_fedavg, {"rounds": 0, "hidden": (6,)}),
    Newcomer(
        "fedrep", fedrep, {"rounds": 0, "hidden": (6,), "hyperparameters": {"head_epochs": 3}}
    ),
    Newcomer(
        "fedpac", fedpac, {"rounds": 0, "hidden": (6,), "hyperparameters": {"head_epochs": 3}}
    ),
    Newcomer("fedgh", fedgh, {"rounds": 0, "hidden": (6,), "hyperparameters": {"predict": "own"}}),
    Newcomer("fedrod", fedrod, {"rounds": 0, "hidden": (6,), "part": f"inputs.{HEAD}"}),
    Newcomer("feddbe", feddbe, {"rounds": 0, "hidden": (6,), "part": "inputs"}),
    Newcomer(
        "pefll",
        pefll,
        {
            "rounds": 0,
            "hidden": (6,),
            "hyperparameters": {"hidden": 5, "layers": 1, "embedding": 4, "spread": 0.5},
        },
    ),
]


@pytest.mark.parametrize("row", NEWCOMERS, ids=[row.method for row in NEWCOMERS])
def test_newcomers_by_hand(row):
    newcomers_by_hand(row.method, row.reference, **(row.options or {}))
