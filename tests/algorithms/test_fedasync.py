"""FedAsync by hand on quadratics with given delays, and its discounts."""

import numpy as np
import pytest
import toys
from by_hand import by_hand
from quadratics import OPTIMIZER, SIZES

LATE = np.array([[0, 0, 0, 0], [1, 1, 0, 1], [2, 0, 1, 2]])
ALPHA = 0.6


def discounted(late, discount):
    """d(s) of the paper's Section 5.2, with a = 0.7 and b = 1."""
    if discount == "polynomial":
        return (1 + late) ** -0.7
    return 1 / (0.7 * (late - 1) + 1) if discount == "hinge" and late > 1 else 1


def fedasync(discount, rho):
    """Clients train from the model of some rounds before, and the server moves toward theirs."""

    def reference(rounds):
        models = [rounds.start("models")[0]]
        for number in rounds:
            late = LATE[number]
            steps = []
            for k in rounds.clients:
                start = models[number - late[k]]
                own = rounds.descend(k, start, lambda own, start=start: rho * (own - start))
                steps.append(ALPHA * discounted(late[k], discount) * (own - models[-1]))
            models.append(models[-1] + rounds.mean(steps))

            stack = [models[max(number + 1 - age, 0)] for age in range(3)]
            expected = {"models": stack, "record.metrics.staleness": late.mean()}
            if discount == "polynomial":  # predictions do not depend on it
                expected["predictions"] = np.tile(models[-1], (4, 1, 1))
            yield expected

    return reference


@pytest.mark.parametrize(
    ("discount", "rho"), [("polynomial", 0.3), ("hinge", 0.0), ("constant", 0.0)]
)
def test_by_hand(discount, rho):
    hyperparameters = {"max_staleness": 2, "discount": discount, "mu": rho, "alpha": ALPHA}
    hyperparameters |= {"b": 1} if discount == "hinge" else {}
    hyperparameters |= {"a": 0.7} if discount != "constant" else {}
    by_hand(
        "fedasync", fedasync(discount, rho), hyperparameters=hyperparameters, script=LATE[..., None]
    )


def test_the_proximal_term_leaves_batch_statistics_alone():
    """Statistics of the inputs, which depend on no parameters."""
    federation = toys.make_federation(SIZES, "regression")
    found = []
    for rho in (0.0, 2.0):
        hyperparameters = {"max_staleness": 2, "mu": rho}
        options = {"model": toys.Normalized, "epochs": 2}
        states = toys.play(
            "fedasync", federation, 3, OPTIMIZER, hyperparameters, LATE[..., None], **options
        )
        found.append(states.states[-1].models)
    first, second = (models["batch_stats"]["BatchNorm_0"] for models in found)
    toys.assert_trees_close(first, second, rtol=1e-6)
    kernels = [np.asarray(models["Dense_0"]["kernel"]) for models in found]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3
