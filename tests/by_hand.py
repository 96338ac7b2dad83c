"""Rounds that the engine plays and that NumPy plays beside it, from the equations of a method's paper.

A method's reference is a generator, which reads like the paper's listing: it takes the start from `Rounds`, and yields
after each round what the state must hold, by dotted names of the state's entries.

    def ditto(rounds):
        w, own = rounds.start("models")[0], rounds.start("clients.own.model")
        for _ in rounds:
            own = [rounds.descend(k, own[k], lambda v: 2.0 * (v - w)) for k in rounds.clients]
            w = rounds.mean([rounds.descend(k, w) for k in rounds.clients])
            yield {"models": [w], "clients.own.model": own}

    by_hand("ditto", ditto, hyperparameters={"mu": 2.0}, epochs=3)

Models are linear regressions, as vectors (d,) in float64 (`quadratics`), or, with `hidden` or `classes`, networks, as
trees of float64 (`networks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import networks
import numpy as np
import quadratics
import toys

from pfljax.evaluation import metrics
from pfljax.exchange.rounds import cohort_of, make_round

Reference = Callable[["Rounds"], Iterator[dict[str, Any]]]


@dataclasses.dataclass
class Rounds:
    """Rounds of a method as the engine played them.

    Attributes:
        federation: The clients.
        problem: What the method was built for.
        algorithm: The method.
        states: R + 1 states, the initial one first.
        records: R records.
        predict: () -> what clients predict with after the last round: models, weights and inputs.
        epochs: Local epochs E, which are as many steps, as batches are full.
        rate: The clients' learning rate.
    """

    federation: Any
    problem: Any
    algorithm: Any
    states: list[Any]
    records: list[Any]
    predict: Callable[[], Any]
    epochs: int
    rate: float

    @property
    def sizes(self) -> np.ndarray:
        """n_k, shape (K,)."""
        return self.federation.train.size

    @property
    def clients(self) -> range:
        """The clients' numbers."""
        return range(len(self.sizes))

    def __iter__(self) -> Iterator[int]:
        """The numbers of the rounds, from 0."""
        return iter(range(len(self.records)))

    def start(self, name: str) -> Any:
        """An entry of the initial state: vectors of linear models, other arrays, or trees, in float64."""
        return entry(self.states[0], name)

    def cohort(self, number: int) -> np.ndarray:
        """The clients of a round, sorted."""
        size = self.problem.cohort_size
        return np.asarray(cohort_of(jax.random.key(0), number, len(self.sizes), size).ids)

    def active(self, number: int) -> list[int]:
        """The clients of a round that have examples."""
        return [int(k) for k in self.cohort(number) if self.sizes[k]]

    def examples(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Client k's training examples."""
        return networks.examples(self.federation, k)

    def gradient(self, k: int, theta: Any) -> Any:
        """The gradient of client k's mean loss."""
        if isinstance(theta, dict):
            return networks.gradient(theta, *self.examples(k))
        return quadratics.gradient(self.federation, k, theta)

    def descend(self, k: int, theta: Any, further: Any = 0.0, steps: int | None = None) -> Any:
        """Theta after E full-batch steps along client k's gradient, plus a further term or a function of theta."""
        steps = self.epochs if steps is None else steps
        if isinstance(theta, dict):
            return networks.descend(theta, *self.examples(k), self.rate, steps)
        return quadratics.descend(self.federation, k, theta, steps, further)

    def mean(self, values: list[Any], weights: Any = "n_k") -> Any:
        """The mean of one value for each client; weighted by n_k, or by `weights`, None for equal ones."""
        if isinstance(weights, str):
            weights = self.sizes
        return networks.mean(values, weights)

    def probabilities(self) -> np.ndarray:
        """What all clients predict for client 0's test examples after the last round, shape (K, n, C)."""
        x = self.federation.test.x[0]

        def use(prediction, _):
            return metrics.predict(self.problem, self.algorithm, prediction, x)

        key = jax.random.key(0)
        clients = self.federation.client_data
        return toys.serve(self.algorithm, self.problem, use, key, self.states[-1], clients).outputs

    def newcomers(self, federation: Any) -> Any:
        """What newcomers predict with after the last round: models, weights and inputs."""
        return toys.adapt(
            self.algorithm, self.problem, jax.random.key(0), self.states[-1], federation.client_data
        )


def entry(state: Any, name: str) -> Any:
    """An entry of a state in float64, such as "clients.own.model" or "server.0".

    The parameters of linear models become vectors.
    """
    value = state
    for part in name.split("."):
        if isinstance(value, dict):
            value = value[part]
        elif part.isdigit():
            value = value[int(part)]
        else:
            value = getattr(value, part)
    return as_numpy(value)


def as_numpy(value: Any) -> Any:
    """A tree in float64; the parameters of linear models become vectors (..., d)."""
    if isinstance(value, dict) and set(value) == {"Dense_0"} and is_regression(value["Dense_0"]):
        return quadratics.vectors(value)
    return jax.tree.map(np.float64, value)


def is_regression(layer: Any) -> bool:
    """Whether a dense layer has one output and all of its parameters."""
    return (
        layer["kernel"] is not None and layer["bias"] is not None and layer["kernel"].shape[-1] == 1
    )


def play(
    name: str,
    *,
    hyperparameters: dict[str, Any] | None = None,
    rounds: int = 3,
    sizes: tuple[int, ...] = quadratics.SIZES,
    epochs: int = 2,
    hidden: tuple[int, ...] | None = None,
    federation: Any = None,
    optimizer: Any = None,
    **options: Any,
) -> Rounds:
    """Plays rounds with full batches and SGD; of classifying networks if `hidden` is given, else of regressions."""
    task = "regression" if hidden is None else "classification"
    rate = quadratics.RATE if hidden is None else networks.RATE
    federation = federation or toys.make_federation(sizes, task)
    options = options | {"epochs": epochs, "hidden": hidden or ()}
    optimizer = optimizer or (quadratics.OPTIMIZER if hidden is None else networks.OPTIMIZER)
    played, predict = toys.play_and_predict(
        name, federation, rounds, optimizer, hyperparameters, **options
    )
    return Rounds(*played, predict, epochs, rate)


def traffic(
    name: str,
    *,
    hyperparameters: dict[str, Any] | None = None,
    sizes: tuple[int, ...] = quadratics.SIZES,
    epochs: int = 1,
    hidden: tuple[int, ...] | None = None,
    **options: Any,
) -> tuple[float, float]:
    """Bytes that all clients receive and send in the first round, with the arguments of `play`.

    Of the start and the round, only what these depend on is compiled: no training.
    """
    federation = toys.make_federation(sizes, "regression" if hidden is None else "classification")
    problem = toys.make_problem(federation, epochs=epochs, hidden=hidden or (), **options)
    algorithm = toys.make_algorithm(name, problem, **hyperparameters or {})

    @jax.jit
    def moved(key: Any, clients: Any) -> tuple[Any, Any]:
        state = toys.init(algorithm, problem, key, clients)
        one_round = make_round(algorithm, problem.plan, problem.cohort_size)
        _, record = one_round(key, np.int32(0), state, clients)
        return record.down, record.up

    down, up = moved(jax.random.key(0), federation.client_data)
    return float(down), float(up)


def by_hand(
    name: str, reference: Reference, *, rtol: float = 1e-4, atol: float = 1e-5, **options: Any
) -> Rounds:
    """Plays rounds and compares the state after each of them with what the reference yields.

    Args:
        name: The method.
        reference: The method in NumPy.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        **options: As of `play`. Names that begin with "record." are entries of the round's record. "predictions" of the
            last yielded dict, if there are any, are compared with the models (K, J, ...) that clients predict with,
            "predictions.weights" and "predictions.inputs" with the rest of it, and "probabilities" (K, n, C) with what
            they predict for client 0's test examples.

    Returns:
        The rounds, for whatever else a test checks.
    """
    rounds = play(name, **options)
    expected: dict[str, Any] = {}
    number = 0
    for number, expected in enumerate(reference(rounds), start=1):
        for path, value in expected.items():
            if path.partition(".")[0] in ("predictions", "probabilities"):
                continue
            name = path.removeprefix("record.")
            source = rounds.states[number] if name == path else rounds.records[number - 1]
            assert_close(entry(source, name), value, f"{path} after round {number}", rtol, atol)
    assert number == len(rounds.records), "the reference must yield once a round"

    for path, value in expected.items():
        first, _, name = path.partition(".")
        if first == "predictions":
            assert_close(entry(rounds.predict(), name or "models"), value, path, rtol, atol)
    if "probabilities" in expected:
        found = rounds.probabilities()
        assert_close(found, expected["probabilities"], "probabilities", rtol, atol)
    return rounds


def newcomers_by_hand(
    name: str,
    reference: Callable[..., Any],
    *,
    part: str = "models",
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **options: Any,
) -> None:
    """Compares the models that three newcomers predict with after training with those of the reference.

    Args:
        name: The method.
        reference: (rounds, newcomers, k) -> the models (J, ...) of newcomer k, or what `part` names.
        part: An entry of their predictions, such as "inputs.0", in place of the models.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        **options: As of `play`.
    """
    rounds = play(name, **options)
    sizes = (3, 5, 1)
    task = "regression" if options.get("hidden") is None else "classification"
    newcomers = dataclasses.replace(rounds, federation=toys.make_federation(sizes, task, seed=9))
    found = entry(rounds.newcomers(newcomers.federation), part)
    for k in range(len(sizes)):
        one = jax.tree.map(lambda leaf, k=k: leaf[k], found)
        assert_close(one, reference(rounds, newcomers, k), f"newcomer {k}", rtol, atol)


def assert_close(found: Any, expected: Any, what: str, rtol: float, atol: float) -> None:
    """Compares arrays, lists, or trees with the same branches; lists of the clients' values are stacked first."""
    if isinstance(found, list | tuple):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{what}, {number}", rtol, atol)
        return
    if isinstance(expected, list | tuple):
        expected = stack(expected)
    if isinstance(expected, dict):
        assert set(found) == set(expected), what
        for name in expected:
            assert_close(found[name], expected[name], f"{what}, {name}", rtol, atol)
    elif expected is None:
        assert found is None, what
    else:
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol, err_msg=what)


def stack(values: Any) -> Any:
    """Stacks values along a new first axis: arrays, trees of arrays, or lists of those."""
    if isinstance(values[0], list | tuple):
        values = [stack(value) for value in values]
    if isinstance(values[0], dict):
        return {name: stack([value[name] for value in values]) for name in values[0]}
    return None if values[0] is None else np.stack(values)


def averaged(client: Callable[..., Any]) -> Reference:
    """The reference of a method whose server takes the mean by n_k of what client(rounds, k, theta) returns."""

    def reference(rounds: Rounds) -> Iterator[dict[str, Any]]:
        theta = networks.row(rounds.start("models"), 0)
        for _ in rounds:
            theta = rounds.mean([client(rounds, k, theta) for k in rounds.clients])
            yield {"models": stack([theta])}

    return reference
