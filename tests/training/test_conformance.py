"""Methods that break the contract of `Algorithm`: each is refused in one line that names the field."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import pfljax as pfl
from pfljax.algorithms import METHODS
from pfljax.contract.types import Report
from pfljax.folder import files
from pfljax.training import conformance

K, COHORT = 5, 3


def peers(problem):
    """A method of which every part can be broken: clients mix their models with their neighbors'."""

    def init(key, clients):
        num = clients.train.size.shape[0]
        models = problem.init_models(key, problem.ids(clients), common=True)
        return pfl.State({"total": jnp.zeros(())}, models, (), {"seen": jnp.zeros((num,), jnp.int32)})

    def download(key, state, cohort):
        return jnp.stack([cohort.ids, jnp.roll(cohort.ids, 1)], axis=1)

    def client_update(context, models, row, data):
        mean = jax.tree.map(lambda leaf: (leaf / 2)[:2], models)
        return pfl.ClientOutput({"seen": row["seen"] + 1}, mean, {"loss": jnp.zeros(())}, jnp.ones(2, bool))

    def server_update(key, state, aggregate):
        models = jax.tree.map(lambda s: s / aggregate.count.reshape(-1, *[1] * (s.ndim - 1)) * 2, aggregate.upload)
        return state._replace(models=models), {"drift": jnp.ones(())}

    def predictor(key, state, clients):
        ids = problem.ids(clients)
        index = jnp.stack([ids, (ids + 1) % problem.num_clients], axis=1)
        return pfl.Predictor(state.models, index, jnp.full(index.shape, 0.5), "peers")

    functions = {f.__name__: f for f in (init, download, client_update, server_update, predictor)}
    return pfl.Algorithm(**functions, topology="peers", ledger=pfl.Ledger(1))


def changed(field, **parts):
    """A break: `field` returns something whose attributes are functions of the true one's."""

    def build(problem):
        algorithm = peers(problem)
        old = getattr(algorithm, field)

        def new(*args):
            found = old(*args)
            values = {name: make(getattr(found, name)) for name, make in parts.items()}
            return found._replace(**values) if hasattr(found, "_replace") else dataclasses.replace(found, **values)

        return dataclasses.replace(algorithm, **{field: new})

    return build


def replaced(field, make):
    """A break: `field` returns a function of what the true one returns."""

    def build(problem):
        algorithm = peers(problem)
        old = getattr(algorithm, field)
        return dataclasses.replace(algorithm, **{field: lambda *args: make(old(*args))})

    return build


def metrics(value):
    return replaced("server_update", lambda found: (found[0], value))


def given(**fields):
    return lambda problem: dataclasses.replace(peers(problem), **fields)


def without_ledger(problem):
    return pfl.Algorithm(**{f.name: getattr(peers(problem), f.name) for f in dataclasses.fields(pfl.Algorithm)[:5]})


def doubled(leaf):
    return jnp.concatenate([leaf, leaf], axis=-1)


def told(problem):
    raise KeyError("momentum")


NOTHING = jnp.zeros(())
BROKEN = {
    # what is built
    "build, no algorithm": (lambda problem: {"init": None}, "build: returned dict; accepted: Algorithm"),
    "build, nothing": (lambda problem: None, "build: returned None; accepted: Algorithm"),
    "build, an error": (told, r"build: line \d+ of test_conformance.py raised KeyError: 'momentum'"),
    "no ledger": (without_ledger, "build: line .* missing .* 'ledger'"),
    "ledger": (given(ledger=1), "ledger=1: accepted: a Ledger"),
    "topology": (given(topology="ring"), "topology=ring: accepted: own, shared, peers, push"),
    "exchanges": (given(exchanges=0), "exchanges: is 0; accepted: whole numbers, 1 or more"),
    # the state
    "init, no State": (replaced("init", tuple), "init: returned tuple; accepted: State"),
    "init, a row too few": (
        changed("init", clients=lambda rows: {"seen": rows["seen"][1:]}),
        r"init: State.clients\['seen'\] is int32\[4\]; accepted: an axis of length 5 first",
    ),
    "init, a model too many": (
        changed("init", models=lambda models: jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), models)),
        r"init: State.models.* is float32\[10, .*; accepted: an axis of length 5 first",
    ),
    "init, not finite": (
        changed("init", models=lambda models: jax.tree.map(lambda leaf: leaf * jnp.nan, models)),
        "init: returned models with values that are not finite",
    ),
    # the cohort and its models
    "sample, too many": (
        given(sample=lambda *_: jnp.arange(K)),
        r"sample: the array is int32\[5\]; accepted: integer\[3\]",
    ),
    "sample, floats": (given(sample=lambda *_: jnp.ones(COHORT)), r"sample: the array is float32\[3\]; .*integer\[3\]"),
    "sample, repeated": (
        given(sample=lambda *_: jnp.array([0, 1, 1])),
        "sample: returned 1 more than once; accepted: distinct ids",
    ),
    "sample, out of range": (
        given(sample=lambda *_: jnp.array([1, 2, 5])),
        "sample: returned index 5; accepted: 0 to 4",
    ),
    "download, floats": (
        replaced("download", lambda index: index * 1.0),
        r"download: the index is float32\[3, 2\]; accepted: integer\[3, 2\]",
    ),
    "download, a vector": (
        replaced("download", lambda index: index[:, 0]),
        r"download: the index is int32\[3\]; accepted: integer\[3, J\]",
    ),
    "download, out of range": (
        replaced("download", lambda index: index.at[0, 1].set(9)),
        "download: returned index 9; accepted: the ids of the cohort",
    ),
    "download, itself not first": (replaced("download", lambda index: index[:, ::-1]), "download: column 0 "),
    # the client
    "client, no ClientOutput": (replaced("client_update", tuple), "client_update: returned tuple; .*ClientOutput"),
    "client, an error": (replaced("client_update", lambda out: out.row), r"client_update: .* AttributeError: .*'row'"),
    "client, another dtype": (
        changed("client_update", client=lambda row: {"seen": row["seen"] * 1.0}),
        r"client_update: client\['seen'\] is float32\[\]; accepted: int32\[\]",
    ),
    "client, another structure": (
        changed("client_update", client=lambda row: row | {"more": NOTHING}),
        r"client_update: client\['more'\] is float32\[\]; accepted: missing",
    ),
    "client, a part of its row": (
        changed("client_update", client=lambda row: {}),
        r"client_update: client\['seen'\] is missing; accepted: int32\[\]",
    ),
    "client, no loss": (
        changed("client_update", report=lambda report: {}),
        r"client_update: report\['loss'\] is missing; accepted: float\[\]",
    ),
    "client, losses": (
        changed("client_update", report=lambda report: {"loss": jnp.zeros(2)}),
        r"client_update: report\['loss'\] is float32\[2\]; accepted: float\[\]",
    ),
    "client, upload without an axis": (
        changed("client_update", upload=lambda models: {"sum": NOTHING}),
        r"client_update: upload\['sum'\] is float32\[\]; accepted: an axis of length 2 first",
    ),
    "client, upload of too many": (
        changed("client_update", upload=lambda models: {"sum": jnp.zeros((3, 4))}),
        r"client_update: upload\['sum'\] is float32\[3, 4\]; accepted: an axis of length 2 first",
    ),
    "client, upload of other shapes": (
        changed("client_update", upload=lambda models: jax.tree.map(doubled, models)),
        r"server_update: State.models.* is float32\[3, .*\]; accepted: float32\[3, ",
    ),
    "client, upload of other parts": (
        changed("client_update", upload=lambda models: {"more": jnp.zeros((2, 4))}),
        r"server_update: State.models.* is missing; accepted: float32\[3, ",
    ),
    "client, sent": (
        changed("client_update", sent=lambda sent: jnp.ones(2)),
        r"client_update: sent is float32\[2\]; accepted: bool\[2\]",
    ),
    # the server
    "server, no metrics": (
        replaced("server_update", lambda f: f[0]),
        "server_update: returned State; .*dict of metrics",
    ),
    "server, another shape": (
        replaced("server_update", lambda f: (f[0]._replace(models=jax.tree.map(doubled, f[0].models)), {})),
        r"server_update: State.models.* is float32\[3, .*\]; accepted: float32\[3, ",
    ),
    "server, another structure": (
        replaced("server_update", lambda f: (f[0]._replace(server=()), {})),
        r"server_update: State.server\['total'\] is missing; accepted: float32\[\]",
    ),
    "server, a list": (
        replaced("server_update", lambda f: (f[0]._replace(optimizer=[]), {})),
        r"server_update: State is PyTreeDef.*; accepted: PyTreeDef",
    ),
    **{
        f"metric {name}": (
            metrics({name: NOTHING}),
            f"server_update: returned a metric named {name}; accepted: any name but",
        )
        for name in ("accuracy", "loss", "round", "seconds", "bytes_up", "validation_accuracy", "train_loss", "seed")
    },
    "metric, a vector": (
        metrics({"drift": jnp.zeros(3)}),
        r"server_update: the metric drift is float32\[3\]; accepted: number\[\]",
    ),
    # predictions
    "predictor, none": (replaced("predictor", lambda p: p.models), "predictor: returned dict; accepted: Predictor"),
    "predictor, push": (
        changed("predictor", topology=lambda _: "push"),
        "predictor: topology is 'push'; accepted: 'own', ",
    ),
    "predictor, own": (
        changed("predictor", topology=lambda _: "own"),
        r"predictor: models.* is float32\[5, .*; accepted: an axis of length 10 first",
    ),
    "predictor, half of the clients": (
        changed("predictor", weights=lambda weights: weights[:2], index=lambda index: index[:2]),
        r"predictor: weights is float32\[2, 2\]; accepted: float\[5, 2\]",
    ),
    "predictor, float index": (
        changed("predictor", index=lambda index: index * 1.0),
        r"predictor: index is float32\[5, 2\]; accepted: integer\[5, 2\]",
    ),
    "predictor, other models": (
        changed("predictor", models=lambda models: jax.tree.map(doubled, models)),
        r"predictor: models.* is float32\[5, .*\]; accepted: float32\[5, ",
    ),
    "predictor, index out of range": (
        changed("predictor", index=lambda index: index + 1),
        "predictor: returned index 5; accepted: 0 to 4",
    ),
    "predictor, weights of sum 2": (
        changed("predictor", weights=lambda weights: 2 * weights),
        "predictor: the weights of client 0 sum to 2, and the smallest is 1; accepted: 0 or more, with sum 1",
    ),
    "predictor, negative weights": (
        changed("predictor", weights=lambda weights: weights.at[2].set(jnp.array([1.5, -0.5]))),
        r"predictor: the weights of client 2 sum to 1, and the smallest is -0.5; ",
    ),
    "predictor, NaN": (
        changed("predictor", weights=lambda weights: weights.at[1].set(jnp.nan)),
        "predictor: the weights of client 1 sum to nan, ",
    ),
    "predictor, apply": (
        changed("predictor", apply=lambda _: lambda models, row, x: jnp.zeros((7,))),
        r"predictor.apply: the predictions is float32\[7\]; accepted: float\[\d, 3\]",
    ),
    "fine_tune": (given(fine_tune=lambda key, predictor, clients: predictor.weights), "fine_tune: returned "),
    "report, no weights": (
        given(report=Report(collaboration=lambda state: {"affinity": jnp.zeros((K, K))})),
        r"report.collaboration: weights is missing; accepted: float\[5, J\]",
    ),
    "report, a taken name": (
        given(report=Report(collaboration=lambda state: {"round": jnp.zeros(K)})),
        "report.collaboration: returned round; accepted: other names",
    ),
}


@pfl.method(name="odd", keeps="a count", travels="models")
@dataclasses.dataclass(frozen=True)
class Odd:
    """Odd (Me, 2026): a method that breaks the contract."""

    how: str = pfl.knob("", help="which break; empty: none")

    def build(self, problem):
        return BROKEN[self.how][0](problem) if self.how else peers(problem)


METHODS.pop("odd")  # it is not for tests of all methods


@pytest.fixture(scope="module")
def clients():
    return toys.make_federation((4, 3, 5, 2, 4))


def train(method, clients, rounds=1, store="device", out=None, **options):
    options = {"participation": COHORT / K, "execution": pfl.Execution("map", devices=1, client_store=store)} | options
    local = pfl.LocalTraining(optax.sgd(0.1))
    return pfl.Run(method, clients, pfl.models.MLP(()), local, **options).train(rounds, eval_every=1, out=out)


def refused(clients, how, **options):
    with pytest.raises(pfl.ArgumentError) as caught:
        train(Odd(how), clients, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_method_is_refused_in_a_line_that_names_the_field(how, clients):
    line = refused(clients, how)
    assert re.match(rf"(odd\.)?{BROKEN[how][1]}", line), line


@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_the_sound_method_runs_under_every_store(store, clients, tmp_path):
    result = train(Odd(), clients, rounds=2, store=store, out=tmp_path / "run")
    rows = files.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row.get("drift") for row in rows] == [None, 1.0, 1.0] and np.isfinite(result.loss)
    assert rows[-1].keys() - {"drift"} <= conformance.RESERVED  # what a metric must not be called
    assert {*rows[-1], *result.summary["best"], "method", "seed"} - {"drift"} == conformance.RESERVED


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize(
    "how",
    ["predictor, weights of sum 2", "predictor, index out of range", "download, out of range"],
)
def test_values_are_checked_under_every_store(store, how, clients):
    assert re.match(BROKEN[how][1], refused(clients, how, store=store).removeprefix("odd."))


def test_weights_are_checked_in_every_evaluation(clients, monkeypatch):
    late = lambda weights, number: jnp.where(number < 2, weights, 2 * weights)

    def build(problem):
        algorithm = peers(problem)

        def predictor(key, state, clients):
            found = algorithm.predictor(key, state, clients)
            return dataclasses.replace(found, weights=late(found.weights, state.round))

        return dataclasses.replace(algorithm, predictor=predictor)

    monkeypatch.setitem(BROKEN, "late", (build, ""))
    assert np.isfinite(train(Odd("late"), clients, rounds=1).loss)
    assert refused(clients, "late", rounds=2).startswith("odd.predictor: the weights of client 0 sum to 2, ")


def test_newcomers_predictors_are_checked(clients, monkeypatch):
    own = lambda key, state, clients: pfl.Predictor.own(state.models)
    monkeypatch.setitem(BROKEN, "adapt", (given(adapt=own), ""))
    line = refused(clients, "adapt", unseen=toys.make_federation((3, 4), seed=8))
    assert re.match(r"odd\.adapt: weights is float32\[5, 1\]; accepted: float\[2, 1\]", line)


@pytest.mark.parametrize("devices", [2, 4])
def test_values_are_checked_on_several_devices(devices, clients):
    execution = pfl.Execution("vmap", devices=devices)
    assert np.isfinite(train(Odd(), clients, execution=execution).loss)
    how = "predictor, negative weights"
    assert re.match(BROKEN[how][1], refused(clients, how, execution=execution).removeprefix("odd."))


def test_an_undecorated_class_is_no_method(clients):
    class Plain:
        def build(self, problem): ...

    with pytest.raises(pfl.ArgumentError, match=r"^method=.*: accepted: a method with its knobs, such as FedAvg"):
        train(Plain(), clients)


def test_built_in_methods_are_not_traced_for_it(clients, monkeypatch):
    monkeypatch.setattr(conformance.Contract, "__init__", None)
    assert np.isfinite(train(pfl.FedAvg(), clients).loss)
    with pytest.raises(TypeError, match="not callable"):
        train(Odd(), clients)


@toys.each_method(fast=METHODS)
def test_built_in_methods_conform(name, clients, monkeypatch):
    monkeypatch.setattr(conformance, "is_built_in", lambda method: False)
    options = {"batch_size": 2} | toys.NETWORKS.get(name, {})
    problem = toys.make_problem(clients, cohort=4, **options)
    unseen = toys.make_federation((3, 4), seed=8)
    experiment = toys.make_experiment(name, problem, clients, unseen=unseen, plan=problem.plan)
    conformance.check(experiment)
    state = jax.jit(experiment.algorithm(problem.plan).init)(jax.random.key(1), clients.client_data)
    conformance.check_start(experiment, problem.plan, jax.random.key(2), state, clients.client_data)
