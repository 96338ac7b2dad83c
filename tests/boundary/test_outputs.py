"""What users take out of a run: predictions, exported models, examples, metrics, losses, the networks they come from.

Each row of a table is what a user has, with what is right in NumPy, SciPy, scikit-learn or a plain Flax `apply`, or the
line of the error. Sizes are 0, 1, 2 and primes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from samples import check, params, sample
from scipy import special
from sklearn import metrics as sk

import pfljax as pfl
from pfljax import models
from pfljax.evaluation import measures
from pfljax.training.scoring import best_row

SIZES = (3, 17, 7, 29)  # of the clients
N = sum(SIZES)
NAMES = np.repeat(["north", "south", "east", "west"], SIZES)
RNG = np.random.default_rng(0)
Y = np.arange(N) % 3
X = RNG.normal(size=(N, 4)) * [1, 10, 100, 0.01] + [0, -50, 1000, 3] + Y[:, None]
PIXELS = RNG.integers(0, 256, (N, 4, 4)).astype(np.uint8)
TOKENS = RNG.integers(0, 9, (N, 5))
BOTH = {"image": PIXELS[..., None], "sensors": X}
LOCAL = pfl.LocalTraining(optax.sgd(0.1), batch_size=4)


class Case(NamedTuple):
    """What a user has.

    Attributes:
        kind: What it is about.
        name: What is special about it.
        make: Makes what is found.
        right: Makes what is right; or a regular expression of the error.
    """

    kind: str
    name: str
    make: Callable[[], Any]
    right: Callable[[], Any] | str


class TwoInputs(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(x)]
        return nn.Dense(self.num_classes)(jnp.concatenate(flat, axis=1))


class Normalized(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool = False):
        hidden = nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x))
        return nn.Dense(self.num_classes)(nn.relu(hidden))


class Embedded(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.Embed(9, 4)(x).mean(axis=1))


class InNNX(nnx.Module):
    def __init__(self, num_classes: int, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(4, 5, rngs=rngs)
        self.last = nnx.Linear(5, num_classes, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.hidden(x)))


@functools.cache
def run(kind: str = "linear") -> tuple[pfl.Federation, pfl.Result]:
    """Clients and a result, of a few kinds."""
    x = {
        "pixels": PIXELS,
        "divided": PIXELS,
        "tokens": TOKENS,
        "dict": BOTH,
        "raw": np.float32(X / 100),
    }.get(kind, X)
    model = {
        "dict": TwoInputs,
        "norm": Normalized,
        "tokens": Embedded,
        "nnx": InNNX,
        "mlp": models.MLP((5,)),
    }
    options = {"standardize": kind != "raw", "validation_fraction": 0.2}
    clients = pfl.Federation.from_arrays(x, Y, client=NAMES, **options)
    method = pfl.methods.FedEM(components=2) if kind == "mixture" else pfl.Local()
    training = pfl.Run(method, clients, model.get(kind, models.MLP(())), LOCAL)
    return clients, training.train(rounds=2, progress=False)


def by_hand(x: Any, client: int = 0, kind: str = "linear") -> np.ndarray:
    """Predictions of a linear model, in NumPy."""
    clients, result = run(kind)
    scaled = (np.asarray(x, np.float64) - clients.scaling.mean) / clients.scaling.std
    layer = result.state.models["Dense_0"]
    logits = scaled.reshape(len(scaled), -1) @ np.float64(layer["kernel"][client]) + np.float64(
        layer["bias"][client]
    )
    return special.softmax(logits, axis=1)


def predicted(x: Any, client: Any = 0, kind: str = "linear") -> np.ndarray:
    """What the run predicts."""
    return run(kind)[1].predict(x, client)


def row(name: str, x: Any, right: Any = None, kind: str = "linear", client: Any = 0) -> Case:
    """A row on `predict`: right is what is predicted for `right`, x by default, or a message."""
    make = functools.partial(predicted, x, client, kind)
    if isinstance(right, str):
        return Case("predict", name, make, right)
    number = client if isinstance(client, int) else 0
    expected = functools.partial(by_hand, x if right is None else right, int(number), kind)
    return Case("predict", name, make, expected)


def with_hole(value: float) -> np.ndarray:
    x = X[:3].copy()
    x[1, 2] = value
    return x


def framed() -> Any:
    return pytest.importorskip("pandas").DataFrame(X[:3], columns=list("abcd"))


PREDICT = [
    row("float64", X[:3]),
    row("float32", np.float32(X[:3])),
    row("a list", X[:2].tolist(), X[:2]),
    row("integers", np.round(X[:5]).astype(int)),
    row("a single example", X[4:5]),
    row("a prime number of examples", X[:7]),
    row("every second example", X[:6:2]),
    row("columns first", np.asfortranarray(X[:3])),
    row("an array of JAX", jnp.asarray(X[:3]), np.float32(X[:3])),
    row("the last client", X[:2], client=3),
    row("a client's NumPy number", X[:2], client=np.int64(0)),
    row("gray pixels", PIXELS[:3], kind="pixels"),
    row("gray pixels as integers", PIXELS[:3].astype(int), kind="pixels"),
    row("gray pixels as floats", PIXELS[:3].astype(float), kind="pixels"),
    Case("predict", "a client's name", lambda: predicted(X[:2], "west"), lambda: by_hand(X[:2], 3)),
    Case("predict", "a data frame", lambda: predicted(framed()), lambda: by_hand(X[:3])),
    Case("predict", "no examples", lambda: predicted(np.zeros((0, 4))).shape, lambda: (0, 3)),
    Case(
        "predict",
        "no tokens",
        lambda: predicted(np.zeros((0, 5), int), kind="tokens").shape,
        lambda: (0, 3),
    ),
    Case(
        "predict",
        "none for all",
        lambda: run()[1].predict(np.zeros((0, 4))).shape,
        lambda: (4, 0, 3),
    ),
    Case(
        "predict",
        "for all clients",
        lambda: run()[1].predict(X[:2]),
        lambda: np.stack([by_hand(X[:2], k) for k in range(4)]),
    ),
    Case(
        "predict",
        "whole floats for tokens",
        lambda: predicted(TOKENS[:2] * 1.0, kind="tokens"),
        lambda: predicted(TOKENS[:2], kind="tokens"),
    ),
    Case(
        "predict",
        "a list in a dict",
        lambda: predicted({"image": BOTH["image"][:2], "sensors": X[:2].tolist()}, kind="dict"),
        lambda: predicted({name: leaf[:2] for name, leaf in BOTH.items()}, kind="dict"),
    ),
    row("three columns", X[:2, :3], r"^x: has shape \(2, 3\); accepted: \(B, 4\)$"),
    row("one axis", X[0], r"^x: has shape \(4,\); accepted: \(B, 4\)$"),
    row("a number", 3.0, r"^x: has shape \(\); accepted"),
    row("words", [["a", "b", "c", "d"]], "^x: is <U1; accepted: numbers$"),
    row("objects", np.array([[1, "a", 2, 3]], object), "^x: is 'a' in row 0; accepted: numbers$"),
    row("complex numbers", X[:2] + 1j, "^x: is complex128; accepted: numbers$"),
    row("nothing", None, r"^x: .*accepted"),
    row("NaN", with_hole(np.nan), "^x: is NaN or infinite in 1 rows; the first is row 1$"),
    row("infinity", with_hole(np.inf), "^x: is NaN or infinite in 1 rows; the first is row 1$"),
    row(
        "a mask",
        np.ma.masked_greater(X[:3], 900),
        "^x: has masked entries; accepted: numbers everywhere",
    ),
    row("a dict for an array", {"x": X[:2]}, "^x: has shape .*accepted"),
    row("an array for a dict", X[:2], "^x: is no array, or not as many arrays; accepted", "dict"),
    row(
        "a dict without an array",
        {"image": BOTH["image"][:2]},
        "^x: is no array, or not as many",
        "dict",
    ),
    row("arrays of unequal lengths", BOTH | {"sensors": X[:2]}, "^x: has shape .*accepted", "dict"),
    row(
        "fractions for tokens",
        TOKENS[:2] + 0.5,
        "^x: has numbers that are no int32; accepted: integers",
        "tokens",
    ),
    row("tokens beyond int32", TOKENS[:2] + 2**40, "^x: has numbers that are no int32", "tokens"),
    row("no such client", X[:2], "^client=4: accepted: 0 to 3", client=4),
    row("a client before the first", X[:2], "^client=-1: accepted: 0 to 3", client=-1),
    row("a bool for a client", X[:2], "^client=True: accepted: 0 to 3", client=True),
    row(
        "a name with an error",
        X[:2],
        "^client=wst: accepted: 0 to 3, or a name; did you mean west",
        client="wst",
    ),
]


def ordered(x: np.ndarray) -> np.ndarray:
    return x[np.lexsort(x.reshape(len(x), -1).T)]


def all_parts(client: Any, kind: str = "linear") -> np.ndarray:
    """All examples of a client, in an order of their own."""
    clients, _ = run(kind)
    return ordered(
        np.concatenate(
            [clients.examples(client, part)[0] for part in ("train", "validation", "test")]
        )
    )


def scores_by_hand(kind: str) -> list[float]:
    """Each client's accuracy, by its own examples and predictions."""
    clients, result = run(kind)
    pairs = [clients.examples(k) for k in range(4)]
    return [(result.predict(x, k).argmax(axis=1) == y).mean() for k, (x, y) in enumerate(pairs)]


EXAMPLES = [
    Case(
        "examples",
        f"all of {name}",
        functools.partial(all_parts, name),
        lambda name=name: ordered(X[name == NAMES]),
    )
    for name in ("north", "south", "east", "west")
]
EXAMPLES += [
    Case(
        "examples",
        "pixels",
        lambda: all_parts(1, "pixels"),
        lambda: ordered(PIXELS[NAMES == "north"]),
    ),
    Case(
        "examples",
        "tokens",
        lambda: all_parts(0, "tokens"),
        lambda: ordered(TOKENS[NAMES == "east"]),
    ),
    Case(
        "examples",
        "not scaled",
        lambda: all_parts(3, "raw"),
        lambda: ordered(np.float32(X / 100)[NAMES == "west"]),
    ),
    Case(
        "examples",
        "types",
        lambda: tuple(
            str(run(kind)[0].examples(0)[0].dtype) for kind in ("linear", "pixels", "tokens")
        ),
        lambda: ("float64", "uint8", "int32"),
    ),
    Case(
        "examples",
        "sizes",
        lambda: [len(run()[0].examples(k, "train")[1]) for k in range(4)],
        lambda: run()[0].train.size.tolist(),
    ),
    Case(
        "examples",
        "an unknown part",
        lambda: run()[0].examples(0, "tests"),
        "^part=tests: .*train.*validation.*test",
    ),
    Case(
        "examples",
        "an unknown name",
        lambda: run()[0].examples("nort"),
        "^client=nort: .*did you mean north",
    ),
    Case(
        "examples", "beyond the last", lambda: run()[0].examples(4), "^client=4: accepted: 0 to 3"
    ),
]
EXAMPLES += [
    Case(
        "scored",
        kind,
        lambda kind=kind: run(kind)[1].per_client_accuracy,
        functools.partial(scores_by_hand, kind),
    )
    for kind in ("linear", "pixels", "tokens", "dict", "norm", "nnx", "raw", "mixture")
]


def applied(kind: str, client: int = 2) -> np.ndarray:
    """Probabilities of the exported model, by plain Flax."""
    x = inputs_of(kind)
    module, variables = run(kind)[1].export(client)
    logits = module.apply(variables, x) if isinstance(module, nn.Module) else module(x)
    return special.softmax(np.float64(logits), axis=1)


def inputs_of(kind: str) -> Any:
    x = {"pixels": PIXELS, "tokens": TOKENS, "dict": BOTH, "raw": np.float32(X / 100)}.get(kind, X)
    return jax.tree.map(lambda leaf: leaf[:5], x)


def taken(kind: str) -> Any:
    """The same, from what `export` returns."""
    module, variables = run(kind)[1].export(1)
    newcomers = pfl.Federation.from_arrays(3 * X, Y, client=NAMES)
    begin = pfl.Model(module, frozen=variables, trainable=".")
    return pfl.Run(pfl.Local(), newcomers, begin, LOCAL).clients.scaling.mean


EXPORT = [
    Case(
        "export",
        kind,
        functools.partial(applied, kind),
        lambda kind=kind: run(kind)[1].predict(inputs_of(kind), 2),
    )
    for kind in ("linear", "mlp", "pixels", "tokens", "dict", "norm", "nnx", "raw", "mixture")
]
EXPORT += [
    Case(
        "continue",
        kind,
        functools.partial(taken, kind),
        lambda kind=kind: run(kind)[0].scaling.mean,
    )
    for kind in ("mlp", "nnx", "norm")
]
EXPORT += [
    Case("export", "no such client", lambda: run()[1].export(9), "^client=9: accepted: 0 to 3"),
    Case(
        "continue",
        "with other arrays",
        lambda: pfl.Run(
            pfl.Local(),
            pfl.Federation.from_arrays(BOTH, Y, client=NAMES),
            pfl.Model(TwoInputs(3), frozen=run("mlp")[1].export(0)[1], trainable="."),
            LOCAL,
        ),
        "^model: standardizes x, which the clients' x lacks$",
    ),
    Case(
        "continue",
        "with more columns",
        lambda: pfl.Run(
            pfl.Local(),
            pfl.Federation.from_arrays(X[:, :3], Y, client=NAMES),
            pfl.Model(models.MLP((5,)), frozen=run("mlp")[1].export(0)[1], trainable="."),
            LOCAL,
        ),
        r"^model: standardizes x with statistics of shape \(4,\); the clients' examples have \(3,\)$",
    ),
]

LOGITS = RNG.normal(size=(23, 3)) * 5
CLASSES = RNG.integers(0, 3, 23)
LABELS = (RNG.random((23, 3)) < 0.4).astype(int)
P = special.softmax(LOGITS, axis=1)
CONFIDENT = np.stack([np.zeros(8), np.arange(20.0, 100, 10)], axis=1)
ABOVE = np.arange(8) > 3


def measured(
    metric: Any, logits: np.ndarray = LOGITS, y: np.ndarray = CLASSES, task: str = "classification"
) -> float:
    """A run's metric of one client with these float32 logits."""
    found = {"outputs": np.float32(logits)[None], "y": y[None], "size": np.array([len(y)])}
    return measures.measured(measures.named({"own": metric}, set(), task), found, task)["own"][0]


def auc_of_all() -> float:
    return np.mean([sk.roc_auc_score(each == CLASSES, P[:, each]) for each in range(3)])


METRICS = [
    Case(
        "metric",
        "f1",
        lambda: measured("f1"),
        lambda: sk.f1_score(CLASSES, P.argmax(1), average="macro"),
    ),
    Case(
        "metric",
        "balanced accuracy",
        lambda: measured("balanced_accuracy"),
        lambda: sk.balanced_accuracy_score(CLASSES, P.argmax(1)),
    ),
    Case("metric", "auroc", lambda: measured("auroc"), auc_of_all),
    Case(
        "metric",
        "auroc of confident predictions",
        lambda: measured("auroc", CONFIDENT, ABOVE),
        lambda: 1,
    ),
    Case("metric", "auroc, reversed", lambda: measured("auroc", CONFIDENT, ~ABOVE), lambda: 0),
    Case(
        "metric",
        "auroc of a single class",
        lambda: measured("auroc", LOGITS, 0 * CLASSES),
        lambda: np.nan,
    ),
    Case(
        "metric",
        "perplexity",
        lambda: measured("perplexity"),
        lambda: np.exp(sk.log_loss(CLASSES, P)),
    ),
    Case(
        "metric",
        "perplexity of a wrong prediction",
        lambda: np.log(measured("perplexity", CONFIDENT[:1], np.zeros(1, int))),
        lambda: 20,
    ),
    Case(
        "metric",
        "auroc of labels",
        lambda: measured("auroc", LOGITS, LABELS, "multilabel"),
        lambda: sk.roc_auc_score(LABELS, LOGITS),
    ),
    Case(
        "metric",
        "f1 of labels",
        lambda: measured("f1", LOGITS, LABELS, "multilabel"),
        lambda: sk.f1_score(LABELS, LOGITS > 0, average="macro"),
    ),
    Case(
        "metric",
        "the log loss of scikit-learn",
        lambda: measured(lambda outputs, y: sk.log_loss(y, outputs, labels=[0, 1, 2])),
        lambda: sk.log_loss(CLASSES, P),
    ),
    Case(
        "metric",
        "the ROC curve of scikit-learn, of confident predictions",
        lambda: measured(
            lambda outputs, y: sk.roc_auc_score(y, outputs[:, 1]),
            CONFIDENT[:2] - [0, 5],
            ABOVE[3:5],
        ),
        lambda: 1,
    ),
    Case(
        "metric",
        "labels' own",
        lambda: measured(lambda p, y: p[0, 0], LOGITS, LABELS, "multilabel"),
        lambda: special.expit(LOGITS[0, 0]),
    ),
    Case(
        "metric",
        "the squared error of numbers",
        lambda: measured(sk.mean_squared_error, LOGITS[:, 0], LOGITS[:, 1], "regression"),
        lambda: np.mean((LOGITS[:, 0] - LOGITS[:, 1]) ** 2),
    ),
    Case(
        "metric",
        "several numbers",
        lambda: measured(lambda p, y: p),
        "^metrics=own: .*raised ValueError",
    ),
    Case(
        "metric",
        "nothing",
        lambda: measured(lambda p, y: None),
        "^metrics=own: .*accepted: functions that return a",
    ),
    Case(
        "metric",
        "a word",
        lambda: measured("f3"),
        "^metrics=f3: is no function, and unknown; accepted: f1",
    ),
    Case("metric", "no function", lambda: pfl.metrics.metric(3), "^function=3: "),
    Case(
        "metric",
        "a direction",
        lambda: pfl.metrics.metric(len, higher_is_better="low"),
        "^higher_is_better=low: ",
    ),
    Case(
        "metric",
        "f1 of numbers",
        lambda: measured("f1", LOGITS, LOGITS, "regression"),
        "^metrics=f1: needs classes",
    ),
]


def rows_of(**columns: list[float]) -> list[dict]:
    """Rows of a history with these columns."""
    return [
        {"round": number, "train_loss": 1.0} | dict(zip(columns, values, strict=True))
        for number, values in enumerate(zip(*columns.values(), strict=True))
    ]


STOP = [
    Case(
        "best",
        "accuracy",
        lambda: best_row(rows_of(validation_accuracy=[0.9, 0.5, 0.7, 0.6]))["round"],
        lambda: 2,
    ),
    Case(
        "best",
        "loss",
        lambda: best_row(rows_of(validation_loss=[0.1, 0.5, 0.3, 0.4]))["round"],
        lambda: 2,
    ),
    Case(
        "best",
        "training loss",
        lambda: best_row(rows_of(train_loss=[0.1, 0.5, 0.3, 0.4]))["round"],
        lambda: 2,
    ),
    Case(
        "best",
        "only NaN",
        lambda: best_row(rows_of(validation_loss=[1.0, np.nan, np.nan]))["round"],
        lambda: 2,
    ),
    Case(
        "stop", "goes on", lambda: pfl.patience(2)(rows_of(validation_loss=[9, 1, 2])), lambda: ""
    ),
    Case(
        "stop",
        "ends",
        lambda: pfl.patience(2)(rows_of(validation_loss=[9, 1, 2, 3])),
        lambda: "no better validation loss than in round 1",
    ),
    Case("stop", "no rounds", lambda: pfl.patience(0), "^patience=0: "),
]


def outputs_of(network: Callable, y: np.ndarray, batch: int = 1, **options: Any) -> Any:
    """The shape of a network's outputs for a mini-batch, once it is accepted."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return network(x)

    task = options.pop("task", "classification")
    num_classes = options.pop("num_classes", 2)
    model = models.build(Own(), (4,), task, num_classes, target_shape=y.shape[1:])
    params = model.init(jax.random.key(0))
    return model.apply(params, jnp.ones((batch, 4))).shape


NUMBERS = {"task": "regression", "num_classes": 1}
SEVERAL = {"task": "multilabel"}
ONE = np.zeros(3)
TWO = np.zeros((3, 2))
PAIR = np.zeros(3, int)


def network(
    name: str, build: Callable, right: Any, y: np.ndarray = PAIR, batch: int = 1, **options: Any
) -> Case:
    """A row on the outputs of a network."""
    expected = right if isinstance(right, str) else lambda: right
    return Case("network", name, lambda: outputs_of(build, y, batch, **options), expected)


SIGMOID = "^model=Own: returns probabilities, those of a sigmoid; accepted: logits"
NETWORKS = [
    network("squeezed numbers, 1", lambda x: nn.Dense(1)(x).squeeze(), (1,), ONE, **NUMBERS),
    network("squeezed numbers, 2", lambda x: nn.Dense(1)(x).squeeze(), (2,), ONE, 2, **NUMBERS),
    network("squeezed numbers, 7", lambda x: nn.Dense(1)(x).squeeze(), (7,), ONE, 7, **NUMBERS),
    network("squeezed logits", lambda x: nn.Dense(2)(x).squeeze(), (1, 2)),
    network("squeezed labels", lambda x: nn.Dense(2)(x).squeeze(), (1, 2), TWO, **SEVERAL),
    network("an axis of one", lambda x: nn.Dense(1)(x), (1,), ONE, **NUMBERS),
    network("one column", lambda x: nn.Dense(1)(x)[:, 0], (1,), ONE, **NUMBERS),
    network(
        "one logit",
        lambda x: nn.Dense(1)(x),
        r"^model=Own: returns outputs of shape \(batch, 1\); accepted: \(batch, 2\)",
    ),
    network(
        "three logits",
        lambda x: nn.Dense(3)(x),
        r"^model=Own: returns outputs of shape \(batch, 3\)",
    ),
    network("a sigmoid for two classes", lambda x: nn.sigmoid(nn.Dense(2)(x)), SIGMOID),
    network("a sigmoid for labels", lambda x: nn.sigmoid(nn.Dense(2)(x)), SIGMOID, TWO, **SEVERAL),
    network(
        "a sigmoid, reshaped",
        lambda x: nn.sigmoid(nn.Dense(2)(x)).reshape(-1, 2),
        SIGMOID,
        TWO,
        **SEVERAL,
    ),
    network(
        "sigmoids side by side",
        lambda x: jnp.concatenate([nn.sigmoid(nn.Dense(1)(x)), nn.sigmoid(nn.Dense(1)(x))], axis=1),
        SIGMOID,
        TWO,
        **SEVERAL,
    ),
    network(
        "a softmax",
        lambda x: nn.softmax(nn.Dense(2)(x)),
        "^model=Own: returns probabilities, which sum to 1",
    ),
    network(
        "a softmax for labels",
        lambda x: nn.softmax(nn.Dense(2)(x)),
        "^model=Own: returns prob",
        TWO,
        **SEVERAL,
    ),
    network("a sigmoid inside", lambda x: nn.Dense(2)(nn.sigmoid(nn.Dense(2)(x))), (1, 2)),
    network("a gate at the end", lambda x: nn.silu(nn.Dense(2)(x)), (1, 2)),
    network("a sigmoid for numbers", lambda x: nn.sigmoid(nn.Dense(1)(x)), (1,), ONE, **NUMBERS),
    network("log probabilities", lambda x: nn.log_softmax(nn.Dense(2)(x)), (1, 2)),
    network(
        "the mean of the batch",
        lambda x: nn.Dense(2)(x).mean(axis=0),
        "^model=Own: (returns outputs of shape|fails on)",
    ),
]


def loss(outputs: Any, y: Any, task: str = "classification") -> np.ndarray:
    return models.Model(None, task=task).loss_from_outputs(jnp.float32(outputs), jnp.asarray(y))


LOSSES = [
    Case(
        "loss",
        f"a class, logit {z}",
        lambda z=z: loss([[z, 0]], [1]),
        lambda z=z: np.logaddexp(0, z),
    )
    for z in (-100.0, 10.0, 18.0, 60.0, 100.0, 1e4)
]
LOSSES += [
    Case(
        "loss",
        f"a label, logit {z}",
        lambda z=z: loss([[z]], [[0]], "multilabel"),
        lambda z=z: np.logaddexp(0, z),
    )
    for z in (-100.0, 18.0, 30.0, 1e4)
]

CASES = PREDICT + EXAMPLES + EXPORT + METRICS + STOP + NETWORKS + LOSSES
TITLES = [f"{case.kind}: {case.name}" for case in CASES]
BY_TITLE = dict(zip(TITLES, CASES, strict=True))
FEW = [
    "predict: float64",
    "predict: no examples",
    "examples: all of south",
    "scored: linear",
    "export: linear",
    "metric: auroc of confident predictions",
    "network: a sigmoid for labels",
    "loss: a label, logit 30.0",
]


def kind_of(title: str) -> str:
    return title.partition(":")[0]


SOME = sample(TITLES, kind_of)


def test_the_sample_has_every_kind():
    assert len(CASES) == len(BY_TITLE)
    check(TITLES, SOME, kind_of)


@pytest.mark.parametrize(
    "title",
    params(
        [(title,) for title in TITLES], [(title,) for title in FEW], [(title,) for title in SOME]
    ),
)
def test_what_comes_out(title):
    case = BY_TITLE[title]
    if isinstance(case.right, str):
        with pytest.raises(pfl.ArgumentError, match=case.right) as caught:
            case.make()
        assert "\n" not in str(caught.value)
        return
    found = case.make()
    expected = case.right()
    if isinstance(expected, str | tuple):
        assert found == expected
    else:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected
        )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mlp", "nnx"])
def test_a_saved_model_brings_its_scaling(kind, tmp_path):
    """For newcomers whose data have another scale."""
    pytest.importorskip("safetensors")
    clients, result = run(kind)
    path = tmp_path / "model.safetensors"
    result.save_model(path, 1)
    model = pfl.Model(
        {"mlp": models.MLP((5,)), "nnx": InNNX}[kind],
        frozen=pfl.models.weights.Saved(path),
        trainable=".",
    )
    newcomers = pfl.Federation.from_arrays(3 * X, Y, client=NAMES)
    continued = pfl.Run(pfl.Local(), newcomers, model, LOCAL)
    np.testing.assert_allclose(continued.clients.scaling.mean, clients.scaling.mean, rtol=1e-5)
