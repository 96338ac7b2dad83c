"""A finished run and a finished comparison, for all tests that read them, or change a copy.

A worker trains each of them once. Tests of several files that use them belong to the xdist group "runs".
"""

from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import numpy as np
import optax
import pytest

import pfljax as pfl

ROUNDS = 4
EVAL_EVERY = 2
MODEL = pfl.models.MLP(hidden=())
ONE_DEVICE = pfl.Execution("map", devices=1)


@pytest.fixture(scope="session")
def digits_clients():
    """Six clients in two groups."""
    return pfl.data.digits(
        num_clients=6, partition=pfl.partitions.LabelGroups(groups=2), train_examples=8
    )


@pytest.fixture(scope="session")
def finished_run(digits_clients, tmp_path_factory):
    """The result of FedEM, whose clients mix two linear models, in a folder."""
    local = pfl.LocalTraining(optax.sgd, 0.1)
    run = pfl.Run(
        pfl.methods.FedEM(components=2), digits_clients, MODEL, local, execution=ONE_DEVICE
    )
    return run.train(ROUNDS, eval_every=EVAL_EVERY, out=tmp_path_factory.mktemp("finished") / "run")


class Own(nn.Module):
    """A network of the user, which does not ask for the number of classes."""

    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(3)(inputs)


class Arrays(NamedTuple):
    """A run on the user's own arrays.

    Attributes:
        x: Examples (60, 4), as they come.
        y: Classes 0 to 2.
        client: The clients' names: "a", "b" and "c".
        clients: The federation, whose examples are standardized.
        result: The run's result.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray
    clients: pfl.Federation
    result: pfl.api.Result


@pytest.fixture(scope="session")
def run_of_arrays():
    """A run of one round with a network of the user on arrays of the user."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(60, 4))
    y = np.arange(60) % 3
    client = np.repeat(["a", "b", "c"], 20)
    clients = pfl.Federation.from_arrays(x, y, client=client)
    run = pfl.Run(
        pfl.Local(), clients, Own(), pfl.LocalTraining(optax.sgd, 0.1), execution=ONE_DEVICE
    )
    result = run.train(rounds=1)
    return Arrays(x, y, client, clients, result)


class Comparison(NamedTuple):
    """A comparison with two seeds, a clock and a reference.

    Attributes:
        table: The table.
        out: The folder of the table and of METHOD/seed-SEED.
    """

    table: pfl.api.Table
    out: Path


def compare_local_and_fedavg(out):
    """Compares Local and FedAvg, with a linear model, with Local. Runs that the folder already has are read."""
    clients = pfl.data.digits(
        num_clients=4, train_examples=10, test_examples=10, validation_fraction=0.2
    )
    options = {
        "seeds": (0, 1),
        "eval_every": 1,
        "reference": "local",
        "clock": pfl.Clock(),
        "target": 0.0,
    }
    methods = [pfl.Local(), pfl.FedAvg()]
    return pfl.compare(
        methods, clients, MODEL, rounds=ROUNDS, out=out, execution=ONE_DEVICE, **options
    )


@pytest.fixture(scope="session")
def finished_comparison(tmp_path_factory):
    """The comparison of `compare_local_and_fedavg`."""
    out = tmp_path_factory.mktemp("compared") / "runs"
    return Comparison(compare_local_and_fedavg(out), out)
