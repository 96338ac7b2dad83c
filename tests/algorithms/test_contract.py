"""Tests that every method passes; registering a new method is enough to test it."""

import dataclasses
import functools
import itertools
import math
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from keys import misused

from pfljax import algorithms, models
from pfljax.algorithms import METHODS
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Algorithm, ClientData, Prediction, Split, State
from pfljax.evaluation import metrics as evaluation
from pfljax.exchange import lifting
from pfljax.exchange.in_python import PythonPlan, calling
from pfljax.exchange.plan import ExecutionPlan, make_plan
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import cohort_of, make_round
from pfljax.local.problem import Problem
from pfljax.settings.fields import choices_of, out_of_range, value_type

SIZES = (5, 1, 3, 4, 2, 4, 0, 3)  # uneven, and a client without examples
K = 8
COHORT = 4
ROUNDS = 6
# One worker plays all tests of a method, so that its rounds are compiled once. By default one method of each kind and
# the ones that others build on; all others are slow.
FAST = {*toys.KINDS, "clustered"}
every_method = toys.each_method(fast=FAST, grouped=True)
# Servers that move each coordinate by at most their rate per round, or with momentum, need more rounds.
FASTER = {"fedadam": {"server_learning_rate": 0.1}, "fedavgm": {"server_learning_rate": 0.5}}
# The leaves' stage moves no model of the server, and clients of FlexLoRA differ by their numbers.
FASTER |= {"hilora": {"root_rounds": 3, "cluster_rounds": 3}, "flexlora": {"ranks": (2,)}}


def federation_of(sizes=SIZES, seed=0, shape=(3,)):
    """Clients whose examples' class is the largest of three features; test data has the shape of training data."""
    federation = toys.make_federation(
        sizes, seed=seed, test_size=max(sizes), features=math.prod(shape)
    )
    parts = {}
    for name in ("train", "validation", "test"):
        x, y, size = getattr(federation, name)
        real = np.arange(y.shape[1]) < size[:, None]
        y[...] = np.where(real, x[..., :3].argmax(axis=2), 0)
        parts[name] = Split(x.reshape(*y.shape, *shape), y, size)
    return dataclasses.replace(federation, **parts)


def copy(state):
    """Copies to the host, without views of arrays that may be donated."""
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)


ONE_BY_ONE = make_plan("map", devices=1)


class Run:
    """A method's rounds; everything is compiled once, and the state is donated from round to round.

    Attributes:
        problem: What it is built for.
        algorithm: The method.
        traces: Number of times that the loss was traced, after each round.
    """

    def __init__(
        self,
        name,
        *,
        plan: ExecutionPlan = ONE_BY_ONE,
        cohort=COHORT,
        hyperparameters=None,
        shape=(3,),
        **options,
    ):
        self.federation = federation_of(shape=shape)
        usual = {"optimizer": optax.adam(0.05), "batch_size": 2} | toys.network(name)
        problem = toys.make_problem(self.federation, plan=plan, cohort=cohort, **usual | options)
        self.tracing = 0
        self.traces = []

        def counted(params, x, y, key=None, **options):
            self.tracing += 1
            return problem.model.loss(params, x, y, key, **options)

        self.problem = problem.with_loss(counted)
        self.algorithm: Algorithm = toys.make_algorithm(
            name, self.problem, **FASTER.get(name, {}) | (hyperparameters or {})
        )
        one_round = make_round(self.algorithm, plan, cohort)
        if isinstance(plan, PythonPlan):
            compiled = calling
            placed = [{}, {}]
        else:
            shardings = toys.shardings(self.algorithm, self.problem, self.federation.client_data)
            placed = [
                {"out_shardings": shardings},
                {"out_shardings": (shardings, None), "donate_argnums": 2},
            ]
            compiled = jax.jit
        self.init = compiled(
            functools.partial(toys.init, self.algorithm, self.problem), **placed[0]
        )
        self.one_round = compiled(one_round, **placed[1])
        self.serve = compiled(functools.partial(lifting.serve, self.algorithm, plan, self.use))

    def use(self, prediction: Prediction, split: Split):
        """What a client predicts with, and its loss on its part of a split."""
        scores = evaluation.evaluate(self.problem, self.algorithm, prediction, split)
        return prediction, scores["loss"]

    def serves(self, state, clients: ClientData, split: Split):
        """`use` of all clients, and whom they use."""
        return self.serve(jax.random.key(5), state, np.arange(K, dtype=np.int32), clients, split)

    def play(self, clients: ClientData, rounds=ROUNDS, init=None):
        """All states on the host, the initial one first, and the rounds' records."""
        clients = self.place(clients)
        state = (init or self.init)(jax.random.key(0), clients)
        states = [copy(state)]
        records = []
        for number in range(rounds):
            state, record = self.one_round(jax.random.key(0), np.int32(number), state, clients)
            self.traces.append(self.tracing)
            states.append(copy(state))
            records.append(record)
        return states, records

    def losses(self, state, clients: ClientData, split: Split):
        """Every client's loss (K,) on its part of a split."""
        return np.asarray(self.serves(state, self.place(clients), self.place(split)).outputs[1])

    def place(self, stacked):
        return place(self.problem.plan, stacked, K)


class Reference(NamedTuple):
    """A run with mini-batches and sampled cohorts on one device, one client at a time."""

    run: Run
    clients: ClientData
    test: Split
    states: list
    records: list


@functools.cache
def reference(name, cohort=COHORT) -> Reference:
    run = Run(name, cohort=cohort)
    clients = run.federation.client_data
    return Reference(run, clients, run.federation.test, *run.play(clients))


def form(state) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)


def check_simplex(weights):
    assert (np.asarray(weights) >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)


def check_prediction(prediction: Prediction):
    weights = np.asarray(prediction.weights)
    # of each class, if they differ by class
    check_simplex(np.moveaxis(weights, 1, -1) if weights.ndim == 3 else weights)
    leaves = jax.tree.leaves(prediction.models)
    assert leaves and all(leaf.shape[:2] == weights.shape[:2] for leaf in leaves)
    assert all(np.isfinite(leaf).all() for leaf in leaves)


@functools.cache
def frozen_vit():
    """A small ViT, of which LoRA and the head are trained."""
    vit = models.ViT(outputs=3, patch=2, width=4, depth=1, heads=2, hidden=4)
    variables = vit.init(jax.random.key(1), jnp.zeros((1, 4, 4, 1)))
    lora = models.adapters.lora(rank=2, where="attention|mlp")
    return models.Model(vit, frozen=variables, trainable=[lora, "head"], frozen_dtype="float32")


@toys.each_method(fast=(), slow=toys.KINDS)
def test_adapters_of_a_frozen_vit_are_trained(name):
    run = Run(name, model=frozen_vit(), shape=(4, 4, 1), cohort=K)
    states, records = run.play(run.federation.client_data, 2)
    assert np.isfinite([record.train_loss for record in records]).all()
    kept = [
        state.server.state.network.bias if name == "pefll" else (state.models, state.clients)
        for state in states
    ]
    named = {
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(kept[-1])
    }
    assert any("lora_b" in path for path in named)
    # no frozen weight has a copy
    assert not any("'kernel'" in path and "head" not in path for path in named)
    assert not toys.same_trees(kept[0], kept[-1])


@every_method
def test_the_initial_state_is_made_of_arrays_known_by_shape(name):
    run, clients, _, states, _ = reference(name)
    shape = jax.eval_shape(
        functools.partial(toys.init, run.algorithm, run.problem), jax.random.key(0), clients
    )
    assert isinstance(shape, State)
    assert form(shape) == form(states[0])
    assert all(leaf.shape[0] == K for leaf in jax.tree.leaves(shape.clients))
    if run.algorithm.topology != "shared":
        assert all(leaf.shape[0] == K for leaf in jax.tree.leaves((shape.models, shape.opt_state)))


@every_method
def test_rounds_keep_the_state_s_form_and_change_models(name):
    _, _, _, states, records = reference(name)
    for before, after in itertools.pairwise(states):
        assert form(after) == form(states[0])
        assert not toys.same_trees(before.models, after.models)
    for leaf in jax.tree.leaves(states[-1].models):
        assert np.isfinite(leaf).all()
    for record in records:
        assert np.isfinite(record.train_loss) and record.diverged == -1
        assert (
            np.isfinite(record.down)
            and np.isfinite(record.up)
            and record.down >= 0
            and record.up >= 0
        )


@every_method
def test_rounds_are_traced_once(name):
    reference(name)
    assert len(set(reference(name).run.traces)) == 1 and reference(name).run.traces[0] > 0


@every_method
def test_no_key_is_used_twice(name):
    run, clients, _, _, _ = reference(name)
    key = jax.random.key(0)
    clients = run.place(clients)
    first = run.init.trace(key, clients)
    one_round = run.one_round.trace(key, np.int32(0), run.init(key, clients), clients)
    assert misused(first.jaxpr.jaxpr) == []
    assert misused(one_round.jaxpr.jaxpr) == []


@every_method
def test_training_lowers_the_training_loss(name):
    run, clients, _, states, _ = reference(name)
    after, _ = run.play(clients, 60)
    real = np.array(SIZES) > 0
    found = [
        run.losses(state, clients, clients.train)[real].mean() for state in (states[0], after[-1])
    ]
    assert found[1] < 0.7 * found[0]


@every_method
def test_predictions_mix_models_on_the_simplex(name):
    run, clients, test, states, _ = reference(name)
    for state in (states[0], states[-1]):
        (prediction, losses), used = run.serves(state, clients, test)
        check_prediction(prediction)
        assert np.isfinite(losses).all()
        assert used["index"].shape == used["weights"].shape and used["index"].dtype == np.int32
        assert (used["index"] >= 0).all() and (
            used["index"] < max(K, prediction.weights.shape[1])
        ).all()


@every_method
def test_newcomers_get_a_prediction(name):
    run, _, _, states, _ = reference(name)
    newcomers = federation_of((3, 5, 1), seed=9)
    serve = jax.jit(
        functools.partial(lifting.serve_newcomers, run.algorithm, run.problem.plan, run.use)
    )
    prediction, losses = serve(jax.random.key(1), states[-1], newcomers.client_data, newcomers.test)
    check_prediction(prediction)
    assert prediction.weights.shape[0] == 3 and np.isfinite(losses).all()


# Steps in Python take long: one method is slow, the other kinds long; tests/api/test_simulation.py has FedAvg's.
@toys.each_method(toys.KINDS, fast=(), slow=("scaffold",), grouped=True)
def test_a_plain_loop_over_clients_gives_the_same_numbers(name):
    run, clients, test, states, records = reference(name)
    in_python = Run(name, plan=PythonPlan(ONE_BY_ONE.mesh, 1))
    plain_states, plain_records = in_python.play(clients, 2)
    close = functools.partial(toys.assert_trees_close, rtol=1e-5, atol=1e-5)
    close(plain_states, states[:3])
    close(plain_records, records[:2])
    close(in_python.serves(states[2], clients, test), run.serves(states[2], clients, test))


# Every method on several devices, in chunks and stacked, whose clients do not divide by the devices; exchanges of every
# kind under every plan are tested against plain loops in tests/exchange.
PLANS = [(COHORT, ("chunk", 2, 2, "gather")), (COHORT, ("vmap", 0, 3, "gather"))]
# Further plans by how models travel, with all clients in a round, too.
FURTHER = {
    "own": [(K, ("chunk", 2, 4, "ring"))],
    "shared": [(K, ("map", 0, 3, "gather"))],
    "peers": [(COHORT, ("map", 0, 4, "ring")), (K, ("chunk", 2, 4, "ring")), (K, ("vmap", 0, 1))],
    "push": [(K, ("chunk", 2, 4, "ring"))],
}
FURTHER_OF = {
    "local": "own",
    "scaffold": "shared",
    "federico": "peers",
    "federico_friends": "peers",
    "fedfomo": "peers",
    "dfedem": "push",
}


def suite_of(name, number):
    """One of each kind with one plan is slow; the other methods and plans are long."""
    return [pytest.mark.slow if number == 0 and name in toys.KINDS else pytest.mark.long]


@pytest.mark.parametrize(
    ("name", "cohort", "plan"),
    [
        pytest.param(name, *setting, marks=[pytest.mark.xdist_group(name), *suite_of(name, number)])
        for name in METHODS
        for number, setting in enumerate(PLANS + FURTHER.get(FURTHER_OF.get(name, ""), []))
    ],
)
def test_every_plan_gives_the_same_numbers(name, cohort, plan):
    run, clients, test, states, records = reference(name, cohort)
    other = Run(name, plan=make_plan(*plan), cohort=cohort)
    other_states, other_records = other.play(clients)
    toys.assert_trees_close(other_states[0], states[0], rtol=1e-6, atol=1e-7)
    toys.assert_trees_close(other_states[-1], states[-1], rtol=2e-4, atol=2e-5)
    toys.assert_trees_close(other_records, records, rtol=1e-4, atol=1e-5)
    found = other.losses(other_states[-1], clients, test)
    np.testing.assert_allclose(found, run.losses(states[-1], clients, test), rtol=2e-4)


# Hyperparameters that remove randomness when all clients hold all models.
WITHOUT_CHANCE = {
    "federico": {"neighbors": K - 1},
    "federico_friends": {"neighbors": K - 1},
    "dfedem": {"graph": "complete"},
    "fedavg_data": {"share": 1.0},
    "fedfomo": {"neighbors": K - 1},
    "fedfomo_average": {"neighbors": K - 1},
    "fedbuff": {"max_staleness": 0},
    "fedasync": {"max_staleness": 0},
    "fedala": {"share": 1.0},
    "fedcp": {"noise": 0.0},
    "floco": {"endpoints": 1},
    "perada": {"share": 1.0},
}


class Renumbered(Problem):
    """A problem whose client n starts from the model of client ORDER[n]."""

    def init_model(self, key, number, *, common=True):
        return Problem.init_model(self, key, jnp.asarray(ORDER)[number], common=common)

    def init_models(self, key, num, *, common=True):
        problem = self if num == K else Problem(*self)  # otherwise they are no client's
        return Problem.init_models(problem, key, num, common=common)


ORDER = np.array([3, 0, 6, 1, 5, 7, 2, 4])


def begin_renumbered(name, algorithm, problem, key, clients):
    """The initial state of a `Renumbered` problem."""
    state = toys.init(algorithm, problem, key, clients)
    # The clients of two methods differ by their embeddings, which the server draws.
    server = state.server.state
    if name == "pfedhn":
        models = jax.tree.map(lambda leaf: leaf[ORDER], state.models)
        server = server._replace(embeddings=server.embeddings[ORDER])
        return state.with_server(server).with_models(models)
    if name == "fedtp":
        learned = server.learned
        learned = learned._replace(embeddings=learned.embeddings[ORDER])
        return state.with_server(server._replace(learned=learned))
    return state


@toys.each_method(fast=("scaffold",), slow=toys.KINDS, grouped=True)
def test_renumbering_the_clients_renumbers_the_results(name):
    hyperparameters = WITHOUT_CHANCE.get(name, {})
    run = Run(
        name, cohort=K, hyperparameters=hyperparameters, optimizer=optax.sgd(0.2), batch_size=0
    )
    problem = Renumbered(*run.problem)
    renumbered = toys.make_algorithm(name, problem, **FASTER.get(name, {}) | hyperparameters)
    begin = jax.jit(functools.partial(begin_renumbered, name, renumbered, problem))
    federation = run.federation
    found = []
    for order, init in ((np.arange(K), run.init), (ORDER, begin)):
        train, validation, test = (
            Split(*(leaf[order] for leaf in split))
            for split in (federation.train, federation.validation, federation.test)
        )
        clients = ClientData(train, validation)
        states, _ = run.play(clients, 3, init)
        found.append(run.losses(states[-1], clients, test))
    assert np.ptp(found[0]) > 0.01
    np.testing.assert_allclose(found[1], found[0][ORDER], rtol=1e-4)


@every_method
def test_a_client_s_data_reach_others_only_where_there_is_a_path(name):
    run, clients, test, states, _ = reference(name)
    changed = jax.tree.map(np.copy, clients)
    changed.train.x[0] = -2 * changed.train.x[0]
    after, _ = run.play(changed)
    differs = run.losses(after[-1], changed, test) != run.losses(states[-1], clients, test)
    # A client may predict only with others' models: then its own model, or its row, differs.
    own = [
        jax.tree.map(lambda leaf: leaf[0], (state.models, state.clients))
        for state in (after[-1], states[-1])
    ]
    assert differs[0] or not toys.same_trees(*own)
    # A method may reject others' models after evaluating them: then its record of them differs.
    others = [
        jax.tree.map(lambda leaf: leaf[1:], state.clients) for state in (after[-1], states[-1])
    ]
    assert (differs[1:].any() or not toys.same_trees(*others)) == (run.algorithm.topology != "own")


@every_method
def test_padding_reaches_no_result(name):
    run, clients, test, states, records = reference(name)
    padded = jax.tree.map(np.copy, clients)
    padding = np.arange(padded.train.y.shape[1]) >= padded.train.size[:, None]
    assert padding.any()
    padded.train.x[padding] = 1e3
    padded.train.y[padding] = 1
    after, found = run.play(padded)
    toys.assert_trees_close(after[-1], states[-1])
    toys.assert_trees_close(found, records)
    np.testing.assert_array_equal(
        run.losses(after[-1], padded, test), run.losses(states[-1], clients, test)
    )


@functools.cache
def cohorts():
    return [
        set(np.asarray(cohort_of(jax.random.key(0), n, K, COHORT).ids).tolist())
        for n in range(ROUNDS)
    ]


@every_method
def test_clients_out_of_the_cohort_stay_as_they_are(name):
    """One stream of cohorts for every method."""
    run, _, _, states, _ = reference(name)
    by_client = run.algorithm.topology != "shared"
    assert len(set(map(tuple, cohorts()))) > 1
    for before, after, cohort in zip(states, states[1:], cohorts(), strict=False):
        for k in range(K):
            parts = [
                (s.models, s.opt_state, s.rows) if by_client else s.rows for s in (before, after)
            ]
            rows = [jax.tree.map(lambda leaf, k=k: leaf[k], part) for part in parts]
            if k not in cohort:
                toys.assert_trees_close(*rows)
            elif by_client and SIZES[k]:
                assert not toys.same_trees(*rows)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_what_it_is_and_every_hyperparameter_what_it_does(name):
    method = METHODS[name]
    assert method.__dataclass_params__.frozen and getattr(algorithms, method.__name__) is method
    assert (
        method.info.name == name and method.info.title and method.info.keeps and method.info.travels
    )
    assert method() == method()
    hints = typing.get_type_hints(method)
    for field in dataclasses.fields(method):
        grid = field.metadata["grid"]
        assert all(method(**{field.name: value}) for value in grid)
        # which leaves it to the method
        assert not grid or field.default in grid or not field.default
        assert field.metadata["help"] and field.default is not dataclasses.MISSING
        for bound, step in (("at_least", -1), ("above", 0), ("at_most", 1), ("below", 0)):
            limit = field.metadata[bound]
            if limit is not None:
                assert out_of_range(limit + step, field.metadata)
                with pytest.raises(ArgumentError, match=rf"^{name}\.{field.name}=.*: accepted: "):
                    method(**{field.name: value_type(hints[field.name])(limit + step)})
        if words := choices_of(hints[field.name], field.metadata):
            with pytest.raises(
                ArgumentError, match=rf"^{name}\.{field.name}=neither: accepted: {', '.join(words)}"
            ):
                method(**{field.name: "neither"})
