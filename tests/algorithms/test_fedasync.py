"""FedAsync by hand on quadratics with given delays, and its discounts."""

import numpy as np
import pytest
from by_hand import by_hand

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
    knobs = {"max_staleness": 2, "discount": discount, "rho": rho, "alpha": ALPHA}
    knobs |= {"b": 1} if discount == "hinge" else {}
    knobs |= {"a": 0.7} if discount != "constant" else {}
    by_hand("fedasync", fedasync(discount, rho), knobs=knobs, script=LATE[..., None])
