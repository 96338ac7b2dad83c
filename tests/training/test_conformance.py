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
from pfljax.contract import tree
from pfljax.contract.types import MethodReport
from pfljax.folder import files
from pfljax.run.experiment import Experiment
from pfljax.training import conformance

K = 5
COHORT = 3
KEY = jax.random.key(0)  # with which the cohort is clients 1, 2 and 4


def peers(problem):
    """A method of which every part can be broken: clients mix their models with their neighbors'."""

    def start(key, clients):
        return pfl.author.Start({"total": jnp.zeros(())})

    def first_row(key, client, start):
        return pfl.author.First(
            {"seen": jnp.zeros((), jnp.int32)}, problem.init_model(key, client, common=True)
        )

    def download(context, row, cohort):
        return jnp.stack([context.client, cohort.ids[cohort.position(context.client) - 1]])

    def client_update(context, models, row, data):
        mean = jax.tree.map(lambda leaf: (leaf / 2)[:2], models)
        report = pfl.author.ClientReport(jnp.zeros(()))
        return pfl.author.ClientOutput(
            {"seen": row["seen"] + 1}, pfl.author.Upload(mean), report, sent=jnp.ones(2, bool)
        )

    def server_update(key, state, aggregate):
        models = tree.scale(aggregate.upload.update, 2 / aggregate.num_sent)
        return state.with_models(models), {"drift": jnp.ones(())}

    def select_models(context, row, size):
        index = jnp.stack([context.client, (context.client + 1) % problem.num_clients])
        return pfl.author.Mixture(index, jnp.full((2,), 0.5))

    functions = {
        f.__name__: f
        for f in (start, first_row, download, client_update, server_update, select_models)
    }
    return pfl.author.Algorithm(**functions, topology="peers", ledger=pfl.author.Ledger(1))


def changed(field, **parts):
    """A break: `field` returns something whose attributes are functions of the true one's."""

    def build(problem):
        algorithm = peers(problem)
        old = getattr(algorithm, field)

        def new(*args):
            found = old(*args)
            return found._replace(
                **{name: make(getattr(found, name)) for name, make in parts.items()}
            )

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


def predicts(**parts):
    """A break of what a client makes of the models that it received."""

    def make(models):
        return pfl.author.Prediction(**{name: make(models) for name, make in parts.items()})

    return given(predict=lambda context, models, row, data: make(models))


def weights_of(client, weights):
    """A break: these are one client's weights."""

    def build(problem):
        algorithm = peers(problem)

        def select_models(context, row, size):
            index, even = algorithm.select_models(context, row, size)
            return pfl.author.Mixture(
                index, jnp.where(context.client == client, jnp.array(weights), even)
            )

        return dataclasses.replace(algorithm, select_models=select_models)

    return build


def shared(**fields):
    """A method with one global model that no client trains."""

    def build(problem):
        required = {
            "start": lambda key, clients: pfl.author.Start((), problem.init_models(key, 1)),
            "client_update": lambda context, models, row, data: pfl.author.ClientOutput(
                row, pfl.author.Upload(), LOSS
            ),
            "server_update": lambda key, state, aggregate: (state, {}),
        }
        return pfl.author.Algorithm(
            **required | fields, topology="shared", ledger=pfl.author.Ledger(1)
        )

    return build


LOSS = pfl.author.ClientReport(np.float32(0))


def without_ledger(problem):
    functions = ("client_update", "server_update", "topology", "download")
    return pfl.author.Algorithm(**{name: getattr(peers(problem), name) for name in functions})


def doubled(leaf):
    return jnp.concatenate([leaf, leaf], axis=-1)


def report(problem):
    raise KeyError("momentum")


NOTHING = jnp.zeros(())
BROKEN = {
    # what is built
    "build, no algorithm": (
        lambda problem: {"start": None},
        "build: returned dict; accepted: Algorithm",
    ),
    "build, nothing": (lambda problem: None, "build: returned None; accepted: Algorithm"),
    "build, an error": (
        report,
        r"build: line \d+ of test_conformance.py raised KeyError: 'momentum'",
    ),
    "no ledger": (without_ledger, "build: line .* missing .* 'ledger'"),
    "ledger": (given(ledger=1), "ledger=1: accepted: a Ledger"),
    "topology": (given(topology="ring"), "topology=ring: accepted: own, shared, peers, push"),
    "exchanges": (given(exchanges=0), "exchanges: is 0; accepted: whole numbers, 1 or more"),
    # the first state
    "start, no Start": (replaced("start", tuple), "start: returned tuple; accepted: Start"),
    "start, models under peers": (
        changed("start", models=lambda _: jnp.zeros((K, 2))),
        r"start: Start.models is given; accepted with topology='peers': \(\)",
    ),
    "start, no models under shared": (
        shared(start=lambda key, clients: pfl.author.Start()),
        "start: Start.models is empty; accepted with topology='shared': the models that clients can download",
    ),
    "first_row, no First": (
        replaced("first_row", lambda first: first.row),
        "first_row: returned dict; .*: First",
    ),
    "first_row, no model": (
        changed("first_row", model=lambda _: ()),
        "first_row: First.model is empty; accepted with topology='peers': the client's own model",
    ),
    "first_row, a model under shared": (
        shared(first_row=lambda key, client, start: pfl.author.First((), start.models)),
        r"first_row: First.model is given; accepted with topology='shared': \(\)",
    ),
    # the cohort and its models
    "sample, too many": (
        given(sample=lambda *_: jnp.arange(K)),
        r"sample: the array is int32\[5\]; accepted: integer\[3\]",
    ),
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
        r"download: the index is float32\[2\]; accepted: integer\[2\]",
    ),
    "download, a scalar": (
        replaced("download", lambda index: index[0]),
        r"download: the index is int32\[\]; accepted: integer\[J\]",
    ),
    "download, out of range": (
        replaced("download", lambda index: index.at[1].set(9)),
        "download: returned index 9; accepted: the ids of the cohort",
    ),
    "download, itself not first": (
        replaced("download", lambda index: index[::-1]),
        "download: column 0 ",
    ),
    # the client
    "client, no ClientOutput": (
        replaced("client_update", tuple),
        "client_update: returned tuple; .*ClientOutput",
    ),
    "client, an error": (
        replaced("client_update", lambda out: out.client),
        r"client_update: .* AttributeError: .*'client'",
    ),
    "client, another dtype": (
        changed("client_update", row=lambda row: {"seen": row["seen"] * 1.0}),
        r"client_update: row\['seen'\] is float32\[\]; accepted: int32\[\]",
    ),
    "client, another structure": (
        changed("client_update", row=lambda row: row | {"more": NOTHING}),
        r"client_update: row\['more'\] is float32\[\]; accepted: missing",
    ),
    "client, no loss": (
        changed("client_update", report=lambda report: report._replace(loss=None)),
        r"client_update: report.loss is missing; accepted: float\[\]",
    ),
    "client, a dict of reports": (
        changed("client_update", report=lambda report: {"loss": report.loss}),
        "client_update: report: returned dict; accepted: ClientReport",
    ),
    "client, a bare upload": (
        changed("client_update", upload=lambda upload: upload.update),
        "client_update: upload: returned dict; accepted: Upload",
    ),
    "client, one weight for all": (
        changed("client_update", upload=lambda upload: upload._replace(weight=NOTHING)),
        r"client_update: upload.weight is float32\[\]; accepted: an axis of length 2 first",
    ),
    "client, upload without an axis": (
        changed("client_update", upload=lambda upload: upload._replace(update={"sum": NOTHING})),
        r"client_update: upload.update\['sum'\] is float32\[\]; accepted: an axis of length 2 first",
    ),
    "client, upload of too many": (
        changed(
            "client_update",
            upload=lambda upload: upload._replace(update={"sum": jnp.zeros((3, 4))}),
        ),
        r"client_update: upload.update\['sum'\] is float32\[3, 4\]; accepted: an axis of length 2 first",
    ),
    "client, upload of other shapes": (
        changed("client_update", upload=lambda upload: jax.tree.map(doubled, upload)),
        r"server_update: State.clients.model.* is float32\[3, .*\]; accepted: float32\[3, ",
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
    "server, another structure": (
        replaced("server_update", lambda f: (f[0].with_server(()), {})),
        r"server_update: State.server.state\['total'\] is missing; accepted: float32\[\]",
    ),
    "server, a list": (
        replaced(
            "server_update",
            lambda f: (f[0]._replace(clients=f[0].clients._replace(opt_state=[])), {}),
        ),
        r"server_update: State is PyTreeDef.*; accepted: PyTreeDef",
    ),
    **{
        f"metric {name}": (
            metrics({name: NOTHING}),
            f"server_update: returned a metric named {name}; accepted: any name but",
        )
        for name in ("accuracy", "validation_accuracy", "seed")
    },
    "metric, a vector": (
        metrics({"drift": jnp.zeros(3)}),
        r"server_update: the metric drift is float32\[3\]; accepted: number\[\]",
    ),
    # predictions
    "select_models, none": (
        replaced("select_models", tuple),
        "select_models: returned tuple; accepted: Mixture",
    ),
    "select_models, an error": (
        replaced("select_models", lambda found: found.models),
        "select_models: .* AttributeError: .*'models'",
    ),
    "select_models, float index": (
        changed("select_models", index=lambda index: index * 1.0),
        r"select_models: index is float32\[2\]; accepted: integer\[2\]",
    ),
    "select_models, index out of range": (
        changed("select_models", index=lambda index: index + K),
        r"select_models: returned index [5-9]; accepted: 0 to 4",
    ),
    "select_models, weights of sum 2": (
        changed("select_models", weights=lambda weights: 2 * weights),
        r"select_models: the weights of client \d sum to 2, and the smallest is 1; accepted: 0 or more, with sum 1",
    ),
    "select_models, negative weights": (
        weights_of(2, [1.5, -0.5]),
        "select_models: the weights of client 2 sum to 1, and the smallest is -0.5; ",
    ),
    "select_models, NaN": (
        weights_of(1, [jnp.nan, 1.0]),
        "select_models: the weights of client 1 sum to nan, ",
    ),
    "predict, none": (
        given(predict=lambda *_: ()),
        "predict: returned tuple; accepted: Prediction",
    ),
    "predict, an error": (
        given(predict=lambda *_: report(None)),
        "predict: .* KeyError: 'momentum'",
    ),
    "predict, other models": (
        predicts(models=lambda models: jax.tree.map(doubled, models)),
        r"predict: models.* is float32\[2, .*\]; accepted: float32\[2, ",
    ),
    "predict, float index": (
        predicts(index=lambda models: jnp.zeros(1)),
        r"predict: index is float32\[1\]; accepted: integer\[1\]",
    ),
    "predict, index out of range": (
        predicts(index=lambda models: jnp.array([0, 2])),
        "predict: returned index 2; accepted: 0 to 1",
    ),
    "predict, weights of others": (
        predicts(weights=lambda models: jnp.ones(3) / 3),
        r"predict: weights is float32\[3\]; accepted: float\[2\]",
    ),
    "predict, weights of sum 2": (
        predicts(weights=lambda models: jnp.ones(2)),
        "select_models and predict: the weights of client 0 sum to 2, and the smallest is 1; accepted: ",
    ),
    "apply": (
        given(apply=lambda models, inputs, x: jnp.zeros((7,))),
        r"apply: the outputs is float32\[7\]; accepted: float\[\d, 3\]",
    ),
    "apply, probabilities of a mixture": (
        given(
            apply=lambda models, inputs, x: jax.nn.softmax(jnp.ones((2, len(x[...]), 3))).mean(
                axis=0
            )
        ),
        "apply: returns probabilities, which sum to 1; accepted: logits",
    ),
    "apply, probabilities of a sigmoid": (
        given(apply=lambda models, inputs, x: jax.nn.sigmoid(jnp.ones((len(x[...]), 3)))),
        "apply: returns probabilities, those of a sigmoid; accepted: logits",
    ),
    "report, no weights": (
        given(report=MethodReport(collaboration=lambda context, row: {"affinity": jnp.zeros(K)})),
        r"report.collaboration: weights is missing; accepted: float\[J\]",
    ),
    "report, a taken name": (
        given(report=MethodReport(collaboration=lambda context, row: {"round": NOTHING})),
        "report.collaboration: returned round; accepted: other names",
    ),
}


# What the engine checks when it scores clients, because it depends on what they received.
AFTER_A_ROUND = ("predict, weights of sum 2",)


@pfl.author.method(name="odd", keeps="a count", travels="models")
@dataclasses.dataclass(frozen=True)
class Odd:
    """Odd (Me, 2026): a method that breaks the contract."""

    how: str = pfl.author.hyperparameter("", help="which break; empty: none")

    def build(self, problem):
        return BROKEN[self.how][0](problem) if self.how else peers(problem)


METHODS.pop("odd")  # it is not for tests of all methods


@pytest.fixture(scope="module")
def clients():
    return toys.make_federation((4, 3, 5, 2, 4))


@pytest.fixture(scope="module")
def state(clients):
    """The initial state of a run of `peers`, and of its breaks."""
    experiment = make_experiment(Odd(), clients)
    problem = experiment.problem
    return toys.start(experiment.algorithm(problem.plan), problem, clients.client_data)


def make_experiment(method, clients, **fields):
    """An experiment on one device."""
    problem = toys.make_problem(clients, cohort=COHORT)
    return Experiment(method, problem, clients, **fields)


def check(experiment, state=None):
    """The checks of a run that is created, and of a run that begins if there is a state."""
    conformance.check(experiment)
    if state is not None:
        data = experiment.federation.client_data
        conformance.check_start(experiment, experiment.problem.plan, KEY, state, data)


def train(method, clients, rounds=1, store="device", out=None, **options):
    options = {
        "participation": COHORT / K,
        "execution": pfl.Execution("map", devices=1, client_store=store),
    } | options
    local = pfl.LocalTraining(optax.sgd(0.1))
    return pfl.Run(method, clients, pfl.models.MLP(()), local, **options).train(
        rounds, eval_every=1, out=out
    )


def refused(call, *args, **options):
    """The one line with which a call ends, without the name of the method."""
    with pytest.raises(pfl.ArgumentError) as caught:
        call(*args, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value).removeprefix("odd.")


def not_finite(state):
    """The state with one parameter that is not a number."""

    def spoil(leaf):
        return leaf.at[1, 0].set(jnp.nan)

    return state.with_models(jax.tree.map(spoil, state.models))


@pytest.mark.parametrize("how", [how for how in BROKEN if how not in AFTER_A_ROUND])
def test_a_broken_method_is_refused_in_a_line_that_names_the_field(how, clients, state):
    line = refused(check, make_experiment(Odd(how), clients), state)
    assert re.match(BROKEN[how][1], line), line


def test_a_sound_method_is_accepted(clients, state):
    check(make_experiment(Odd(), clients), state)


def test_initial_models_that_are_not_finite_are_refused(clients, state):
    line = refused(check, make_experiment(Odd(), clients), not_finite(state))
    assert line == "start and first_row: returned models with values that are not finite"


def own_size(outputs, y):
    """A metric of the user."""
    return len(y)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_the_sound_method_runs_under_every_store(store, clients, tmp_path):
    options = {"clock": pfl.Clock(), "metrics": {"own_drift": own_size}}
    result = train(Odd(), clients, rounds=2, store=store, out=tmp_path / "run", **options)
    rows = files.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row.get("drift") for row in rows] == [None, 1.0, 1.0] and np.isfinite(result.loss)
    assert rows[-1]["own_drift"] > 1
    own = {name for name in rows[-1] if "drift" in name}
    assert rows[-1].keys() - own <= conformance.RESERVED  # what a metric must not be called
    assert {*rows[-1], *result.summary["best"], "method", "seed"} - own == conformance.RESERVED


def test_a_metric_of_the_user_with_the_name_of_one_of_the_methods_is_refused(clients):
    text = (
        "metrics=drift: is also a metric of odd itself; accepted: another name, such as own_drift"
    )
    assert refused(train, Odd(), clients, metrics={"drift": own_size}) == text


@pytest.mark.parametrize(
    ("store", "how"),
    [
        pytest.param("device", "select_models, weights of sum 2", marks=pytest.mark.slow),
        ("host", "select_models, weights of sum 2"),
        ("host", "predict, index out of range"),
        pytest.param("host", "download, out of range", marks=pytest.mark.slow),
        pytest.param("disk", "select_models, index out of range", marks=pytest.mark.long),
        pytest.param("disk", "predict, index out of range", marks=pytest.mark.slow),
    ],
)
def test_values_are_checked_under_every_store(store, how, clients):
    assert re.match(BROKEN[how][1], refused(train, Odd(how), clients, store=store))


@pytest.mark.parametrize(
    "store", ["device", *(pytest.param(s, marks=pytest.mark.long) for s in ("host", "disk"))]
)
def test_weights_that_predict_returns_are_checked_when_they_are_scored(store, clients):
    (how,) = AFTER_A_ROUND
    assert re.match(BROKEN[how][1], refused(train, Odd(how), clients, store=store))


@pytest.mark.slow
@pytest.mark.parametrize("eval_clients", [0, 3])  # clients 0, 1 and 4
def test_weights_are_checked_in_every_evaluation(eval_clients, clients, monkeypatch):
    def late(weights, context):
        return jnp.where((context.round < 2) | (context.client < 4), weights, 2 * weights)

    def build(problem):
        algorithm = peers(problem)

        def select_models(context, row, size):
            found = algorithm.select_models(context, row, size)
            return found._replace(weights=late(found.weights, context))

        return dataclasses.replace(algorithm, select_models=select_models)

    monkeypatch.setitem(BROKEN, "late", (build, ""))
    result = train(Odd("late"), clients, rounds=1, eval_clients=eval_clients)
    assert np.isfinite(result.loss) and len(result.per_client_accuracy) == (eval_clients or K)
    line = refused(train, Odd("late"), clients, rounds=2, eval_clients=eval_clients)
    assert line.startswith("select_models: the weights of client 4 sum to 2, ")


UNSEEN = {
    "weights of none of the models": (
        given(adapt=lambda context, models, data: pfl.author.Prediction(weights=jnp.ones(1))),
        r"adapt: weights is float32\[1\]; accepted: float\[5\]",
    ),
    "no Prediction": (
        given(adapt=lambda context, models, data: models),
        "adapt: returned dict; accepted: Prediction",
    ),
    "nothing under peers": (
        peers,
        "adapt: required for unseen clients with topology='peers'; it says what ",
    ),
    "a row that newcomers lack": (
        shared(
            first_row=lambda key, client, start: pfl.author.First({"own": NOTHING}),
            predict=lambda context, models, row, data: pfl.author.Prediction(
                weights=row["own"][None]
            ),
        ),
        r"adapt: line \d+ of test_conformance.py raised TypeError: tuple indices must be integers",
    ),
}


@pytest.mark.parametrize("how", UNSEEN)
def test_what_newcomers_predict_with_is_checked(how, clients, monkeypatch):
    monkeypatch.setitem(BROKEN, "adapt", UNSEEN[how])
    experiment = make_experiment(Odd("adapt"), clients, unseen=toys.make_federation((3, 4), seed=8))
    line = refused(check, experiment)
    assert re.match(UNSEEN[how][1], line), line


def test_newcomers_of_a_shared_model_need_no_function_of_their_own(clients, monkeypatch):
    monkeypatch.setitem(BROKEN, "shared", (shared(), ""))
    check(make_experiment(Odd("shared"), clients, unseen=toys.make_federation((3, 4), seed=8)))


@pytest.mark.long
def test_values_are_checked_on_several_devices(clients):
    execution = pfl.Execution("vmap", devices=2)
    assert np.isfinite(train(Odd(), clients, execution=execution).loss)
    how = "select_models, negative weights"
    assert re.match(BROKEN[how][1], refused(train, Odd(how), clients, execution=execution))


def test_an_undecorated_class_is_no_method(clients):
    class Plain:
        def build(self, problem): ...

    with pytest.raises(
        pfl.ArgumentError,
        match=r"^method=.*: accepted: a method with its hyperparameters, such as FedAvg",
    ):
        train(Plain(), clients)


def test_built_in_methods_are_not_traced_for_it(clients, state, monkeypatch):
    monkeypatch.setattr(conformance, "Contract", None)
    check(make_experiment(pfl.FedAvg(), clients), state)
    with pytest.raises(TypeError, match="not callable"):
        check(make_experiment(Odd(), clients))


@toys.each_method(fast=("fedavg_plus", "dfedem"), slow=("local", "federico"))
def test_built_in_methods_conform(name, clients, monkeypatch):
    """Their functions, and the values that they begin with; with newcomers."""
    monkeypatch.setattr(conformance, "is_built_in", lambda method: False)
    problem = toys.make_problem(clients, cohort=4, **{"batch_size": 2} | toys.network(name))
    unseen = toys.make_federation((3, 4), seed=8)
    plan = problem.plan
    experiment = toys.make_experiment(name, problem, clients, unseen=unseen, plan=plan)
    conformance.check(experiment)
    state = toys.start(experiment.algorithm(plan), problem, clients.client_data, seed=1)
    conformance.check_start(experiment, plan, jax.random.key(2), state, clients.client_data)
