"""FedTP: rounds with gradients by hand, newcomers, limits, and which parameters are generated."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
import toys
from by_hand import as_numpy, by_hand, newcomers_by_hand, play, stack
from flax import nnx
from networks import RATE, backward, forward, mean

import pfljax as pfl
from pfljax.contract import tree

SIZES = (2, 5, 0, 5, 2)
HYPERPARAMETERS = {
    "server_learning_rate": 0.3,
    "server_momentum": 0.5,
    "weight_decay": 0.1,
    "hidden": 5,
    "layers": 1,
    "embedding": 4,
    "spread": 0.5,
}
OPTIONS = {"sizes": SIZES, "hidden": (), "model": toys.Attentive, "cohort": 4}
ATTENTION = "MultiHeadDotProductAttention_0"
PERSONAL = ("query", "key", "value")
SHARED = ("Dense_0", "Dense_1", "positions")


def loss(params, x, y, weight):
    """The mean cross entropy of `toys.Attentive`, written out; examples of weight 0 do not count."""
    attention = params[ATTENTION]
    tokens = (
        x[..., None] @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"] + params["positions"]
    )
    q, k, v = (jnp.einsum("btd,dhe->bhte", tokens, attention[name]["kernel"]) for name in PERSONAL)
    weights = jax.nn.softmax(q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5)
    tokens += jnp.einsum("bhte,hed->btd", weights @ v, attention["out"]["kernel"])
    outputs = tokens.reshape(len(x), -1) @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    logs = jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], axis=1)[:, 0]
    return -(weight * logs).sum() / weight.sum()


GRADIENT = jax.jit(jax.grad(loss))


def gradient(params, x, y):
    """The gradient in float64; filled up to five examples, for one program."""
    missing = 5 - len(y)
    weight = np.pad(np.ones(len(y)), (0, missing))
    slope = GRADIENT(
        jax.tree.map(np.float32, params),
        np.float32(np.pad(x, ((0, missing), (0, 0)))),
        np.pad(y, (0, missing)),
        np.float32(weight),
    )
    return jax.tree.map(np.float64, slope)


def joined(theta, own):
    """A whole model."""
    return theta | {ATTENTION: theta[ATTENTION] | own[ATTENTION]}


def parted(params):
    """Theta, and the projections."""
    own = {name: params[ATTENTION][name] for name in PERSONAL}
    theta = {name: params[name] for name in SHARED}
    return theta | {ATTENTION: {"out": params[ATTENTION]["out"]}}, {ATTENTION: own}


def present(params):
    """Without the branches that hold None only."""

    def keep(part):
        return present(part) if isinstance(part, dict) else part

    return {name: keep(part) for name, part in params.items() if jax.tree.leaves(part)}


def descend(params, x, y, steps, only_own=False):
    """Steps of full batches, of the projections alone if asked."""
    for _ in range(steps):
        moved = jax.tree.map(lambda p, g: p - RATE * g, params, gradient(params, x, y))
        params = joined(params, parted(moved)[1]) if only_own else moved
    return params


class Server:
    """Theta, the embeddings and the hypernetwork in float64, and the steps of SGD."""

    def __init__(self, state):
        network = state.server.state.learned.network
        kernel, bias = (present(as_numpy(part)) for part in (network.kernel, network.bias))
        self.learned = {
            "v": np.float64(state.server.state.learned.embeddings),
            "trunk": as_numpy(network.trunk),
            "kernel": kernel,
            "bias": bias,
        }
        self.theta = present(networks.row(as_numpy(state.models), 0))
        self.way = jax.tree.map(np.zeros_like, self.learned)

    def projections(self, v):
        """The projections that the hypernetwork makes of an embedding."""
        features = forward(self.learned["trunk"], v[None])[0][0]

        def head(kernel, bias):
            return np.tensordot(features, kernel, axes=1) + bias

        return jax.tree.map(head, self.learned["kernel"], self.learned["bias"])

    def model(self, k):
        """What client k receives."""
        return joined(self.theta, self.projections(self.learned["v"][k]))

    def slopes(self, v, change):
        """Vector-Jacobian products of the projections, and of v (E,)."""
        features, received = forward(self.learned["trunk"], v[None])
        products = jax.tree.map(
            lambda k, c: np.tensordot(k, c, axes=c.ndim), self.learned["kernel"], change
        )
        trunk, of_v = backward(
            self.learned["trunk"], received, sum(jax.tree.leaves(products))[None]
        )
        kernel = jax.tree.map(lambda c: np.multiply.outer(features[0], c), change)
        return {"trunk": trunk, "kernel": kernel, "bias": change}, of_v[0]

    def step(self, slopes):
        """SGD with momentum and weight decay."""
        decayed = jax.tree.map(
            lambda g, p: g + HYPERPARAMETERS["weight_decay"] * p, slopes, self.learned
        )
        self.way = jax.tree.map(
            lambda way, g: HYPERPARAMETERS["server_momentum"] * way + g, self.way, decayed
        )
        self.learned = jax.tree.map(
            lambda p, way: p - HYPERPARAMETERS["server_learning_rate"] * way, self.learned, self.way
        )


def fedtp(rounds):
    """Clients train whole models; the hypernetwork steps along the mean vector-Jacobian product of their changes."""
    server = Server(rounds.states[0])
    for number in rounds:
        thetas = []
        slopes = []
        active = rounds.active(number)
        for k in active:
            v = server.learned["v"][k]
            theta, trained = parted(descend(server.model(k), *rounds.examples(k), rounds.epochs))
            change = jax.tree.map(np.subtract, server.projections(v), trained)
            of_network, of_v = server.slopes(v, change)
            thetas.append(theta)
            slopes.append(of_network | {"v": np.eye(len(rounds.sizes))[:, k : k + 1] * of_v})
        weights = rounds.sizes[active]
        server.step(mean(slopes, weights))
        server.theta = mean(thetas, weights)

        expected = {f"models.{name}": stack([server.theta[name]]) for name in SHARED}
        expected[f"models.{ATTENTION}.out"] = stack([server.theta[ATTENTION]["out"]])
        expected["server.state.learned.embeddings"] = server.learned["v"]
        expected["server.state.learned.network.trunk"] = server.learned["trunk"]
        for name in PERSONAL:
            for part in ("kernel", "bias"):
                projection = server.learned[part][ATTENTION][name]
                expected[f"server.state.learned.network.{part}.{ATTENTION}.{name}"] = projection
        # Client 2, too, which has no examples
        expected["predictions"] = [[server.model(k)] for k in rounds.clients]
        yield expected


def test_fedtp_by_hand():
    by_hand("fedtp", fedtp, hyperparameters=HYPERPARAMETERS, rtol=1e-5, **OPTIONS)


def newcomer(rounds, newcomers, k):
    """Learns an embedding from the mean one."""
    server = Server(rounds.states[-1])
    v = server.learned["v"].mean(axis=0)
    way = 0.0
    for _ in range(rounds.problem.rounds):
        own = server.projections(v)
        data = newcomers.examples(k)
        model = descend(joined(server.theta, own), *data, rounds.epochs, only_own=True)
        change = jax.tree.map(np.subtract, own, parted(model)[1])
        way = (
            HYPERPARAMETERS["server_momentum"] * way
            + server.slopes(v, change)[1]
            + HYPERPARAMETERS["weight_decay"] * v
        )
        v = v - HYPERPARAMETERS["server_learning_rate"] * way
    return [joined(server.theta, server.projections(v))]


def test_newcomers_learn_an_embedding_by_hand():
    newcomers_by_hand("fedtp", newcomer, hyperparameters=HYPERPARAMETERS, rtol=1e-5, **OPTIONS)


def test_only_the_cohort_s_embeddings_move():
    """Without momentum and decay; of those with examples."""
    rounds = play(
        "fedtp",
        hyperparameters=HYPERPARAMETERS | {"weight_decay": 0.0, "server_momentum": 0.0},
        **OPTIONS,
    )
    for number in rounds:
        before = np.asarray(rounds.states[number].server.state.learned.embeddings)
        after = np.asarray(rounds.states[number + 1].server.state.learned.embeddings)
        moved = np.flatnonzero((before != after).any(axis=1))
        np.testing.assert_array_equal(moved, rounds.active(number))


def test_at_rate_0_only_theta_moves():
    states = play(
        "fedtp", hyperparameters=HYPERPARAMETERS | {"server_learning_rate": 0.0}, **OPTIONS
    ).states
    toys.assert_trees_close(states[-1].server.state.learned, states[0].server.state.learned)
    assert not toys.same_trees(states[-1].models, states[0].models)


@pytest.mark.slow
def test_from_one_model_a_round_is_fedavg_s():
    """Theta is the mean of FedAvg, and so are, at rate 1, the biases of the heads that make the projections."""
    hyperparameters = HYPERPARAMETERS | {
        "spread": 0.0,
        "server_learning_rate": 1.0,
        "server_momentum": 0.0,
        "weight_decay": 0.0,
    }
    options = OPTIONS | {"cohort": 0}
    states = play("fedtp", rounds=1, hyperparameters=hyperparameters, **options).states
    fedavg = play("fedavg", rounds=1, **options).states
    for state, wanted in zip(states, fedavg, strict=True):
        found = tree.combine(tree.first(state.models), state.server.state.learned.network.bias)
        toys.assert_trees_close(found, tree.first(wanted.models), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_where_everything_is_generated_it_is_pfedhn():
    """Whose mean is unweighted, so clients are of one size."""
    federation = toys.make_federation((3, 3, 3))
    options = {"optimizer": networks.OPTIMIZER, "model": toys.Normalized, "epochs": 2}
    same = {name: value for name, value in HYPERPARAMETERS.items() if name != "weight_decay"}
    own = {
        "fedtp": {"personal": "", "weight_decay": 0.0},
        "pfedhn": {"clip": np.inf, "initialization": "torch"},
    }
    servers = []
    for name, hyperparameters in own.items():
        played = toys.play(name, federation, 3, hyperparameters=same | hyperparameters, **options)
        servers.append(played.states[-1].server.state)
    fedtp_server, pfedhn_learned = servers
    toys.assert_trees_close(fedtp_server.learned, pfedhn_learned, rtol=1e-5, atol=1e-6)


class InNNX(nnx.Module):
    """Attention over the features, in NNX."""

    def __init__(self, *, rngs):
        self.embed = nnx.Linear(1, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.attention(self.embed(x[..., None])).mean(axis=1))


def paths(params):
    """The paths of the leaves that are present."""

    def name(path):
        return "/".join(str(entry.key) for entry in path)

    return {name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}


LEAVES = [f"{name}/{leaf}" for name in PERSONAL for leaf in ("kernel", "bias")]
NAMED = {
    "linen": (toys.Attentive, (3,), {f"{ATTENTION}/{name}/kernel" for name in PERSONAL}),
    "nnx": (lambda rngs: InNNX(rngs=rngs), (3,), {f"attention/{leaf}" for leaf in LEAVES}),
    "vit": (
        pfl.models.ViT(patch=2, width=4, depth=2, heads=2, hidden=4),
        (4, 4, 1),
        {f"block_{block}/attention/{leaf}" for block in range(2) for leaf in LEAVES},
    ),
}


@pytest.mark.parametrize(("model", "shape", "layers"), NAMED.values(), ids=NAMED)
def test_projections_are_found_by_flax_s_names(model, shape, layers):
    federation = toys.make_federation((2, 3), features=math.prod(shape))
    split = federation.train
    x = split.x.reshape(*split.y.shape, *shape)
    federation = dataclasses.replace(federation, train=split._replace(x=x))
    problem = toys.make_problem(federation, model=model)
    algorithm = toys.make_algorithm("fedtp", problem)
    state = jax.eval_shape(
        lambda key: algorithm.start(key, federation.client_data), jax.random.key(0)
    )
    assert paths(state.state.learned.network.bias) == layers
    assert paths(state.models) == paths(problem.model.network.shapes) - layers


def test_own_names_of_what_is_generated():
    federation = toys.make_federation((2, 3))
    problem = toys.make_problem(federation, hidden=(4,))
    algorithm = toys.make_algorithm("fedtp", problem, personal="Dense_0")
    state = jax.eval_shape(
        lambda key: algorithm.start(key, federation.client_data), jax.random.key(0)
    )
    assert paths(state.state.learned.network.bias) == {"Dense_0/kernel", "Dense_0/bias"}
    assert paths(state.models) == {"Dense_1/kernel", "Dense_1/bias"}
