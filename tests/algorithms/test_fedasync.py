"""FedAsync by hand on quadratics with given delays, and its discounts."""

import jax
import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, SIZES, descend, vectors

LATE = np.array([[0, 0, 0, 0], [1, 1, 0, 1], [2, 0, 1, 2]])


def weight(late, discount):
    """d(s) of the paper's Section 5.2, with a = 0.7 and b = 1."""
    return {"constant": 1, "polynomial": (1 + late) ** -0.7, "hinge": 1 if late <= 1 else 1 / (0.7 * (late - 1) + 1)}[
        discount
    ]


@pytest.mark.parametrize(("discount", "rho"), [("polynomial", 0.3), ("hinge", 0.0), ("constant", 0.0)])
def test_by_hand(discount, rho):
    federation = toys.make_federation(SIZES, "regression")
    knobs = {"max_staleness": 2, "discount": discount, "rho": rho, "alpha": 0.6}
    knobs |= {"b": 1} if discount == "hinge" else {}
    knobs |= {"a": 0.7} if discount != "constant" else {}
    options = {"script": LATE[..., None], "epochs": 2}
    played = toys.play("fedasync", federation, len(LATE), optax.sgd(RATE), knobs, **options)
    _, problem, algorithm, states, records = played
    models = [vectors(states[0].models)[0]]
    for number, late in enumerate(LATE):
        step = np.zeros(4)
        for k, size in enumerate(SIZES):
            start = models[number - late[k]]
            own = descend(federation, k, start, 2, lambda own, start=start: rho * (own - start))
            step += size / sum(SIZES) * 0.6 * weight(late[k], discount) * (own - models[-1])
        models.append(models[-1] + step)
        stack = [models[max(number + 1 - age, 0)] for age in range(3)]
        np.testing.assert_allclose(vectors(states[number + 1].models), stack, rtol=1e-4, atol=1e-5)
        assert records[number].metrics["staleness"] == pytest.approx(late.mean())
    found = toys.predict(algorithm, problem, jax.random.key(0), states[-1], federation.client_data)
    np.testing.assert_allclose(vectors(found.models), np.tile(models[-1], (4, 1, 1)), rtol=1e-4, atol=1e-5)
