"""Clients that share nothing, a part or everything: the cells of `experiments.federico.unshared`.

Each cell is a function of a seed. Eight clients, unless it says otherwise, have 100 training examples and 100 test
examples each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

import pfljax as pfl
from pfljax.data import partitions
from pfljax.evaluation.statistics import deviation
from pfljax.folder import files

CLIENTS = 8
DIMENSIONS = 64
TRAIN = 100
TEST = 100
MANY = 500  # training examples of clients with many, if the data has them
HIDDEN = 8  # units of the functions that regression learns
NOISE = (
    0.3  # standard deviation of the noise of regression's targets, which have variance 1 without it
)

ABOUT = {
    "own-N": "every client numbers the classes its own way; N training examples each",
    "rotated-N": "every client rotates its inputs its own way; N training examples each",
    "groups-D": "D label groups; D=1: one distribution",
    "dirichlet": "shares of the classes from a Dirichlet distribution",
    "writers": "natural clients, where the file has `client`",
    "swap-N": "every client permutes N classes of its own choice, the others are everybody's",
    "permuted-D": "D groups, each of which numbers the classes its own way",
    "tree": "halves of the clients permute four classes, and pairs within them three others",
    "lone": "the last client numbers the classes its own way, the others agree",
    "half": "half of the clients agree, the others number the classes their own way",
    "noisy-P": "P % of the training labels of half of the clients are drawn at random",
    "exceptions-P": "every client permutes all classes on its own P % of the space, a half-space",
    "few-N": f"half of the clients have N training examples, the others up to {MANY}",
    "regression-D": "a noisy function of the inputs for each of D groups; D=8: everyone's own",
    "regression-lone": "the last client has a function of its own, the others share one",
    "regression-partly": "0.8 times everybody's function plus 0.6 times one of the client's own",
    "regression-few": "everybody's function; half of the clients have 8 training examples",
}
CELLS = (
    *("own-20", "own-100", "rotated-20", "rotated-100"),
    *(f"groups-{d}" for d in (1, 2, 3, 4, 8)),
    "dirichlet",
    *("swap-2", "swap-4", "swap-6"),
    *("permuted-2", "tree", "lone", "half"),
    *("noisy-40", "exceptions-20", "exceptions-40", "few-5"),
    *("regression-1", "regression-2", "regression-4", "regression-8"),
    *("regression-lone", "regression-partly", "regression-few"),
)

Data = tuple[np.ndarray, np.ndarray, np.ndarray | None]
Clients = Callable[[int], pfl.Federation]


def read(file: str | None) -> Data:
    """x (n, 64), y (n,) and the clients (n,), if the file has them. Without a file, scikit-learn's digits."""
    if file is None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        client = None
    else:
        arrays = files.read_npz(Path(file))
        x = arrays["x"].reshape(len(arrays["y"]), -1)
        y = arrays["y"]
        client = arrays.get("client")
    x = x.astype(np.float32)
    x = x - x.mean(axis=0)
    if x.shape[1] > DIMENSIONS:
        axes = np.linalg.eigh(x.T @ x)[1][:, ::-1][:, :DIMENSIONS]
        x = x @ axes
    return x / np.sqrt(np.square(x).mean()), y.astype(np.int32), client


def is_regression(cell: str) -> bool:
    """Whether the clients of a cell predict numbers."""
    return cell.startswith("regression")


def clients_of(cell: str, data: Data) -> Clients:
    """Returns seed -> the clients of a cell."""
    kind, _, parameter = cell.partition("-")
    x, y, client = data

    def partitioned(seed: int) -> pfl.Federation:
        options = {
            "seed": seed,
            "standardize": False,
            "train_examples": TRAIN,
            "test_examples": TEST,
        }
        if kind == "writers":
            return pfl.Federation.from_arrays(x, y, client, num_clients=CLIENTS, **options)
        partition = partitions.Dirichlet()
        if kind == "groups":
            partition = partitions.LabelGroups(int(parameter))
        return pfl.Federation.from_arrays(x, y, num_clients=CLIENTS, partition=partition, **options)

    def changed(seed: int) -> pfl.Federation:
        sizes = sizes_of(kind, parameter, len(y))
        rng = np.random.default_rng([seed, sizes[0]])
        ids = rng.permutation(len(y))
        parts = []
        start = 0
        for k, size in enumerate(sizes):
            stop = start + size + TEST
            chosen = ids[start:stop]
            is_test = np.arange(size + TEST) >= size
            change = change_to_regression if is_regression(cell) else change_of_client
            inputs, labels = change(kind, parameter, k, seed, x, x[chosen], y[chosen], is_test)
            parts.append((inputs, labels, np.full(len(chosen), k), is_test))
            start = stop
        arrays = zip(*parts, strict=True)
        inputs, labels, owner, is_test = (np.concatenate(array) for array in arrays)
        return pfl.Federation.from_arrays(
            inputs, labels, owner, is_test=is_test, standardize=False, seed=seed
        )

    return partitioned if kind in ("groups", "dirichlet", "writers") else changed


def sizes_of(kind: str, parameter: str, num_examples: int) -> list[int]:
    """The numbers of training examples of all clients."""
    if kind in ("own", "rotated"):
        return [int(parameter)] * CLIENTS
    if kind == "few" or parameter == "few":
        few = 8 if parameter == "few" else int(parameter)
        half = CLIENTS // 2
        many = (num_examples - CLIENTS * TEST) // half - few
        return [few] * half + [min(many, MANY)] * half
    return [TRAIN] * CLIENTS


def change_of_client(
    kind: str,
    parameter: str,
    k: int,
    seed: int,
    everyone: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    is_test: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of client k, from those of everybody's distribution."""
    rng = np.random.default_rng([seed, k, 11])
    group_rng = np.random.default_rng([seed, k // (CLIENTS // 2), 12])
    pair_rng = np.random.default_rng([seed, k // 2, 13])
    if kind == "own" or (kind == "lone" and k == CLIENTS - 1) or (kind == "half" and k % 2):
        return x, permutation(rng, 10)[y]
    if kind == "rotated":
        rotation = np.linalg.qr(rng.normal(size=(x.shape[1],) * 2))[0]
        return (x @ rotation).astype(np.float32), y
    if kind == "swap":
        return x, permutation(rng, int(parameter))[y]
    if kind == "permuted":
        group = k % int(parameter)
        return x, permutation(np.random.default_rng([seed, group, 14]), 10)[y]
    if kind == "tree":
        halves = np.arange(10)
        halves[:4] = group_rng.permutation(4)
        pairs = np.arange(10)
        pairs[4:7] = 4 + pair_rng.permutation(3)
        return x, pairs[halves[y]]
    if kind == "noisy" and k % 2 == 0:
        is_random = (rng.random(len(y)) < int(parameter) / 100) & ~is_test
        return x, np.where(is_random, rng.integers(0, 10, len(y)), y)
    if kind == "exceptions":
        direction = rng.normal(size=x.shape[1])
        bound = np.quantile(everyone @ direction, 1 - int(parameter) / 100)
        return x, np.where(x @ direction > bound, permutation(rng, 10)[y], y)
    return x, y  # "few", "lone" and "half": clients that agree


def permutation(rng: np.random.Generator, num: int) -> np.ndarray:
    """(10,) new numbers of ten classes, of which `num` are permuted without a fixed point."""
    numbers = np.arange(10)
    chosen = rng.permutation(10)[:num]
    numbers[chosen] = np.roll(chosen, 1)
    return numbers


def change_to_regression(
    kind: str,
    parameter: str,
    k: int,
    seed: int,
    everyone: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    is_test: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and noisy values of client k's function."""
    rng = np.random.default_rng([seed, k, 15])

    def function(number: int) -> np.ndarray:
        """(n,) the values of a random function, standardized over everyone's inputs."""
        teacher = np.random.default_rng([seed, number, 16])
        hidden = teacher.normal(size=(everyone.shape[1], HIDDEN)) / np.sqrt(everyone.shape[1])
        output = teacher.normal(size=HIDDEN)
        values = np.tanh(2 * everyone @ hidden) @ output
        return (np.tanh(2 * x @ hidden) @ output - values.mean()) / deviation(values)

    if parameter == "partly":
        values = 0.8 * function(CLIENTS) + 0.6 * function(k)
    elif parameter == "lone":
        values = function(k == CLIENTS - 1)
    elif parameter == "few":
        values = function(0)
    else:
        values = function(k % int(parameter))
    return x, (values + NOISE * rng.normal(size=len(x))).astype(np.float32)
