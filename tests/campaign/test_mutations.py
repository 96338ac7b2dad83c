"""Edits of a study between two runs: those that change what is computed are noticed, the others are not.

The judge is the check that every resumed run and every finished cell passes. Values that a run does not compute with,
such as names and execution plans, must not matter.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
from samples import check, params, sample

from pfljax.folder import files, fingerprint, folders
from pfljax.settings.method import METHODS

TEXT = (Path(__file__).parent / "own_study.py").read_text()

NOTICED = {  # what is edited -> (old text, new text, what the message names)
    "a constant in the client's loss": (
        "loss / TEMPERATURE",
        "0 * loss / TEMPERATURE",
        "client_update of Mine",
    ),
    "a module's constant": ("TEMPERATURE = 2.0", "TEMPERATURE = 2.5", "client_update of Mine"),
    "the personal objective": (
        "self.pull / 2 * distance",
        "self.pull * distance",
        "client_update of Mine",
    ),
    "a norm": ("jnp.square(a - b).sum()", "jnp.abs(a - b).sum()", "client_update of Mine"),
    "weights by size": (
        "jnp.sqrt(data.train.size",
        "jnp.log(data.train.size",
        "client_update of Mine",
    ),
    "what is sent": (
        "leaf[None], new.params)",
        "leaf[None], own.params)",
        "client_update of Mine",
    ),
    "the row": ('row["seen"] + 1', 'row["seen"] + 2', "client_update of Mine"),
    "the order of examples": (
        "context.key, solver.begin(w)",
        "jax.random.fold_in(context.key, 1), solver.begin(w)",
        "client_update of Mine",
    ),
    "where a client starts": (
        'solver.begin(row["own"])',
        "solver.begin(w)",
        "client_update of Mine",
    ),
    "a forgotten objective": ("objective=near,\n", "objective=None,\n", "client_update of Mine"),
    "a stopped gradient": (
        "w = jax.tree.map(lambda leaf: leaf[0], models)",
        "w = jax.tree.map(lambda leaf: jax.lax.stop_gradient(2 * leaf[0]), models)",
        "client_update of Mine",
    ),
    "a new example weight": (
        "weight=size[None]",
        "weight=size[None] ** 2",
        "client_update of Mine",
    ),
    "a captured array": ("[0.25, 0.75]", "[0.25, 0.70]", "server_update of Mine: captured arrays"),
    "which entry is read": ("BLEND[0] * old", "BLEND[1] * old", "server_update of Mine"),
    "a floor": ("1e-6)", "1e-3)", "server_update of Mine"),
    "the server's state": (
        "state.server.state + 1)",
        "state.server.state + 2)",
        "server_update of Mine",
    ),
    "a metric": ('{"spread": weight.sum()}', '{"spread": weight.max()}', "server_update of Mine"),
    "the server's step": ("leaf / weight[0]", "leaf / (1 + weight[0])", "server_update of Mine"),
    "whose models are mixed": (
        'topology="shared",\n',
        'topology="shared", select_models=lambda context, row, n: pfl.author.Mixture(0 * n[None], jnp.ones(1)),\n',
        "select_models of Mine",
    ),
    "the mixture": (
        "self.share * a + (1 - self.share) * b",
        "self.share * b + (1 - self.share) * a",
        "predict of Mine",
    ),
    "who predicts": ("return Prediction(mixed)", "return Prediction(own)", "predict of Mine"),
    "a hyperparameter's default": (
        "pfl.author.hyperparameter(0.25,",
        "pfl.author.hyperparameter(0.3,",
        "share",
    ),
    "newcomers": (
        "Prediction(jax.tree.map(moved, start)",
        "Prediction(jax.tree.map(lambda x: 0.5 * x, start)",
        "adapt of Mine",
    ),
    "initial own models": (
        "jax.random.fold_in(key, 1), client",
        "jax.random.fold_in(key, 2), client",
        "first_row of Mine",
    ),
    "equal initial models": ("common=False", "common=True", "first_row of Mine"),
    "whose initial model": ("(key, 1), client,", "(key, 1), 3 - client,", "first_row of Mine"),
    "the initial server": (
        "Start(jnp.zeros(()), problem",
        "Start(jnp.ones(()), problem",
        "start of Mine",
    ),
    "the initial global model": (
        "problem.init_models(key, 1)",
        "problem.init_models(jax.random.fold_in(key, 3), 1)",
        "start of Mine",
    ),
    "the initial row": ("jnp.zeros((), jnp.int32)", "jnp.ones((), jnp.int32)", "first_row of Mine"),
    "the row's dtype": ("jnp.zeros((), jnp.int32)", "jnp.zeros((), jnp.float32)", "of Mine"),
    "the ledger": ("Ledger(gradients=2)", "Ledger(gradients=1)", "ledger"),
    "a hyperparameter": ("Mine(pull=0.5)", "Mine(pull=0.6)", "pull"),
    "swapped factors": (
        "BLEND[0] * old + BLEND[1] * new, state.models, mean\n",
        "BLEND[0] * old + BLEND[1] * new, mean, state.models\n",
        "server_update of Mine",
    ),
    "swapped entries of what is sent": (
        '{"own": own.params, "seen": row["seen"] + 1}',
        '{"own": new.params, "seen": row["seen"] + 1}',
        "rounds and evaluation: inputs",
    ),
    "swapped arguments of the optimizer": (
        "optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate, momentum=0.9))",
        "swapped(optax.sgd(rate, momentum=0.9))",
        "optimizer",
    ),
    "a function on the host": ("np.sin(x)", "np.cos(x)", "adapt of Mine"),
    "a constant of a function on the host": ("GAIN = 2.0", "GAIN = 3.0", "adapt of Mine"),
    "a default of a function on the host": (
        "def on_host(x, shift=1.0)",
        "def on_host(x, shift=2.0)",
        "adapt of Mine",
    ),
    "an activation": ("nn.relu(x)", "nn.tanh(x)", "model"),
    "the captured backbone": ("default_rng(7)", "default_rng(8)", "model: captured arrays"),
    "the backbone's scale": (
        "normal(size=(8, 8))",
        "normal(size=(8, 8), scale=2)",
        "model: captured arrays",
    ),
    "initial values": ("nn.initializers.normal(0.1)", "nn.initializers.normal(0.2)", "model"),
    "the initializer": ("nn.initializers.normal(0.1)", "nn.initializers.lecun_normal()", "model"),
    "an epsilon": ("epsilon=1e-5", "epsilon=1e-4", "model"),
    "a layer less": ("        x = nn.LayerNorm(epsilon=1e-5)(x)\n", "", "model"),
    "a width": ("width: int = 5", "width: int = 6", "model"),
    "a bias": ("use_bias=True", "use_bias=False", "model"),
    "dropout": ("nn.Dropout(0.1", "nn.Dropout(0.2", "model"),
    "training mode": ("deterministic=not train", "deterministic=True", "model"),
    "the outputs' scale": ("use_bias=True)(x)", "use_bias=True)(x) * 2", "model"),
    "the inputs' scale": (
        "x.reshape(x.shape[0], -1) @",
        "2 * x.reshape(x.shape[0], -1) @",
        "model",
    ),
    "what clients have used": (
        'topology="shared",\n',
        'topology="shared", report=pfl.author.MethodReport(collaboration=lambda context, row: used(row)),\n',
        "collaboration of Mine",
    ),
    "sgd to adam": ("optax.sgd(rate, momentum=0.9)", "optax.adam(rate)", "optimizer"),
    "momentum": ("momentum=0.9", "momentum=0.8", "optimizer"),
    "nesterov": ("momentum=0.9", "momentum=0.9, nesterov=True", "optimizer"),
    "clipping": ("clip_by_global_norm(1.0)", "clip_by_global_norm(2.0)", "optimizer"),
    "the kind of clipping": ("clip_by_global_norm(1.0)", "clip(1.0)", "optimizer"),
    "no clipping": ("optax.chain(optax.clip_by_global_norm(1.0), ", "optax.chain(", "optimizer"),
    "weight decay": ("optax.chain(", "optax.chain(optax.add_decayed_weights(1e-4), ", "optimizer"),
    "the schedule": ("0.9**number", "0.8**number", "optimizer"),
    "the schedule's form": ("0.9**number", "1 / (1 + number)", "optimizer"),
    "no schedule": ("schedule=schedule", "schedule=None", "optimizer"),
    "the rate": ("optimizer, 0.1", "optimizer, 0.2", "learning_rate"),
    "the mini-batches": ("batch_size=4", "batch_size=3", "batch_size"),
    "the epochs": ("epochs=1", "epochs=2", "epochs"),
    "the class weights": ("(1.0, 1.0, 2.0)", "(1.0, 1.0, 3.0)", "class_weights"),
    "smoothed labels": ("batch_size=4,", "batch_size=4, label_smoothing=0.1,", "label_smoothing"),
    "another loss": ("class_weights=(1.0, 1.0, 2.0)", "loss=weighted", "loss"),
    "private gradients": (
        "batch_size=4,",
        "batch_size=4, privacy=pfl.Privacy(1.0, 1.0),",
        "privacy",
    ),
    "the examples": ("default_rng(seed)", "default_rng(seed + 1)", "partition"),
    "the features' scale": ("linspace(0.5, 1.5", "linspace(0.5, 1.4", "data"),
    "the labels": ("rng.integers(0, 3, 48)", "rng.integers(0, 3, 48)[::-1]", ""),
    "the partition": ("np.repeat(np.arange(4), 12)", "np.tile(np.arange(4), 12)", ""),
    "the test examples": ("test_fraction=0.25", "test_fraction=0.5", ""),
    "the scaling": ("standardize=True", "standardize=False", "data"),
    "one pixel": ("y = rng", "x[5, 3] += 1e-3\n    y = rng", "data"),
    "the seed": ("        seed=0,", "        seed=1,", "seed was 0 and is 1"),
    "the cohorts": ("participation=0.5", "participation=0.75", "participation"),
    "the sampler": ('aggregator="mean"', 'sampler="weighted"', "server"),
    "when a schedule changes": (
        "problem.rounds // 2",
        "problem.rounds // 3",
        "server_update of Mine",
    ),
    "what only longer runs compute": (
        "0.5 if problem.rounds > 1",
        "0.25 if problem.rounds > 1",
        "server_update of Mine",
    ),
    "a decay over the planned rounds": ("0.99 ** (problem", "0.98 ** (problem", "adapt of Mine"),
    "an attack": ('pfl.Attack("none")', 'pfl.Attack("sign_flip", 0.25)', "attack"),
}

UNNOTICED = {
    "a docstring of a function on the host": ('"""On the host."""', '"""Runs on the host."""'),
    "a comment": ("TEMPERATURE = 2.0", "TEMPERATURE = 2.0  # as in the paper"),
    "a docstring": ("A network with a captured array.", "The network."),
    "a function's name": ("squash", "activation"),
    "a class's name": ("Backbone", "Encoder"),
    "the method's name": ("Mine", "Yours"),
    "a variable's name": ("distance", "gap"),
    "a constant's name": ("TEMPERATURE", "TAU"),
    "an inner function's name": ("objective(params, batch, w)", "criterion(params, batch, w)"),
    "a constant's form": ("TEMPERATURE = 2.0", "TEMPERATURE = 4.0 / 2"),
    "an array's form": ("jnp.array([0.25, 0.75])", "jnp.asarray((0.25, 0.75))"),
    "an unused constant": ("TEMPERATURE = 2.0", "TEMPERATURE = 2.0\nUNUSED = 3"),
    "an unused function": ("def squash(x):", "def unused(x):\n    return x\n\n\ndef squash(x):"),
    "lines": ("            del size\n", "\n"),
    "a lambda as a function": (
        "def near(params, batch):\n                return objective(params, batch, w)\n",
        "near = lambda params, batch: objective(params, batch, w)\n",
    ),
    "imports": ("import optax\n", "import math  # noqa: F401\n\nimport optax\n"),
    "the order of functions": (
        "def schedule(number):\n    return 0.9**number\n",
        "schedule = lambda number: 0.9**number\n",
    ),
    "the help of a hyperparameter": ("to the global model", "toward the global model"),
    "what travels, in words": ("the global model, both ways", "models"),
    "the plan": ('plan="map"', 'plan="vmap"'),
    "the chunk": ('plan="map", chunk=8', 'plan="chunk", chunk=2'),
    "the devices": ("devices=1", "devices=0"),
    "the names of arguments": ("def optimizer(rate):", "def optimizer(rate, *unused):"),
}


def run_of(text, folder):
    """The run of an edited study, whose method is registered under its own name for as long as it is built."""
    path = folder / "own_study.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("own_study", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    known = set(METHODS)
    try:
        spec.loader.exec_module(module)
        return module.run()
    finally:
        for name in set(METHODS) - known:
            del METHODS[name]


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """What config.json says of the unedited study, as it is read back."""
    described = (
        run_of(TEXT, tmp_path_factory.mktemp("before")).experiment.with_rounds(100).described
    )
    path = tmp_path_factory.mktemp("config") / "config.json"
    files.write_json(path, described)
    return files.read_json(path)


def changed(before, old, new, folder):
    assert old in TEXT
    return folders.changed(before, run_of(TEXT.replace(old, new), folder).experiment)


def by_part(case):
    """The part of the study that an edit changes: a function of the method, the model and so on; "" for no change."""
    (what,) = case
    part = NOTICED[what][2].partition(":")[0] if what in NOTICED else ""
    large = part.endswith("of Mine") or part in ("model", "optimizer", "data", "")
    return part if large else "a setting"


CASES = [(what,) for what in (*NOTICED, *UNNOTICED)]
SOME = sample(CASES, by_part)


def test_the_sample_has_an_edit_of_every_part():
    check(CASES, SOME, by_part)


@pytest.mark.parametrize("what", params(CASES[: len(NOTICED)], [], SOME))
def test_an_edit_that_changes_what_is_computed_is_noticed(what, before, tmp_path):
    old, new, named = NOTICED[what]
    text = changed(before, old, new, tmp_path)
    assert text and named in text and "\n" not in text


@pytest.mark.parametrize("what", params(CASES[len(NOTICED) :], [], SOME))
def test_an_edit_that_changes_nothing_is_not_noticed(what, before, tmp_path):
    assert changed(before, *UNNOTICED[what], tmp_path) == ""


@pytest.mark.campaign
def test_a_run_that_goes_on_for_more_rounds_is_the_same_unless_its_schedule_spans_them(tmp_path):
    spanning = run_of(TEXT, tmp_path).experiment
    before, now = (fingerprint.program(spanning, planned=rounds) for rounds in (3, 30))
    assert (before["planned_rounds"], now["planned_rounds"]) == (3, 30)
    assert before["parts"] != now["parts"]
    text = TEXT.replace("half = problem.rounds // 2", "half = 5").replace(
        "0.5 if problem.rounds > 1 else 1.0", "0.5"
    )
    fixed = run_of(text, tmp_path).experiment
    before, now = (fingerprint.program(fixed, planned=rounds) for rounds in (3, 30))
    assert before["planned_rounds"] is None and before["parts"] == now["parts"]
    # newcomers train for all rounds, whatever their number
    assert fingerprint.differences(before, now) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("1.5 * outputs", "1.6 * outputs", "loss"),
        (
            "FACTORS = jnp.array([1.0, 1.0, 2.0])",
            "FACTORS = jnp.array([1.0, 1.0, 3.0])",
            "loss: captured arrays",
        ),
        ("FACTORS", "WEIGHTS", ""),
    ],
)
def test_an_edit_of_one_s_own_loss(old, new, named, tmp_path):
    text = TEXT.replace("class_weights=(1.0, 1.0, 2.0)", "loss=weighted")
    found = folders.changed(
        run_of(text, tmp_path).experiment.described,
        run_of(text.replace(old, new), tmp_path).experiment,
    )
    assert (named in found) if named else not found


def test_the_campaign_is_large_enough():
    assert len(NOTICED) >= 60 and len(UNNOTICED) >= 20
