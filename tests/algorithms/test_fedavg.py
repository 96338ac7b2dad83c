"""FedAvg and FedAvg+ by hand."""

import pytest
from by_hand import by_hand


def fedavg(tune_epochs):
    """The mean by n_k of the cohort's trained models; clients predict with it after some more epochs of their own."""

    def reference(rounds):
        theta = rounds.start("models")[0]
        for number in rounds:
            cohort = rounds.cohort(number)
            theta = rounds.mean([rounds.descend(k, theta) for k in cohort], rounds.sizes[cohort])
            tuned = [[rounds.descend(k, theta, steps=tune_epochs)] for k in rounds.clients]
            yield {"models": [theta], "predictions": tuned}

    return reference


@pytest.mark.parametrize("cohort", [0, 2])
def test_fedavg_by_hand(cohort):
    by_hand("fedavg", fedavg(0), cohort=cohort)


@pytest.mark.parametrize("tune_epochs", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_tuning_starts_from_the_global_model(tune_epochs):
    by_hand("fedavg_plus", fedavg(tune_epochs), hyperparameters={"tune_epochs": tune_epochs})
