"""What users pass as functions, and wrong calls: a value, or the line that is expected."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from samples import order, params

import pfljax as pfl
from pfljax.report import escaping


class Case(NamedTuple):
    """A call, and a regular expression of its error, or what it returns."""

    name: str
    call: Callable[[], Any]
    right: Any


def federation() -> pfl.Federation:
    """Two clients with twelve examples of two classes each."""
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    return pfl.Federation.from_arrays(x, np.arange(24) % 2, np.arange(24) // 12)


def make(optimizer: Any = None, model: Any = None, **local: Any) -> pfl.Run:
    """A run of FedAvg."""
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    return pfl.Run(
        pfl.FedAvg(),
        federation(),
        model or pfl.models.MLP((2,)),
        pfl.LocalTraining(optimizer, **local),
    )


def optimizer(update: Callable, init: Callable = lambda params: ()) -> optax.GradientTransformation:
    return optax.GradientTransformation(init, update)


class NoParameters(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return jnp.zeros((x.shape[0], self.num_classes)) + x.mean(axis=1, keepdims=True)


def simulation(method: Any) -> pfl.Simulation:
    return pfl.Simulation(method, federation(), pfl.models.MLP((2,)))


def step(key: Any = None, state: Any = None, other: Any = None) -> Any:
    """A step of FedAvg: with a key, and a state of its own or of another method."""
    sim = simulation(pfl.FedAvg())
    start = jax.random.key(0)
    if state is None:
        state = (simulation(other) if other else sim).init(start)
    return sim.step(start if key is None else key, state)


def oversized() -> pfl.Federation:
    """A federation whose clients have more training examples than its arrays."""
    clients = federation()
    return dataclasses.replace(
        clients, train=clients.train._replace(size=np.array([99, 3], np.int32))
    )


def compare(*titles: str) -> Any:
    """A comparison of FedAvg with itself under these titles."""
    return pfl.compare(
        [(title, pfl.FedAvg()) for title in titles], federation(), pfl.models.MLP((2,)), rounds=1
    )


WAY = r"optimizer: raised ZeroDivisionError: division by zero; accepted: an optax transformation, or a function"
lora = pfl.adapters.lora
CASES = [
    Case(
        "optimizer returns a number",
        lambda: make(lambda rate: 3.0),
        r"^optimizer: returned float for learning rate",
    ),
    Case(
        "optimizer returns None", lambda: make(lambda rate: None), r"^optimizer: returned NoneType"
    ),
    Case(
        "optimizer takes two",
        lambda: make(lambda a, b: optax.sgd(a)),
        r"^optimizer: cannot be called with 1 argument",
    ),
    Case(
        "optimizer takes nothing",
        lambda: make(lambda: optax.sgd(1)),
        r"^optimizer: cannot be called with 1 argument",
    ),
    Case("optimizer raises", lambda: make(lambda rate: 1 / 0), WAY),
    Case("its init raises", lambda: make(optimizer(None, lambda params: 1 / 0)), WAY),
    Case(
        "updates alone",
        lambda: make(optimizer(lambda u, s, p=None: u)),
        r"its update returned dict; accepted: updates",
    ),
    Case(
        "updates of a number",
        lambda: make(optimizer(lambda u, s, p=None: (1.0, s))),
        r"its updates have other shapes",
    ),
    Case(
        "a growing state",
        lambda: make(optimizer(lambda u, s, p=None: (u, (s,)))),
        r"its state changes its shape",
    ),
    Case(
        "a rate that is None",
        lambda: make(optax.sgd(lambda count: None)),
        r"^optimizer: raised TypeError",
    ),
    Case(
        "schedule returns None",
        lambda: make(schedule=lambda r: None),
        r"^schedule: returned NoneType; accepted",
    ),
    Case(
        "schedule returns an array",
        lambda: make(schedule=lambda r: jnp.ones(3)),
        r"^schedule: returned float32\[3\]",
    ),
    Case(
        "schedule returns i",
        lambda: make(schedule=lambda r: 1j),
        r"^schedule: returned complex64\[\]",
    ),
    Case(
        "schedule with if",
        lambda: make(schedule=lambda r: 1 if r < 3 else 0),
        r"schedule: raised .*jnp\.where in place",
    ),
    Case(
        "schedule takes two",
        lambda: make(schedule=lambda r, s: 1.0),
        r"^schedule: cannot be called with 1 argument",
    ),
    Case(
        "a loss of one argument",
        lambda: make(loss=lambda o: o.mean(-1)),
        r"^loss: cannot be called with 2 arguments",
    ),
    Case(
        "tracker takes two",
        lambda: make().train(1, tracker=lambda a, b: 0),
        r"^tracker: cannot be called with 1",
    ),
    Case(
        "no parameters",
        lambda: make(model=NoParameters),
        r"^model: has no parameters to train; accepted: networks",
    ),
    Case(
        "swapped arguments",
        lambda: step(key=simulation(pfl.FedAvg()).init(jax.random.key(0))),
        r"^key=State: acc",
    ),
    Case(
        "a number as key",
        lambda: step(key=0),
        r"^key=int: accepted: one key, such as jax\.random\.key\(0\)",
    ),
    Case(
        "two keys",
        lambda: step(key=jax.random.split(jax.random.key(0))),
        r"^key=PRNGKeyArray: accepted: one key",
    ),
    Case(
        "another method's state",
        lambda: step(other=pfl.Scaffold()),
        r"^state: has other arrays than those of fedavg",
    ),
    Case(
        "state and record",
        lambda: step(state=(1, 2)),
        r"^state=tuple: accepted: a state that init or step",
    ),
    Case("LoRA of rank 0", lambda: lora(rank=0), r"^rank=0: accepted: 1 or more"),
    Case("LoRA of rank 1.5", lambda: lora(rank=1.5), r"^rank=1\.5: accepted: whole numbers"),
    Case("LoRA with alpha NaN", lambda: lora(alpha=float("nan")), r"^alpha=nan: accepted: above 0"),
    Case("LoRA with alpha -1", lambda: lora(alpha=-1), r"^alpha=-1: accepted: above 0"),
    Case("LoRA nowhere", lambda: lora(where="["), r"^where=\[: is no regular expression"),
    Case("LoRA in NumPy's numbers", lambda: lora(rank=np.int64(2), alpha=np.float32(3)).alpha, 3.0),
    Case("a head of no layers", lambda: pfl.adapters.head(0), r"^layers=0: accepted: 1 or more"),
    Case(
        "a prompt of 1.5 tokens",
        lambda: pfl.adapters.prompt(1.5),
        r"^length=1\.5: accepted: whole numbers",
    ),
    Case(
        "a bias anywhere",
        lambda: pfl.adapters.bias(where=3),
        r"^where=3: accepted: a regular expression",
    ),
    Case(
        "-1 gradients",
        lambda: pfl.author.Ledger(gradients=-1),
        r"^gradients=-1: accepted: 0 or more",
    ),
    Case(
        "half a gradient",
        lambda: pfl.author.Ledger(gradients=0.5),
        r"^gradients=0\.5: accepted: whole numbers",
    ),
    Case(
        "NaN passes",
        lambda: pfl.author.Ledger(1, passes=float("nan")),
        r"^passes=nan: accepted: 0 or more",
    ),
    Case(
        "sizes beyond the arrays",
        oversized,
        r"^train: has sizes from 3 to 99; accepted: 0 to \d+, the rows of y",
    ),
    Case(
        "title report.html",
        lambda: compare("report.html"),
        r"^methods=report\.html: is a file of the comparison",
    ),
    Case(
        "title Table.JSON",
        lambda: compare("Table.JSON"),
        r"^methods=Table\.JSON: is a file of the comparison",
    ),
    Case(
        "title of 300 letters",
        lambda: compare("x" * 300),
        r": is too long; accepted: titles of at most 200 bytes",
    ),
    Case(
        "title of 150 accents",
        lambda: compare("é" * 150),
        r": is too long; accepted: titles of at most 200 bytes",
    ),
    Case(
        "title of two lines",
        lambda: compare("a\nb"),
        r"^methods=a\\nb: accepted: titles that can be names of",
    ),
    Case("LaTeX", lambda: escaping.latex("a\\{b}~^_%&#$\n\\input{x} -1.5"), None),
    Case("LaTeX of a hyphen", lambda: escaping.latex("pFedMe-2 | < >"), None),
    Case("Markdown", lambda: escaping.markdown("a|b <img src=x> *c* `d` [e](f)\ng"), None),
    Case(
        "ViT of 2**31 - 1 blocks",
        lambda: make(model=pfl.models.ViT(depth=2**31 - 1)),
        r"^depth=2147483647: accepted: 1 to",
    ),
    Case(
        "clients that raise",
        lambda: pfl.compare([pfl.FedAvg()], lambda s: 1 / 0, 3, rounds=1),
        r"^clients: raised ZeroDivisionE",
    ),
]
VALUES = {
    "LaTeX": (
        r"a\textbackslash{}\{b\}\textasciitilde{}\textasciicircum{}\_\%\&\#\$ \textbackslash{}input\{x\} $-1.5$"
    ),
    "LaTeX of a hyphen": r"pFedMe-2 \textbar{} \textless{} \textgreater{}",
    "Markdown": r"a\|b &lt;img src=x&gt; *c* `d` [e](f) g",
}
NAMES = [(case.name,) for case in CASES]
ORDERED = sorted(NAMES, key=lambda name: order(name[0]))


@pytest.mark.parametrize("name", params(NAMES, ORDERED[:4], ORDERED[: len(NAMES) // 5]))
def test_wrong_calls_are_refused_in_a_line(name):
    case = next(case for case in CASES if case.name == name)
    if name in VALUES or not isinstance(case.right, str):
        assert case.call() == VALUES.get(name, case.right)
        return
    with pytest.raises(pfl.ArgumentError, match=case.right) as error:
        case.call()
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "stops"),
    [
        (True, True),
        (np.bool_(True), True),
        ("enough", True),
        (None, False),
        (0, False),
        ("", False),
    ],
)
def test_a_stop_rule_says_whether_or_why(answer, stops):
    run = pfl.Run(pfl.FedAvg(), federation(), pfl.models.MLP((2,)), stop=lambda rows: answer)
    assert (run.train(2, eval_every=1).summary["last"]["round"] < 2) == stops


@pytest.mark.slow
@pytest.mark.parametrize("answer", [np.array([True, False]), [], {}, object()])
def test_a_stop_rule_that_answers_otherwise_is_refused(answer):
    run = pfl.Run(pfl.FedAvg(), federation(), pfl.models.MLP((2,)), stop=lambda rows: answer)
    with pytest.raises(
        pfl.ArgumentError,
        match=r"^stop: returned \w+, for the rows of the history; accepted: whether",
    ):
        run.train(1)


@pytest.mark.slow
def test_collaboration_has_as_many_matrices_as_evaluations():
    found = make().train(1).collaboration
    assert found.matrix(0).shape == found.matrix(np.int64(-1)).shape
    for evaluation in (99, -3, 1.5, "a", True):
        with pytest.raises(
            pfl.ArgumentError, match=r"^evaluation=.*: accepted: whole numbers, -2 to 1"
        ):
            found.matrix(evaluation)
