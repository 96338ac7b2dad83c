"""Methods of LoRA on linear regressions with two targets, whose gradients NumPy works out."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
import toys
from by_hand import by_hand, play

import pfljax as pfl

RATE = 0.1
F = 3
T = 2
RANK = 2
SIZES = np.array([4, 2, 5, 3])
RNG = np.random.default_rng(0)
W0 = RNG.normal(size=(F, T))
X = RNG.normal(size=(SIZES.sum(), F))
Y = RNG.normal(size=(SIZES.sum(), T))
owner = np.repeat(np.arange(4), SIZES)


def federation(x=X, y=Y, client=owner):
    """The clients; each one's first example is its only one for testing, too."""
    first = np.unique(client, return_index=True)[1]
    both = [np.concatenate([part, part[first]]) for part in (x, y, client)]
    is_test = np.arange(len(both[0])) >= len(x)
    return pfl.Federation.from_arrays(*both, is_test=is_test, standardize=False)


A = "kernel_lora_a"
B = "kernel_lora_b"
MODEL = pfl.Model(
    nn.Dense(T, use_bias=False),
    frozen={"kernel": W0},
    trainable=pfl.adapters.lora(rank=RANK),
    frozen_dtype="float32",
)


def trained(method, rounds, *, arrays=(X, Y, owner), rank=RANK, seed=0):
    """The result of some rounds, one full-batch step of SGD each."""
    model = dataclasses.replace(MODEL, trainable=pfl.adapters.lora(rank=rank))
    run = pfl.Run(method, federation(*arrays), model, pfl.LocalTraining(optax.sgd(RATE)), seed=seed)
    return run.train(rounds, progress=False)


def factors(params):
    return np.float64(params["kernel_lora_a"]), np.float64(params["kernel_lora_b"])


def start():
    """A and B before the first round, the same for all clients and methods."""
    a = np.float64(trained(pfl.FFALoRA(), 1).state.server.state.state["kernel_lora_a"][0])
    return a, np.zeros((RANK, T))


def slope(k, weight):
    """Gradient of client k's mean squared error with respect to the whole weight, and its inputs."""
    x = X[owner == k]
    y = Y[owner == k]
    return 2 / T * x.T @ (x @ weight - y) / len(x)


def step(k, a, b, beside=0.0):
    """A and B after a step, with a fixed product beside them."""
    g = slope(k, W0 + beside + a @ b)
    return a - RATE * g @ b.T, b - RATE * a.T @ g


def mean(values):
    return np.average(values, axis=0, weights=SIZES)


def predicted(result, k):
    """Client k's predictions of its own examples."""
    return np.float64(result.predict(np.float32(X[owner == k]), client=k))


def close(found, expected, **options):
    np.testing.assert_allclose(found, expected, **{"rtol": 1e-4, "atol": 1e-5} | options)


def fedit(rounds):
    """A and B are averaged apart."""
    a, b = start_of(rounds, "models", "models")
    for _ in rounds:
        steps = [step(k, a, b) for k in rounds.clients]
        a, b = (rounds.mean(each) for each in zip(*steps, strict=True))
        yield {f"models.{A}": a[None], f"models.{B}": b[None]}


def ffa_lora(rounds):
    """A is the server's, and stays as it is; B is averaged."""
    a, b = start_of(rounds, "server.state", "models")
    for _ in rounds:
        b = rounds.mean([step(k, a, b)[1] for k in rounds.clients])
        outputs = np.float64(rounds.federation.test.x[0]) @ (W0 + a @ b)
        yield {
            f"server.state.{A}": a[None],
            f"models.{B}": b[None],
            "probabilities": [outputs for _ in rounds.clients],
        }


def fedsa_lora(rounds):
    """A is averaged; B stays at home."""
    a = rounds.start(f"models.{A}")[0]
    own = list(rounds.start(f"clients.row.{B}"))
    for _ in rounds:
        steps = [step(k, a, own[k]) for k in rounds.clients]
        a = rounds.mean([each for each, _ in steps])
        own = [each for _, each in steps]
        yield {
            f"models.{A}": a[None],
            f"clients.row.{B}": own,
            "predictions": [[{A: a, B: b}] for b in own],
        }


def start_of(rounds, of_a, of_b):
    """A and B before the first round."""
    return rounds.start(f"{of_a}.{A}")[0], rounds.start(f"{of_b}.{B}")[0]


@pytest.mark.parametrize("reference", [fedit, ffa_lora, fedsa_lora])
def test_rounds_by_hand(reference):
    by_hand(reference.__name__, reference, federation=federation(), model=MODEL, epochs=1)


def best(product, rank):
    """The best approximation of a matrix, as the sum of its leading singular triples."""
    u, s, v = np.linalg.svd(product)
    return sum(s[i] * np.outer(u[:, i], v[i]) for i in range(rank))


def cut(product, rank):
    """A and B of a product, singular values in A."""
    u, s, v = np.linalg.svd(product)
    return u[:, :rank] * s[:rank], v[:rank]


FLEX_RANKS = (1, 2)


def flexlora(rounds):
    """Products are averaged, and cut to each client's rank."""

    def rank_of(k):
        return FLEX_RANKS[k % 2]

    a, b = start_of(rounds, "models", "models")
    begin = [(a[:, : rank_of(k)], b[: rank_of(k)]) for k in rounds.clients]
    for number in rounds:
        product = rounds.mean([np.matmul(*step(k, *begin[k])) for k in rounds.clients])
        close(np.matmul(*factors(rounds.states[number + 1].models))[0], product)
        begin = [cut(product, rank_of(k)) for k in rounds.clients]
        weights = [W0 + best(product, rank_of(k)) for k in rounds.clients]
        x = np.float64(rounds.federation.test.x[0])
        yield {"probabilities": [x @ weight for weight in weights]}


def feddpa(share):
    """Clients train their own adapters, too, and mix them in by the similarity of inputs."""

    def unit(x):
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    def reference(rounds):
        a, b = start_of(rounds, "models", "models")
        # The clients' own adapters start apart.
        own = list(
            zip(*(rounds.start(f"clients.row.params.{name}") for name in (A, B)), strict=True)
        )
        x = np.float64(rounds.federation.test.x[0])
        for _ in rounds:
            w = a @ b
            for k, (c, d) in enumerate(own):
                # Of (W + V) / 2: half of V's gradient reaches A and B.
                half = slope(k, W0 + w / 2 + c @ d / 2) / 2
                own[k] = (c - RATE * half @ d.T, d - RATE * c.T @ half)
            steps = [step(k, a, b) for k in rounds.clients]
            a, b = (rounds.mean(each) for each in zip(*steps, strict=True))

            outputs = []
            for k, (c, d) in enumerate(own):
                # The features are the inputs.
                similarity = unit(x) @ unit(X[owner == k]).T
                alpha = share * np.maximum(similarity.mean(axis=1), 0)[:, None]
                outputs.append(x @ W0 + (1 - alpha) * (x @ a @ b) + alpha * (x @ c @ d))
            yield {f"models.{A}": a[None], f"models.{B}": b[None], "probabilities": outputs}

    return reference


@pytest.mark.parametrize(
    ("name", "hyperparameters", "reference"),
    [
        ("flexlora", {"ranks": FLEX_RANKS}, flexlora),
        ("feddpa", {"weight": 0.8}, feddpa(0.8)),
        ("feddpa", {"weight": 0.0}, feddpa(0.0)),  # with the program of the one before
    ],
    ids=["flexlora", "feddpa", "feddpa_without_the_personal_adapter"],
)
def test_other_rounds_by_hand(name, hyperparameters, reference):
    """Without the personal adapter, FedDPA is FedIT."""
    by_hand(
        name,
        reference,
        hyperparameters=hyperparameters,
        federation=federation(),
        model=MODEL,
        epochs=1,
    )


def test_ranks_beyond_the_adapters():
    with pytest.raises(pfl.ArgumentError, match=r"ranks=.*accepted: ranks from 1 to 2"):
        play(
            "flexlora",
            rounds=0,
            hyperparameters={"ranks": (4,)},
            federation=federation(),
            model=MODEL,
        )


def test_hilora_s_root_is_trained_without_a_penalty():
    """It has nothing above it with which it could overlap."""
    hyperparameters = {"root_rounds": 1, "cluster_rounds": 1, "orthogonality": 0.4}
    rounds = play(
        "hilora",
        rounds=1,
        hyperparameters=hyperparameters,
        federation=federation(),
        model=MODEL,
        epochs=1,
    )
    begin = [factor[0] for factor in factors(rounds.states[0].models)]
    steps = [step(k, *begin) for k in rounds.clients]
    product = mean([np.matmul(*each) for each in steps])
    close(np.matmul(*factors(rounds.states[1].models))[0], product)


@pytest.mark.slow
def test_hilora_trains_the_root_then_clusters_then_leaves():
    a, b = start()
    product = np.zeros((F, T))
    for number in range(2):
        begin = (a, b) if number == 0 else cut(product, RANK)
        steps = [step(k, *begin) for k in range(4)]
        product = mean([np.matmul(*each) for each in steps])
    method = pfl.HiLoRA(root_rounds=2, cluster_rounds=1, orthogonality=0.3)
    root = trained(method, 2)
    models = factors(root.state.models)
    close(np.matmul(*models)[0], product)
    close(models[1][0] @ models[1][0].T, np.eye(RANK))
    result = trained(method, 3)
    row = result.state.rows.state
    models = factors(result.state.models)
    close(np.matmul(*models)[0], product)  # as it was
    labels = np.array([result.collaboration.index[-1][k][1] - 1 for k in range(4)])
    root_b = cut(product, RANK)[1]
    for label in set(labels):
        members = [k for k in range(4) if labels[k] == label]
        found = []
        for k in members:
            c, d = step(k, a, b, beside=product)
            d = d - RATE * 0.3 * 2 * b @ root_b.T @ root_b  # b is 0: the penalty has no slope yet
            found.append(c @ d)
        expected = np.average(found, axis=0, weights=SIZES[members])
        close(np.matmul(*models)[1 + label], best(expected, RANK))
    assert not row.trained.any()
    final = trained(method, 4)
    assert final.state.rows.state.trained.all()
    for k in range(4):
        tier = np.matmul(*models)[1 + labels[k]]
        c, d = step(k, a, b, beside=product + tier)
        close(predicted(final, k), X[owner == k] @ (W0 + product + tier + c @ d))


def test_hilora_s_penalty_is_the_overlap_of_bases():
    """A leaf's second step feels its overlap with root and cluster."""
    strength = 0.4
    hyperparameters = {"root_rounds": 1, "cluster_rounds": 1, "orthogonality": strength}
    rounds = play(
        "hilora",
        rounds=4,
        hyperparameters=hyperparameters,
        federation=federation(),
        model=MODEL,
        epochs=1,
    )
    clients = rounds.federation.client_data
    before, after = rounds.states[3:]
    used = toys.used(rounds.algorithm, rounds.problem, jax.random.key(0), before, clients)["index"]
    models = factors(before.models)
    leaves = factors(before.rows.leaf)
    trained = factors(after.rows.leaf)
    for k in rounds.clients:
        a_root = models[0][0]
        b_root = models[1][0]
        a_cluster = models[0][used[k][1]]
        b_cluster = models[1][used[k][1]]
        a = leaves[0][k]
        b = leaves[1][k]
        g = slope(k, W0 + a_root @ b_root + a_cluster @ b_cluster + a @ b)
        penalty = strength * 2 * b @ (b_root.T @ b_root + b_cluster.T @ b_cluster)
        close(trained[0][k], a - RATE * g @ b.T)
        close(trained[1][k], b - RATE * (a.T @ g + penalty))


@pytest.mark.slow
def test_hilora_finds_groups_that_adapt_in_other_directions():
    """Targets of half of the clients differ from the frozen model's in the first value, of the others in the second."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, F))
    client = np.repeat(np.arange(8), 10)
    moved = rng.normal(size=F)
    y = x @ W0
    y[np.arange(80), client // 4] += 2 * x @ moved
    result = trained(
        pfl.HiLoRA(root_rounds=1, cluster_rounds=1, clusters=3), 2, arrays=(x, y, client), rank=1
    )
    of = result.collaboration.index[-1][:, 1]
    assert len(set(of[:4])) == len(set(of[4:])) == 1 and of[0] != of[4]


def test_batch_statistics_of_feddpa_s_adapters_follow_their_forward_passes():
    """Those of the global adapter, and those of the clients' own; here they depend on inputs alone."""
    network = toys.Normalized(T)
    frozen = network.init(jax.random.key(0), np.zeros((1, F), np.float32))
    adapters = pfl.adapters.lora(rank=RANK)
    model = pfl.Model(network, frozen=frozen, trainable=adapters, frozen_dtype="float32")
    rounds = play("feddpa", rounds=2, federation=federation(), model=model, epochs=1)

    def statistics(params):
        norm = params["batch_stats"]["BatchNorm_0"]
        return np.stack([norm["mean"], norm["var"]], axis=1)

    # Momentum is 0.7, and each round is one step on all examples.
    of_global = np.stack([np.zeros(F), np.ones(F)])
    personal = np.stack([of_global] * 4)
    for state in rounds.states[1:]:
        trained = []
        for k in rounds.clients:
            x = X[owner == k]
            batch = np.stack([x.mean(axis=0), x.var(axis=0)])
            trained.append(0.7 * of_global + 0.3 * batch)
            personal[k] = 0.7 * personal[k] + 0.3 * batch
        of_global = mean(trained)
        close(statistics(state.models)[0], of_global)
        close(statistics(state.rows.params), personal)
