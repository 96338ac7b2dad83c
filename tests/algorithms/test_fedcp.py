"""FedCP by hand on networks with one hidden layer, with slopes by finite differences; and newcomers."""

import jax
import numpy as np
import pytest
import toys
from by_hand import by_hand, entry, newcomers_by_hand, stack
from networks import BODY, HEAD, features, row, softmax, step_by_differences

from pfljax.algorithms.fedcp import POLICY

WIDTH = 4
OWN = "own"
OPTIONS = {"sizes": (2, 5, 0, 4), "hidden": (WIDTH,), "rounds": 2, "epochs": 2}


def gumbel(shape):
    """In place of random numbers."""
    return np.sin(np.arange(np.prod(shape))).reshape(shape)


@pytest.fixture(scope="module", autouse=True)
def known_noise():
    """All tests of this file share programs whose noise is known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "gumbel", lambda key, shape: np.float32(gumbel(shape)))
        patch.setattr(toys, "COMPILED", {})
        yield


def direction(head):
    """v of a head."""
    total = head["kernel"].sum(axis=1)
    return total / np.linalg.norm(total)


def logits(params, v, x, noise=0.0):
    """The outputs of both heads, whose features the policy splits."""
    z = features(params, x)
    layer = params[POLICY]
    h = (z * v) @ layer["weight"] + layer["bias"]
    h = (h - h.mean(axis=1, keepdims=True)) / np.sqrt(h.var(axis=1, keepdims=True) + 1e-5)
    u = np.maximum(h * layer["gain"] + layer["offset"], 0)
    u = np.stack([u[:, :WIDTH], u[:, WIDTH:]], axis=1)
    u = np.exp(u + noise * gumbel(u.shape))
    r = u[:, 0] / u.sum(axis=1)
    s = u[:, 1] / u.sum(axis=1)
    own = (r * z) @ params[OWN]["kernel"] + params[OWN]["bias"]
    return own + (s * z) @ params[HEAD]["kernel"] + params[HEAD]["bias"]


def entropy(outputs, y):
    """The mean cross entropy."""
    return -np.log(softmax(outputs)[range(len(y)), y]).mean()


def discrepancy(a, b):
    """MMD^2 of features, the mean over all pairs of examples."""

    def kernel(p, q):
        squares = np.square(p[:, None] - q).sum(axis=-1)
        return sum(np.exp(-squares / (2 * width)) for width in (10, 15, 20, 50))

    return np.mean(kernel(a, a) + kernel(b, b) - 2 * kernel(a, b))


def fedcp(strength, noise):
    """Steps in theta, the policy and the client's own head; the global head is the mean of (own + global) / 2."""

    def reference(rounds):
        shared = row(rounds.start("models"), 0)
        own = [row(rounds.start(f"clients.row.params.{HEAD}"), k) for k in rounds.clients]

        for number in rounds:
            trained = []
            losses = []
            active = rounds.active(number)
            for k in active:
                x, y = rounds.examples(k)
                before = features(shared, x)
                v = direction(own[k])

                def value(params, x=x, y=y, v=v, before=before):
                    pull = discrepancy(features(params, x), before)
                    return entropy(logits(params, v, x, noise), y) + strength * pull

                params = shared | {OWN: own[k]}
                of_steps = []
                for _ in range(rounds.epochs):
                    of_steps.append(value(params))
                    params = step_by_differences(value, params, (BODY, POLICY, OWN), rounds.rate)
                own[k] = params.pop(OWN)
                half = jax.tree.map(lambda mine, psi: (mine + psi) / 2, own[k], shared[HEAD])
                trained.append(params | {HEAD: half})
                losses.append(np.mean(of_steps))

            weights = rounds.sizes[active]
            shared = rounds.mean(trained, weights)
            x = np.float64(rounds.federation.test.x[0])
            outputs = [logits(shared | {OWN: head}, direction(head), x) for head in own]
            yield {
                "models": stack([shared]),
                f"clients.row.params.{HEAD}": own,
                "record.train_loss": np.average(losses, weights=weights),
                "probabilities": [softmax(each) for each in outputs],
            }

    return reference


@pytest.mark.parametrize(("strength", "noise"), [(3.0, 0.0), (0.5, 0.7)])
def test_fedcp_by_hand(strength, noise):
    hyperparameters = {"alignment": strength, "noise": noise}
    by_hand("fedcp", fedcp(strength, noise), hyperparameters=hyperparameters, rtol=1e-5, **OPTIONS)


def newcomer(rounds, newcomers, k):
    """Trains a head alone, v following it, without noise."""
    init_key = jax.random.split(jax.random.fold_in(jax.random.key(0), k))[0]
    initial = rounds.problem.model.init(init_key)
    x, y = newcomers.examples(k)
    shared = row(entry(rounds.states[-1], "models"), 0)
    params = shared | {OWN: jax.tree.map(np.float64, initial[HEAD])}
    for _ in range(rounds.epochs * rounds.problem.rounds):
        v = direction(params[OWN])

        def loss(params, v=v):
            return entropy(logits(params, v, x), y)

        params = step_by_differences(loss, params, (OWN,), rounds.rate)
    return params[OWN]


def test_newcomers_train_a_head_alone():
    hyperparameters = {"alignment": 0.5, "noise": 0.7}
    newcomers_by_hand(
        "fedcp", newcomer, part=f"inputs.{HEAD}", hyperparameters=hyperparameters, **OPTIONS
    )
