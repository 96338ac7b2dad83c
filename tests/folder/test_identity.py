"""What makes a run another one, besides what its traces show."""

import dataclasses
import importlib
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.api.study import share_programs
from pfljax.evaluation import measures
from pfljax.folder.fingerprint import differences

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 60)
CLIENTS = pfl.Federation.from_arrays(X, Y, client=np.arange(60) % 3, validation_fraction=0.2)
LOCAL = pfl.LocalTraining(optax.sgd, 0.1)
MODEL = pfl.models.MLP(hidden=())


def program(**options):
    """The program of a run of FedAvg."""
    local = options.pop("local", LOCAL)
    return pfl.Run(pfl.FedAvg(), CLIENTS, MODEL, local, **options).experiment.program()


def metric_from(folder, code):
    """`score` in a file of a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "score.py").write_text(textwrap.dedent(code))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            return importlib.import_module("score").score
        finally:
            sys.modules.pop("score", None)


SCORE = """
    def score(outputs, y):
        return (outputs.argmax(axis=1) == y).mean()
"""


def test_an_edited_metric_is_another_program_and_named_with_its_file(tmp_path):
    edited = SCORE.replace("== y", "!= y")
    found = [
        metric_from(tmp_path / name, code)
        for name, code in {"before": SCORE, "after": edited}.items()
    ]
    before, after = (program(metrics={"own": metric}) for metric in found)
    assert differences(before, after) == ["metric own: score.py changed"]
    commented = metric_from(tmp_path / "commented", SCORE + "    # of all\n")
    assert differences(before, program(metrics={"own": commented})) == []
    # it may go on with other metrics
    assert differences(before, program()) == differences(program(), before) == []


@pytest.mark.slow
def test_a_table_does_not_show_scores_of_an_edited_metric(tmp_path):
    """Nor of another metric that has the name of the earlier one."""
    methods = [pfl.Local(), pfl.FedAvg()]
    options = {"rounds": 1, "seeds": [0], "out": tmp_path / "study"}
    before = metric_from(tmp_path / "before", SCORE)
    pfl.compare(methods, CLIENTS, MODEL, LOCAL, metrics={"own": before}, **options)
    edited = metric_from(tmp_path / "after", SCORE.replace("== y", "!= y"))
    text = r"^rerun: .*by another program; what differs: metric own: score\.py changed; accepted: changed"
    with pytest.raises(pfl.ArgumentError, match=text):
        pfl.compare(methods, CLIENTS, MODEL, LOCAL, metrics={"own": edited}, **options)
    table = pfl.compare(
        methods, CLIENTS, MODEL, LOCAL, metrics={"own": edited}, rerun="changed", **options
    )
    right = pfl.compare(
        methods, CLIENTS, MODEL, LOCAL, metrics={"own": edited}, rounds=1, seeds=[0]
    )
    for found, wanted in zip(table.rows, right.rows, strict=True):
        assert found["metrics"]["own"]["mean"] == wanted["metrics"]["own"]["mean"]
    with pytest.raises(pfl.ArgumentError, match="metric own: "):
        auroc = measures.METRICS["auroc"]
        pfl.compare(methods, CLIENTS, MODEL, LOCAL, metrics={"own": auroc}, **options)


def test_a_stop_rule_is_known_by_what_it_does(tmp_path):
    class Rule:
        limit = 0.5

        def __call__(self, rows):
            return rows[-1]["loss"] < self.limit

    def renamed(rows):
        return rows[-1]["loss"] < 0.5

    def rule(rows):
        return rows[-1]["loss"] < 0.5

    before = program(stop=Rule())
    Rule.limit = 0.6
    assert differences(before, program(stop=Rule())) == ["stop rule: a value that it uses changed"]
    assert differences(program(stop=rule), program(stop=renamed)) == []


class Scaled(nn.Module):
    """A network with a function of its own."""

    scale: object

    @nn.compact
    def __call__(self, x):
        return self.scale(nn.Dense(3)(x))


def of_network(scale):
    return pfl.Run(pfl.FedAvg(), CLIENTS, Scaled(scale), LOCAL).experiment.program()


class Table:
    factor = 2.0

    def times(self, x):
        return np.float32(self.factor) * x


def by_callback(table):
    """A function that Python computes, without gradients."""

    def scale(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x + jax.pure_callback(
            table.times, shape, jax.lax.stop_gradient(x), vmap_method="sequential"
        )

    return scale


def of_rule(factor):
    """A function whose rule under vmap multiplies by another number."""

    @jax.custom_batching.custom_vmap
    def scale(x):
        return x * 1.0

    @scale.def_vmap
    def rule(size, batched, x):
        return x * factor, batched[0]

    return scale


@pytest.mark.slow
def test_attributes_behind_a_callback_are_noticed(monkeypatch):
    before = of_network(by_callback(Table()))
    assert differences(before, of_network(by_callback(Table()))) == []
    monkeypatch.setattr(Table, "factor", 3.0)
    assert differences(before, of_network(by_callback(Table()))) == ["model"]


@pytest.mark.slow
def test_what_is_printed_while_debugging_is_no_part_of_a_program():
    def printed(x):
        jax.debug.print("the mean is {}", x.mean())
        return jnp.sin(x)

    assert differences(of_network(jnp.sin), of_network(printed)) == []
    assert differences(of_network(jnp.sin), of_network(jnp.cos)) == ["model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_random_seed_offset", 1),
        ("jax_threefry_partitionable", False),
        ("jax_default_matmul_precision", "bfloat16"),
    ],
)
def test_settings_of_jax_that_change_results_are_named(setting, value):
    before = program()
    was = getattr(jax.config, setting)
    try:
        jax.config.update(setting, value)
        now = program()
    finally:
        jax.config.update(setting, was)
    assert f"{setting}: was {was}, is {value}" in differences(before, now)


@pytest.mark.slow
def test_code_that_another_point_of_a_grid_runs_is_noticed(tmp_path):
    """Both points are scored by the programs that they have."""
    factor = [1.0]

    @pfl.author.method(keeps="nothing", travels="the model")
    @dataclasses.dataclass(frozen=True)
    class Branched(pfl.FedAvg):
        kind: str = pfl.author.hyperparameter("plain", choices=("plain", "other"))

        def build(self, problem):
            if self.kind == "plain":
                return super().build(problem)
            loss = problem.model.loss
            return super().build(
                problem.with_loss(lambda *args, **kwargs: factor[0] * loss(*args, **kwargs))
            )

    def tune():
        hyperparameters = {"kind": ["plain", "other"]}
        return pfl.tune(
            Branched(),
            CLIENTS,
            MODEL,
            LOCAL,
            rounds=1,
            hyperparameters=hyperparameters,
            out=tmp_path,
        )

    first = tune()
    assert tune().scores == first.scores
    factor[0] = 5.0
    with pytest.raises(pfl.ArgumentError, match=r"has scores of something else \(.* changed\)"):
        tune()


@pytest.mark.slow
def test_code_that_only_a_value_beyond_the_grid_runs_is_noticed(tmp_path, monkeypatch):
    """The grid's edge wins, and 3 layers are tried as well, where the loss has another factor."""
    factor = [1.0]

    @pfl.author.method(keeps="nothing", travels="the model")
    @dataclasses.dataclass(frozen=True)
    class Deep(pfl.FedAvg):
        layers: int = pfl.author.hyperparameter(1, at_least=1, at_most=3, static=True)

        def build(self, problem):
            if self.layers < 3:
                return super().build(problem)
            loss = problem.model.loss
            return super().build(
                problem.with_loss(lambda *args, **kwargs: factor[0] * loss(*args, **kwargs))
            )

    def scores_of(runs, *_):
        return [float(run.experiment.method.layers) for run in runs], [0.0] * len(runs)

    monkeypatch.setattr("pfljax.api.tuning.scores_of", scores_of)

    def tune():
        hyperparameters = {"layers": [1, 2]}
        return pfl.tune(
            Deep(),
            CLIENTS,
            MODEL,
            LOCAL,
            rounds=1,
            seeds=[0],
            hyperparameters=hyperparameters,
            out=tmp_path,
        )

    assert tune().best.hyperparameters == {"layers": 3} == tune().best.hyperparameters
    factor[0] = 5.0
    with pytest.raises(pfl.ArgumentError, match=r"has scores of something else \(.* changed\)"):
        tune()


@pytest.mark.slow
def test_runs_whose_networks_scale_pixels_differently_share_no_program(tmp_path):
    for seed in range(2):
        np.save(
            tmp_path / f"x{seed}.npy", RNG.integers(0, 100 * (seed + 1), (60, 16), dtype=np.uint8)
        )
    runs = []
    for seed in range(2):
        x = np.load(tmp_path / f"x{seed}.npy", mmap_mode="r")
        clients = pfl.Federation.from_arrays(x, Y, client=np.arange(60) % 3)
        runs.append(pfl.Run(pfl.FedAvg(), clients, MODEL, LOCAL, seed=seed))
    alone = [run.experiment.program()["parts"] for run in runs]
    together = [run.experiment.program()["parts"] for run in share_programs(runs)]
    assert together == alone and alone[0] != alone[1]


def test_training_does_not_change_the_program_of_convolutions():
    """A run that was killed is resumed in a process that has traced nothing yet."""
    clients = pfl.data.digits(num_clients=4, train_examples=8)

    def run_of_a_network() -> pfl.Run:
        local = pfl.LocalTraining(optax.sgd, 0.1, batch_size=4)
        return pfl.Run(pfl.Ditto(), clients, pfl.models.CNN((4,)), local)

    before = run_of_a_network().experiment.program()["parts"]
    trained = run_of_a_network()
    trained.train(1, progress=False)
    assert trained.experiment.program()["parts"] == before
