"""What the plan says of a run."""

import flax.linen as nn
import optax
import pytest
import toys

import pfljax as pfl
from pfljax.training.describe import settings, stale_statistics


class Normalized(nn.Module):
    momentum: float

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=self.momentum)(
            x.reshape(x.shape[0], -1)
        )
        return nn.Dense(10)(x)


@pytest.mark.parametrize(
    ("momentum", "rounds", "said"),
    [
        (0.99, 10, "momentum 0.99 keeps 82 % of the initial values after 20 steps"),
        (0.99, 150, ""),  # 0.99^300 = 4.9 %
        (0.9, 10, "momentum 0.9 keeps 12 % of the initial values after 20 steps"),
        (0.9, 15, ""),
    ],
)
def test_batch_statistics_that_hardly_move_are_told(momentum, rounds, said):
    """Twenty examples in batches of ten are two steps a round, of which each keeps `momentum` of the averages."""
    clients = pfl.data.digits(num_clients=2, train_examples=20)
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=10)
    run = pfl.Run(pfl.FedAvg(), clients, Normalized(momentum), local)
    told = stale_statistics(run.experiment.with_rounds(rounds))
    assert told == (said and f"{said}; lower it, or predictions may be poor")


def test_networks_without_averages_are_not_mentioned():
    clients = pfl.data.digits(num_clients=2, train_examples=20)
    assert (
        stale_statistics(pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP()).experiment.with_rounds(1))
        == ""
    )


def squared(outputs, targets):
    return ((outputs - targets) ** 2).mean()


@pytest.mark.parametrize(("loss", "name"), [("mse", "mse"), (squared, "squared")])
def test_a_loss_is_recorded_by_its_name(loss, name):
    clients = toys.make_federation((2, 3), "regression")
    local = pfl.LocalTraining(loss=loss)
    found = settings(pfl.FedAvg(), clients, pfl.models.MLP((4,)), local, {})
    assert found["local.loss"] == name
