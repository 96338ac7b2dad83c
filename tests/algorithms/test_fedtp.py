"""FedTP: rounds with gradients by hand, newcomers, limits, and which parameters are generated."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx
from networks import RATE, backward, examples, forward, mean, row

import pfljax as pfl
from pfljax.contract import tree
from pfljax.exchange.rounds import cohort_of

SIZES = (2, 5, 0, 5, 2)
KNOBS = {"rate": 0.3, "momentum": 0.5, "decay": 0.1, "hidden": 5, "layers": 1, "embedding": 4, "spread": 0.5}
ATTENTION, PERSONAL = "MultiHeadDotProductAttention_0", ("query", "key", "value")
THETA, PROJECTIONS = 4 * (4 + 4 + 12 + 16 + 36 + 3), 4 * 3 * 16


def play(rounds, sizes=SIZES, knobs=None, **options):
    options = {"model": toys.Attentive, "epochs": 2} | options
    return toys.play("fedtp", toys.make_federation(sizes), rounds, optax.sgd(RATE), KNOBS | (knobs or {}), **options)


def loss(params, x, y):
    """The mean cross entropy of `toys.Attentive`, written out."""
    attention = params[ATTENTION]
    tokens = x[..., None] @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"] + params["positions"]
    q, k, v = (jnp.einsum("btd,dhe->bhte", tokens, attention[name]["kernel"]) for name in PERSONAL)
    weights = jax.nn.softmax(q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5)
    tokens += jnp.einsum("bhte,hed->btd", weights @ v, attention["out"]["kernel"])
    outputs = tokens.reshape(len(x), -1) @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], axis=1).mean()


GRADIENT = jax.jit(jax.grad(loss))


def joined(theta, own):
    """A whole model."""
    return theta | {ATTENTION: theta[ATTENTION] | own[ATTENTION]}


def parted(params):
    """Theta, and the projections."""
    split = lambda within: {name: part for name, part in params[ATTENTION].items() if (name in PERSONAL) == within}
    rest = {name: part for name, part in params.items() if name != ATTENTION}
    return rest | {ATTENTION: split(False)}, {ATTENTION: split(True)}


def present(params):
    """Without the branches that hold None only."""
    keep = lambda part: present(part) if isinstance(part, dict) else part
    return {name: keep(part) for name, part in params.items() if jax.tree.leaves(part)}


def descend(params, x, y, steps, only_own=False):
    for _ in range(steps):
        slope = jax.tree.map(np.float64, GRADIENT(jax.tree.map(jnp.float32, params), np.float32(x), y))
        moved = jax.tree.map(lambda p, g: p - RATE * g, params, slope)
        params = joined(params, parted(moved)[1]) if only_own else moved
    return params


class Server:
    """Theta, the embeddings and the hypernetwork in float64, and the steps of SGD."""

    def __init__(self, state):
        network = state.server.network
        learned = {"v": state.server.embeddings, "trunk": network.trunk, "kernel": network.kernel, "bias": network.bias}
        self.learned = jax.tree.map(np.float64, present({"all": learned})["all"] | {"trunk": network.trunk})
        self.theta, self.way = present(row(state.models, 0)), jax.tree.map(np.zeros_like, self.learned)

    def projections(self, v):
        features = forward(self.learned["trunk"], v[None])[0][0]
        head = lambda kernel, bias: np.tensordot(features, kernel, axes=1) + bias
        return jax.tree.map(head, self.learned["kernel"], self.learned["bias"])

    def slopes(self, v, change):
        """Vector-Jacobian products of the projections, and of v (E,)."""
        features, received = forward(self.learned["trunk"], v[None])
        products = jax.tree.map(lambda k, c: np.tensordot(k, c, axes=c.ndim), self.learned["kernel"], change)
        trunk, of_v = backward(self.learned["trunk"], received, sum(jax.tree.leaves(products))[None])
        kernel = jax.tree.map(lambda c: np.multiply.outer(features[0], c), change)
        return {"trunk": trunk, "kernel": kernel, "bias": change}, of_v[0]

    def round(self, federation, sizes):
        """Everyone takes part."""
        thetas, found = [], []
        for k, size in enumerate(sizes):
            if size:
                own = self.projections(self.learned["v"][k])
                theta, trained = parted(descend(joined(self.theta, own), *examples(federation, k), 2))
                slopes, of_v = self.slopes(self.learned["v"][k], jax.tree.map(np.subtract, own, trained))
                thetas.append(theta)
                found.append(slopes | {"v": np.eye(len(sizes))[:, k : k + 1] * of_v})
        weights = [size for size in sizes if size]
        decayed = jax.tree.map(lambda g, p: g + KNOBS["decay"] * p, mean(found, weights), self.learned)
        self.way = jax.tree.map(lambda way, g: KNOBS["momentum"] * way + g, self.way, decayed)
        self.learned = jax.tree.map(lambda p, way: p - KNOBS["rate"] * way, self.learned, self.way)
        self.theta = mean(thetas, weights)

    def check(self, state):
        found = Server(state)
        toys.assert_trees_close(found.learned, self.learned, rtol=1e-5, atol=1e-5)
        toys.assert_trees_close(found.theta, self.theta, rtol=1e-5, atol=1e-5)


def test_rounds_by_hand():
    federation, problem, algorithm, states, records = play(3)
    hand = Server(states[0])
    for state in states[1:]:
        hand.round(federation, SIZES)
        hand.check(state)
    models = toys.predict(algorithm, problem, jax.random.key(0), states[-1], federation.client_data).models
    for k in range(5):  # client 2, too, which has no examples
        wanted = joined(hand.theta, hand.projections(hand.learned["v"][k]))
        toys.assert_trees_close(row(row(models, k), 0), wanted, rtol=1e-5, atol=1e-5)
    assert records[0].down == 5 * (THETA + PROJECTIONS)
    assert records[0].up == 4 * (THETA + 4) + 5 * PROJECTIONS  # with n_k; a change is sent by everyone


def test_newcomers_learn_an_embedding_by_hand():
    _, problem, algorithm, states, _ = play(2)
    hand, newcomers = Server(states[-1]), toys.make_federation((3, 4), seed=5)
    models = toys.adapt(algorithm, problem, jax.random.key(4), states[-1], newcomers.client_data).models
    for k in range(2):
        v, way = hand.learned["v"].mean(axis=0), 0.0
        for _ in range(2):  # R
            own = hand.projections(v)
            trained = parted(descend(joined(hand.theta, own), *examples(newcomers, k), 2, only_own=True))[1]
            slope = hand.slopes(v, jax.tree.map(np.subtract, own, trained))[1] + KNOBS["decay"] * v
            way = KNOBS["momentum"] * way + slope
            v = v - KNOBS["rate"] * way
        wanted = joined(hand.theta, hand.projections(v))
        toys.assert_trees_close(row(row(models, k), 0), wanted, rtol=1e-5, atol=1e-5)


def test_only_the_cohort_s_embeddings_move():
    states = play(4, (3, 4, 2, 5, 3), {"decay": 0.0, "momentum": 0.0}, cohort=2).states
    for number in range(4):
        before, after = (np.asarray(states[n].server.embeddings) for n in (number, number + 1))
        moved = np.flatnonzero((before != after).any(axis=1))
        np.testing.assert_array_equal(moved, cohort_of(jax.random.key(0), number, 5, 2).ids)


@pytest.mark.slow
def test_from_one_model_a_round_is_fedavg_s():
    """Theta is the mean of FedAvg, and so are, at rate 1, the biases of the heads that make the projections."""
    knobs = {"spread": 0.0, "rate": 1.0, "momentum": 0.0, "decay": 0.0}
    before, after = play(1, knobs=knobs).states
    options = {"model": toys.Attentive, "epochs": 2}
    fedavg = toys.play("fedavg", toys.make_federation(SIZES), 1, optax.sgd(RATE), **options).states
    for state, wanted in zip((before, after), fedavg, strict=True):
        found = tree.combine(tree.first(state.models), state.server.network.bias)
        toys.assert_trees_close(found, tree.first(wanted.models), rtol=1e-5, atol=1e-6)


def test_at_rate_0_only_theta_moves():
    states = play(2, knobs={"rate": 0.0}).states
    toys.assert_trees_close(states[-1].server, states[0].server)
    assert not toys.same_trees(states[-1].models, states[0].models)


@pytest.mark.slow
def test_where_everything_is_generated_it_is_pfedhn():
    """Whose mean is unweighted, so clients are of one size."""
    federation, options = toys.make_federation((3, 3, 3)), {"model": toys.Normalized, "epochs": 2}
    same = {name: value for name, value in KNOBS.items() if name != "decay"}
    own = {"fedtp": {"personal": "", "decay": 0.0}, "pfedhn": {"clip": np.inf, "initialization": "torch"}}
    servers = [
        toys.play(name, federation, 3, optax.sgd(RATE), same | own[name], **options).states[-1].server for name in own
    ]
    toys.assert_trees_close(*servers, rtol=1e-5, atol=1e-6)


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
    name = lambda path: "/".join(str(entry.key) for entry in path)
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
    state = jax.eval_shape(lambda key: algorithm.start(key, federation.client_data), jax.random.key(0))
    assert paths(state.server.network.bias) == layers
    assert paths(state.models) == paths(problem.model.network.shapes) - layers


def test_own_names_of_what_is_generated():
    federation = toys.make_federation((2, 3))
    problem = toys.make_problem(federation, hidden=(4,))
    algorithm = toys.make_algorithm("fedtp", problem, personal="Dense_0")
    state = jax.eval_shape(lambda key: algorithm.start(key, federation.client_data), jax.random.key(0))
    assert paths(state.server.network.bias) == {"Dense_0/kernel", "Dense_0/bias"}
    assert paths(state.models) == {"Dense_1/kernel", "Dense_1/bias"}


NONE = "algorithm=fedtp: needs attention, whose parameters' paths contain (^|/)(query|key|value)/"
REFUSED = [({}, NONE), ({"personal": "("}, "fedtp.personal=(: is no regular expression: ")]


@pytest.mark.parametrize(("knobs", "said"), REFUSED)
def test_a_model_without_attention_is_refused_in_one_line(knobs, said):
    problem = toys.make_problem(toys.make_federation((2, 3)), hidden=(4,))
    with pytest.raises(pfl.ArgumentError, match=rf"^{re.escape(said)}.*$"):
        toys.make_algorithm("fedtp", problem, **knobs)
