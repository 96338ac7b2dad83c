"""FedCAC: rounds by hand on quadratics, its limits, and what cannot be critical."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from by_hand import by_hand
from quadratics import OPTIMIZER, SIZES

from pfljax.algorithms.fedcac import largest, similar

# the arrays of the model's vector
KERNEL = slice(0, 3)
BIAS = slice(3, 4)


def critical(moved, tau):
    """The share tau with the largest sensitivity, array by array."""
    mask = np.zeros(4, bool)
    for part in (KERNEL, BIAS):
        places = np.argsort(-moved[part])[: round(tau * len(moved[part]))]
        mask[part.start + places] = True
    return mask


def next_starts(received, own, tau, progress):
    """u_k, and the mean number of partners."""
    masks = [critical(np.abs((w - u) * w), tau) for w, u in zip(own, received, strict=True)]
    overlap = {
        (k, j): 1 - np.abs(masks[k].astype(int) - masks[j].astype(int)).sum() / (2 * masks[k].sum())
        for k in range(4)
        for j in range(4)
        if k != j
    }
    mean = np.mean(list(overlap.values()))
    least = mean + progress * (max(overlap.values()) - mean)
    everyone = np.average(own, axis=0, weights=SIZES)
    starts = []
    num = 0
    for k in range(4):
        partners = [j for j in range(4) if j == k or overlap[k, j] >= least - 1e-6]
        starts.append(np.where(masks[k], own[partners].mean(axis=0), everyone))
        num += len(partners) - 1
    return np.array(starts), num / 4


def fedcac(tau, beta):
    """Algorithm 1: critical parameters are means over partners, the others over all."""

    def reference(rounds):
        received = rounds.start("models")
        numbers = []
        for number in rounds:
            own = np.array([rounds.descend(k, received[k]) for k in rounds.clients])
            progress = (number + 1) / (beta * rounds.problem.rounds)
            received, partners = next_starts(received, own, tau, progress)
            numbers.append(partners)
            predictions = own[:, None]
            yield {
                "models": received,
                "record.metrics.partners": partners,
                "predictions": predictions,
            }
        assert numbers[0] > numbers[-1] == 0

    return reference


@pytest.mark.parametrize("tau", [0.4, 0.7])
def test_rounds_by_hand(tau):
    by_hand("fedcac", fedcac(tau, 1.25), hyperparameters={"tau": tau, "beta": 1.25}, rtol=1e-5)


@pytest.mark.slow
def test_scored_before_local_training_as_in_the_authors_code():
    """A client predicts with u_k, which the server made for it, not with what it has trained."""

    def reference(rounds):
        received = rounds.start("models")
        for number in rounds:
            own = np.array([rounds.descend(k, received[k]) for k in rounds.clients])
            progress = (number + 1) / (1.25 * rounds.problem.rounds)
            received, _ = next_starts(received, own, 0.4, progress)
            yield {"models": received, "predictions": received[:, None]}

    by_hand(
        "fedcac",
        reference,
        hyperparameters={"tau": 0.4, "beta": 1.25, "predict": "received"},
        rtol=1e-5,
    )


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_at_the_limits_of_tau_models_are_fedavg_s(tau):
    """No parameters are critical, or all of them, so that everyone's overlap."""

    def fedavg(rounds):
        model = rounds.start("models")[0]
        for _ in rounds:
            model = rounds.mean([rounds.descend(k, model) for k in rounds.clients])
            yield {"models": [model] * 4}

    by_hand(
        "fedcac",
        fedavg,
        rounds=2,
        sizes=(5, 5, 5, 5),
        hyperparameters={"tau": tau, "beta": 0.34},
        rtol=1e-5,
    )


def test_the_largest_values():
    values = jnp.float32([[[3, 0], [5, 1]], [[0, 0], [0, 2]], [[1, 2], [3, 4]]])
    find = jax.jit(largest)
    found = find(values, 0.5)
    np.testing.assert_array_equal(found, [[[1, 0], [1, 0]], [[0, 0], [0, 1]], [[0, 0], [1, 1]]])
    assert not find(values, 0.0).any()
    np.testing.assert_array_equal(find(values, 1.0), values > 0)


def test_the_threshold_rises_from_the_mean_to_the_largest_overlap():
    masks = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    pairs = np.ones((5, 5), bool)
    pairs[4] = pairs[:, 4] = False  # absent
    find = jax.jit(similar)

    def at(progress):
        return np.asarray(find(jnp.float32(masks @ masks.T), jnp.asarray(pairs), progress))

    # Overlaps: 1 of 0 and 1; 1/2 of 0 or 1 with 2, and of 2 with 3; 0 of 0 or 1 with 3. Their mean is 5/12.
    most = np.zeros((5, 5), bool)
    most[0, 1] = most[1, 0] = True
    some = most.copy()
    for a, b in ((0, 2), (1, 2), (2, 3)):
        some[a, b] = some[b, a] = True
    np.testing.assert_array_equal(at(0.0), some)
    np.testing.assert_array_equal(at(0.2), most)
    np.testing.assert_array_equal(at(0.9), most)
    assert not at(1.1).any()


def test_batch_statistics_are_averaged_over_all():
    federation = toys.make_federation(SIZES)
    states = toys.play(
        "fedcac", federation, 1, OPTIMIZER, {"tau": 1.0, "beta": 1e-3}, model=toys.Normalized
    ).states
    found = states[-1].models["batch_stats"]
    own = states[-1].rows.params["batch_stats"]

    def mean(leaf):
        return np.tile(np.average(leaf, axis=0, weights=SIZES), (4, 1))

    wanted = {name: {key: mean(leaf) for key, leaf in part.items()} for name, part in own.items()}
    toys.assert_trees_close(found, wanted, rtol=1e-5, atol=1e-6)
