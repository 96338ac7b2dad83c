"""FedProx by hand on quadratics."""

from quadratics import check_averages, descend, play


def test_fedprox_by_hand():
    federation, _, states, _, _ = play("fedprox", epochs=3, knobs={"mu": 2.0})
    check_averages(states, lambda k, theta: descend(federation, k, theta, 3, lambda own: 2.0 * (own - theta)))
