"""The loops in PyTorch that the benchmark times compute what they should."""

import numpy as np
import optax
import pytest
import toys

from pfljax import data, models
from pfljax.local.training import LocalTraining

torch = pytest.importorskip("torch")
from experiments import benchmark  # noqa: E402
from experiments import fedem_in_torch as peers  # noqa: E402

FORMS = (peers.ordinary, peers.Fused, peers.FusedOverClients)


@pytest.mark.parametrize("form", FORMS)
def test_rounds_of_single_batches_are_pfljax_s(form):
    """Without shuffling, two rounds with momentum and weight decay give the same components and mixture weights."""
    federation = data.synthetic(6, test_examples=1, train_examples=60)
    model = models.make("logistic", (150,), "classification", 2)
    sgd = optax.chain(
        optax.add_decayed_weights(peers.DECAY), optax.sgd(peers.RATE, momentum=peers.MOMENTUM)
    )
    solver = LocalTraining(sgd, batch_size=peers.BATCH).bind(model)
    problem = toys.make_problem(federation, sgd)._replace(
        model=model, solver=solver, keep_optimizer=True
    )
    states, _ = toys.train(
        toys.make_algorithm("fedem", problem), problem, federation.client_data, 2
    )

    def flat(state):
        return np.concatenate(
            [state.models["Dense_0"]["kernel"][..., 0], state.models["Dense_0"]["bias"]], 1
        )

    components = torch.from_numpy(flat(states[0]).T.copy())
    one_round = form(*peers.client_data(federation), 3)
    for state in states[1:]:
        components = one_round(components)
        np.testing.assert_allclose(components.T, flat(state), rtol=1e-4, atol=1e-6)
    if isinstance(one_round, peers.Fused):
        np.testing.assert_allclose(one_round.pi, states[-1].rows, rtol=1e-4)
    assert np.abs(flat(states[0]) - flat(states[-1])).max() > 1e-3  # a thousand times the tolerance


def test_several_batches_are_the_same_in_all_forms(monkeypatch):
    """In an order that is given, which no form chooses by itself."""
    monkeypatch.setattr(torch, "randperm", torch.arange)
    monkeypatch.setattr(
        torch, "rand", lambda size, dtype: torch.linspace(0, 0.9, size, dtype=dtype)
    )
    monkeypatch.setattr(peers, "BATCH", 20)
    data_ = peers.client_data(data.synthetic(5, test_examples=1))
    start = 0.1 * torch.randn(151, 3, generator=torch.Generator().manual_seed(0))
    rounds = [form(*data_, 3) for form in FORMS]
    found = [one_round(one_round(start)) for one_round in rounds]
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=1e-3, atol=1e-5)


def test_both_loops_over_clients_take_the_gradient_s_steps():
    """Of one full batch a client, so that the order does not count: W - rate X^T (p - y) / n, b likewise."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5, 4)).astype(np.float32)
    y = rng.integers(2, size=(3, 5))
    weight = rng.normal(size=(3, 2, 4)).astype(np.float32)
    for loop in benchmark.LOOPS.values():
        networks = [torch.nn.Linear(4, 2) for _ in range(3)]
        for network, start in zip(networks, weight, strict=True):
            network.weight.data = torch.from_numpy(start.copy())
            network.bias.data = torch.zeros(2)
        loop(torch, 5, networks, list(torch.from_numpy(x)), list(torch.from_numpy(y)))()
        for k, network in enumerate(networks):
            logits = x[k] @ weight[k].T
            p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            error = (p - np.eye(2)[y[k]]) / 5
            np.testing.assert_allclose(
                network.weight.detach(), weight[k] - benchmark.RATE * error.T @ x[k], atol=1e-5
            )
            np.testing.assert_allclose(
                network.bias.detach(), -benchmark.RATE * error.sum(axis=0), atol=1e-5
            )
