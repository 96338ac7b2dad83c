"""FedProx by hand on quadratics."""

from by_hand import averaged, by_hand

MU = 2.0


def client(rounds, k, theta):
    """Steps on l_k(own) + mu / 2 |own - theta|^2."""
    return rounds.descend(k, theta, lambda own: MU * (own - theta))


def test_fedprox_by_hand():
    by_hand("fedprox", averaged(client), hyperparameters={"mu": MU}, epochs=3)
