"""GPFL by hand on networks with one hidden layer, with slopes by finite differences; and newcomers."""

import jax
import numpy as np
import pytest
from by_hand import by_hand, entry, newcomers_by_hand, stack
from networks import BODY, HEAD, features, row, softmax, step_by_differences

from pfljax.algorithms.gpfl import ADDED

# Wide enough that some features are above 0: where the slope of the rectifier jumps, differences do not give it.
OPTIONS = {"sizes": (2, 5, 0, 4), "hidden": (6,), "rounds": 2, "epochs": 2}
PARTS = (BODY, HEAD, ADDED)


def conditional(layer, context):
    """What the valve scales or shifts features by."""
    h = np.maximum(context @ layer["weight"] + layer["bias"], 0)
    return (h - h.mean()) / np.sqrt(h.var() + 1e-5) * layer["gain"] + layer["offset"]


def valve(added, z, context):
    """V(z, e)."""
    gamma = conditional(added["gamma"], context)
    beta = conditional(added["beta"], context)
    return np.maximum((1 + gamma) * z + beta, 0)


def context_of(embeddings, y):
    """The mean of the examples' embeddings, which is that by the classes' shares."""
    return embeddings[y].sum(axis=0) / max(len(y), 1)


def classified(params, context, x):
    """Probabilities of the classes."""
    z = valve(params[ADDED], features(params, x), context)
    return softmax(z @ params[HEAD]["kernel"] + params[HEAD]["bias"])


def entropy(p, y):
    """The mean cross entropy."""
    return -np.log(p[range(len(y)), y]).mean()


def unit(rows):
    """Rows over their lengths."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def objective(params, x, y, received, strength, mu):
    """The loss of the personal features, of the category, of the distance to the embeddings, and weight decay."""
    added = params[ADDED]
    generic = valve(added, features(params, x), received.mean(axis=0))
    personal = entropy(classified(params, context_of(received, y), x), y)
    category = entropy(softmax(unit(generic) @ unit(added["embeddings"]).T), y)
    distance = np.linalg.norm(generic - received[y], axis=1).mean()
    decay = sum(np.square(leaf).sum() for leaf in jax.tree.leaves(added))
    return personal + category + strength * distance + mu / 2 * decay


def gpfl(strength, mu):
    """Clients train all of it; heads stay."""

    def reference(rounds):
        shared = {name: row(rounds.start(f"models.{name}"), 0) for name in (BODY, ADDED)}
        own = [row(rounds.start(f"clients.row.params.{HEAD}"), k) for k in rounds.clients]

        for number in rounds:
            trained = []
            losses = []
            active = rounds.active(number)
            received = shared[ADDED]["embeddings"]
            for k in active:
                data = rounds.examples(k)

                def value(params, data=data, e=received):
                    return objective(params, *data, e, strength, mu)

                params = shared | {HEAD: own[k]}
                of_steps = []
                for _ in range(rounds.epochs):
                    of_steps.append(value(params))
                    params = step_by_differences(value, params, PARTS, rounds.rate)
                own[k] = params.pop(HEAD)
                trained.append(params)
                losses.append(np.mean(of_steps))

            weights = rounds.sizes[active]
            shared = rounds.mean(trained, weights)
            x = np.float64(rounds.federation.test.x[0])
            probabilities = []
            for k in rounds.clients:
                context = context_of(shared[ADDED]["embeddings"], rounds.examples(k)[1])
                probabilities.append(classified(shared | {HEAD: own[k]}, context, x))
            yield {
                f"models.{BODY}": stack([shared[BODY]]),
                f"models.{ADDED}": stack([shared[ADDED]]),
                f"clients.row.params.{HEAD}": own,
                "record.train_loss": np.average(losses, weights=weights),
                "probabilities": probabilities,
            }

    return reference


@pytest.mark.parametrize(("strength", "mu"), [(0.5, 0.1), (0.0, 0.0)])
def test_gpfl_by_hand(strength, mu):
    by_hand(
        "gpfl",
        gpfl(strength, mu),
        hyperparameters={"alignment": strength, "weight_decay": mu},
        **OPTIONS,
    )


def newcomer(rounds, newcomers, k):
    """Trains a head alone."""
    init_key = jax.random.split(jax.random.fold_in(jax.random.key(0), k))[0]
    initial = rounds.problem.model.init(init_key)
    x, y = newcomers.examples(k)
    shared = {name: row(entry(rounds.states[-1], f"models.{name}"), 0) for name in (BODY, ADDED)}
    params = shared | {HEAD: jax.tree.map(np.float64, initial[HEAD])}
    context = context_of(shared[ADDED]["embeddings"], y)
    for _ in range(rounds.epochs * rounds.problem.rounds):
        params = step_by_differences(
            lambda params: entropy(classified(params, context, x), y), params, (HEAD,), rounds.rate
        )
    return params[HEAD]


def test_newcomers_train_a_head_alone():
    hyperparameters = {"alignment": 0.5, "weight_decay": 0.1}
    newcomers_by_hand(
        "gpfl", newcomer, part=f"inputs.0.{HEAD}", hyperparameters=hyperparameters, **OPTIONS
    )
