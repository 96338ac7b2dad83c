"""What users of other libraries have reported of training, each worked out by hand."""

import gc
import os
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pfljax as pfl

RNG = np.random.default_rng(0)


class Normalized(nn.Module):
    """A linear model of normalized inputs."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(self.num_classes)(x)


def clients_of(sizes, num_test=1):
    """Clients with these numbers of training examples, whose inputs differ: (clients, each client's inputs)."""
    client = np.repeat(np.arange(len(sizes)), np.array(sizes) + num_test)
    x = (RNG.normal(size=(len(client), 2)) * (1 + client[:, None]) + 5 * client[:, None]).astype(
        np.float32
    )
    test = np.concatenate([np.arange(size + num_test) < num_test for size in sizes])
    y = np.arange(len(client)) % 2
    clients = pfl.Federation.from_arrays(x, y, client=client, is_test=test, standardize=False)
    return clients, [np.float64(x[(client == k) & ~test]) for k in range(len(sizes))]


def exported(result, k, collection="batch_stats"):
    return result.export(client=k)[1][collection]


@pytest.mark.slow
def test_a_client_with_batch_statistics_does_not_change_when_a_larger_one_joins():
    kernels = []
    x = RNG.normal(size=(60, 3)).astype(np.float32)
    y = np.arange(60) % 2
    for num in (20, 60):  # the third client has 40
        client = np.minimum(np.arange(num) // 10, 2)
        clients = pfl.Federation.from_arrays(
            x[:num], y[:num], client=client, is_test=np.arange(num) % 10 < 2, standardize=False
        )
        sim = pfl.Simulation(pfl.Local(), clients, Normalized(2), pfl.LocalTraining(optax.sgd(0.1)))
        state, _ = sim.step(jax.random.key(1), sim.init(jax.random.key(0)))
        kernels.append(jax.tree.map(lambda leaf: np.asarray(leaf[0]), state.models))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *kernels)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_batch_normalization_of_clients_with_one_example_is_finite(size):
    """After a step, the mean is (1 - m) times that of the examples, and the variance m + (1 - m) times theirs."""
    clients, own = clients_of([size, 7])
    local = pfl.LocalTraining(optax.sgd(0.0))
    result = pfl.Run(pfl.Local(), clients, Normalized(2), local).train(rounds=1)
    found = exported(result, 0)["BatchNorm_0"]
    np.testing.assert_allclose(found["mean"], 0.1 * own[0].mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(found["var"], 0.9 + 0.1 * own[0].var(axis=0), atol=1e-5)
    assert np.isfinite(result.loss)


class Linear(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.zeros, (x.shape[-1],))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["map", "vmap"])
def test_the_last_incomplete_mini_batch_is_the_mean_of_its_own_examples(plan):
    """An objective that is linear in w: after an epoch, w is the sum of the means of the batches."""
    sizes = [5, 2, 7]
    x = RNG.normal(size=(sum(sizes) + 3, 3)).astype(np.float32)
    client = np.repeat(np.arange(3), np.array(sizes) + 1)
    test = np.concatenate([np.arange(size + 1) == 0 for size in sizes])
    y = np.zeros(len(x), np.float32)
    clients = pfl.Federation.from_arrays(
        x, y, client=client, is_test=test, standardize=False, task="regression"
    )
    own = [x[(client == k) & ~test] for k in range(3)]

    def loss(outputs, y):
        return -outputs

    local = pfl.LocalTraining(optax.sgd(1.0), loss=loss, batch_size=2)
    execution = pfl.Execution(plan=plan)
    sim = pfl.Simulation(pfl.Local(), clients, Linear(), local, execution=execution)
    state, _ = sim.step(jax.random.key(1), sim.init(jax.random.key(0)))
    for k, x in enumerate(own):
        w = np.asarray(state.models["w"][k])
        total = x.sum(axis=0)
        possible = [total / 2] if len(x) % 2 == 0 else [(total + last) / 2 for last in x]
        assert any(np.allclose(w, each, atol=1e-4) for each in possible)


class Dropped(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(self.num_classes)(nn.Dropout(0.5, deterministic=not train)(x))


@pytest.mark.slow
def test_dropout_masks_differ_between_clients_and_repeat_with_the_seed():
    """Of clients with the same examples and the same initial model; predictions have no dropout."""
    x = np.tile(RNG.normal(size=(10, 4)).astype(np.float32), (4, 1))
    y = np.tile(np.arange(10) % 2, 4)
    client = np.repeat(np.arange(4), 10)
    clients = pfl.Federation.from_arrays(x, y, client=client, is_test=np.tile(np.arange(10) < 2, 4))
    local = pfl.LocalTraining(optax.sgd(0.1), common_init=True)
    first, again = (
        pfl.Run(pfl.Local(), clients, Dropped(2), local).train(rounds=1) for _ in range(2)
    )
    kernels = [exported(first, k, "params")["Dense_1"]["kernel"] for k in range(4)]
    for k in range(4):
        np.testing.assert_array_equal(kernels[k], exported(again, k, "params")["Dense_1"]["kernel"])
        assert all(np.abs(kernels[k] - kernels[j]).max() > 1e-4 for j in range(k))
    np.testing.assert_array_equal(first.predict(x[:10], client=0), first.predict(x[:10], client=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-12, weight_decay=0.5),
        optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1e-6)),
        optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0)),
    ],
    ids=["adamw", "decay", "clip"],
)
def test_batch_statistics_see_neither_weight_decay_nor_clipping_and_do_not_count_in_the_norm(
    optimizer,
):
    clients, own = clients_of([10, 6])
    local = pfl.LocalTraining(optimizer, common_init=True)
    sim = pfl.Simulation(pfl.Local(), clients, Normalized(2), local)
    start = sim.init(jax.random.key(0))
    state, _ = sim.step(jax.random.key(1), start)
    found = jax.tree.map(lambda leaf: leaf[0], state.models["batch_stats"]["BatchNorm_0"])
    np.testing.assert_allclose(found["mean"], 0.1 * own[0].mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["var"], 0.9 + 0.1 * own[0].var(axis=0), rtol=1e-4)
    without = {name: value for name, value in state.models.items() if name != "batch_stats"}
    before = {name: value for name, value in start.models.items() if name != "batch_stats"}
    moved = jax.tree.map(lambda a, b: a[0] - b[0], without, before)
    assert float(optax.global_norm(moved)) <= 0.01 * (1 + 1e-4)


class HeadFirst(nn.Module):
    num_classes: int

    def setup(self):
        self.a_head = nn.Dense(self.num_classes)
        self.z_body = nn.Dense(8)

    def __call__(self, x):
        return self.a_head(nn.relu(self.z_body(x)))


class Deep(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        for _ in range(11):
            x = nn.tanh(nn.Dense(6)(x))
        return nn.Dense(self.num_classes)(x)


class Named(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="scaler_one")(
            nn.Dense(8, name="first")(x)
        )
        return nn.Dense(self.num_classes, name="bn_like_head")(nn.relu(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model", "personal"),
    [
        (pfl.FedPer(), Deep(2), {"Dense_11"}),
        (pfl.FedRep(), HeadFirst(2), {"a_head"}),
        (pfl.FedBN(), Named(2), {"scaler_one"}),
    ],
    ids=["twelve layers", "the head is created first", "a normalization with a name of its own"],
)
def test_personal_layers_follow_the_network_and_not_names(method, model, personal):
    """Exactly these differ between two clients after training."""
    clients, _ = clients_of([12, 12, 12])
    result = pfl.Run(method, clients, model, pfl.LocalTraining(optax.sgd(0.1), batch_size=4)).train(
        rounds=2
    )
    one, other = (result.export(client=k)[1] for k in (0, 2))
    same = jax.tree.map(lambda a, b: bool(np.allclose(a, b, atol=1e-7)), one, other)
    differ = {path[1].key for path, equal in jax.tree.leaves_with_path(same) if not equal}
    assert differ == personal


def test_a_regular_expression_that_matches_no_layer_is_refused():
    clients, _ = clients_of([12, 12])
    with pytest.raises(pfl.ArgumentError, match="matches no parameter"):
        pfl.Run(pfl.methods.FedSim(personal="hed"), clients, Named(2))


@pytest.mark.long
def test_runs_give_their_memory_back():
    """Rounds add less than 20 MB after the first 200, and a run that is dropped less than 6 MB after the fifth."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")

    def resident():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    x = RNG.normal(size=(400, 8)).astype(np.float32)
    y = np.arange(400) % 2
    clients = pfl.Federation.from_arrays(x, y, client=np.arange(400) // 20)
    marks = {}
    after = []

    def watch(rows):
        marks[rows[-1]["round"]] = resident()
        return False

    local = pfl.LocalTraining(optax.sgd(0.1))
    pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP((16,)), local, stop=watch).train(
        rounds=1500, eval_every=50
    )
    assert max(marks.values()) - marks[200] < 20
    for seed in range(12):
        pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP((16,)), local, seed=seed).train(rounds=3)
        gc.collect()
        after.append(resident())
    assert (after[-1] - after[4]) / (len(after) - 5) < 6


@pytest.mark.slow
@pytest.mark.parametrize("method", [pfl.FedAvg(), pfl.FedBN()], ids=["FedAvg", "FedBN"])
def test_fedavg_averages_running_statistics_and_fedbn_keeps_each_client_s_own(method):
    """Client k's mean is 0.1 m_k, and its variance 0.9 + 0.1 v_k, after one full batch."""
    sizes = [4, 10, 26]
    clients, own = clients_of(sizes)
    result = pfl.Run(method, clients, Normalized(2), pfl.LocalTraining(optax.sgd(0.01))).train(
        rounds=1
    )
    means = np.stack([0.1 * x.mean(axis=0) for x in own])
    variances = np.stack([0.9 + 0.1 * x.var(axis=0) for x in own])
    if isinstance(method, pfl.FedAvg):
        means, variances = (
            np.average(each, axis=0, weights=sizes)[None].repeat(3, 0)
            for each in (means, variances)
        )
    for k in range(3):
        found = exported(result, k)["BatchNorm_0"]
        np.testing.assert_allclose(found["mean"], means[k], rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(found["var"], variances[k], rtol=1e-3)
    assert jnp.isfinite(result.loss)
