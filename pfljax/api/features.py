"""Features of clients' examples behind a network's frozen layers, computed once instead of in every step."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax.contract.held import use_frozen
from pfljax.contract.host import cache_folder, free_memory
from pfljax.contract.pooled import Pooled, is_pooled
from pfljax.contract.types import PyTree, Split
from pfljax.data import Federation
from pfljax.models.model import FLOAT32, Model
from pfljax.models.rewriting import rewritten
from pfljax.models.tail import Tail, cut_network, features_before_cut
from pfljax.run.experiment import Experiment

SPLITS = ("train", "validation", "test")
AT_ONCE = 256  # examples
# least share of the network's products before the cut, below which features are larger than they save
WORTH = 0.25
FILL = 0.25  # largest share of free memory for features; larger ones are in a file


class Features(NamedTuple):
    """What a run computes once per example.

    Attributes:
        inputs: Shape and type of an example, or of each array in it.
        compute: Inputs (n, *features) -> features (n, ...), float32.
        line: A line for the plan.
    """

    inputs: PyTree
    compute: Callable[[PyTree], np.ndarray]
    line: str


def with_features(experiment: Experiment, wanted: bool) -> Experiment:
    """Returns the run on the features of its clients' examples, if `wanted`; as it is if its network has none."""
    model = experiment.problem.model
    local = experiment.local
    if model.frozen is None:
        return experiment
    network_and_features = cut(experiment) if wanted else "not wanted"
    if isinstance(network_and_features, str):
        return dataclasses.replace(experiment, not_cached=network_and_features)
    network, features = network_and_features
    assert local is not None
    built = dataclasses.replace(model, tail=network, example_input=network.example)
    problem = experiment.problem._replace(model=built, solver=local.bind(built))
    stacks: dict[int, Any] = {}

    def computed(federation: Federation | None) -> Federation | None:
        if federation is None:
            return None
        if federation.recorded_digest is not None:
            return with_placeholders(federation, network.example.shape[1:])
        return with_computed(federation, features.compute, stacks)

    federation = computed(experiment.federation)
    assert federation is not None
    return dataclasses.replace(
        experiment,
        problem=problem,
        federation=federation,
        unseen=computed(experiment.unseen),
        features=features,
    )


def cut(experiment: Experiment) -> tuple[Tail, Features] | str:
    """The network behind its frozen layers and the features of its inputs; or why it is not cut."""
    model = experiment.problem.model
    local = experiment.local
    if experiment.phases is not None:
        return "clients' examples change"
    if local is None or local.augment != "none":
        return "mini-batches are augmented"
    if experiment.attack.backdoor:
        return "attackers stamp a trigger on inputs"
    if model.dtype != FLOAT32:
        return f"computes in {model.dtype}"
    network = cut_network(model.network)
    if isinstance(network, str):
        return network
    if network.saved < WORTH:
        return f"{network.saved:.0%} of the products precede what is trained"
    shape = "x".join(map(str, network.example.shape[1:]))
    saved = f"{network.saved:.0%} of the network's products"
    text = f"{shape} numbers per example, computed once: {saved}"
    return network, Features(experiment.federation.inputs, computing(model, network), text)


def computing(model: Model, network: Tail) -> Callable[[PyTree], np.ndarray]:
    """Returns a function of inputs (n, *features) to features (n, ...), which takes a few examples at a time."""

    def run(frozen: PyTree, x: PyTree) -> Any:
        with use_frozen(network.full, frozen):
            return features_before_cut(network, x).astype(FLOAT32)

    program = rewritten(run)

    def compute(x: PyTree) -> np.ndarray:
        num = len(jax.tree.leaves(x)[0])
        features = room((num, *network.example.shape[1:]))
        for first in range(0, num, AT_ONCE):
            block = slice(first, first + AT_ONCE)
            inputs = jax.tree.map(lambda leaf, block=block: np.asarray(leaf[block]), x)
            features[block] = program(network.frozen_on_host, model.converted(inputs))
        return features

    return compute


def room(shape: tuple[int, ...]) -> np.ndarray:
    """An array of zeros in memory, or in a file that is deleted with it if it takes much of the free memory."""
    if 4 * math.prod(shape) <= FILL * free_memory():
        return np.zeros(shape, FLOAT32)
    cache = cache_folder()
    folder = None if cache is None else cache / "features"  # None: where temporary files are
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, FLOAT32, "w+", shape=shape)


class Pool:
    """The pool of pooled examples, of which a slice is read as examples are."""

    def __init__(self, examples: Pooled):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples.pool)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.examples.rows(np.arange(len(self))[rows])


def with_computed(
    federation: Federation, compute: Callable[[PyTree], np.ndarray], stacks: dict[int, Any]
) -> Federation:
    """The clients with features in place of inputs; `stacks` keeps those of pools that several splits share."""

    def compute_split(split: Split) -> Split:
        leaves = jax.tree.leaves(split.x, is_leaf=is_pooled)
        if share_a_pool(leaves):
            pool = leaves[0].pool
            if id(pool) not in stacks:
                pools = jax.tree.map(Pool, split.x, is_leaf=is_pooled)
                stacks[id(pool)] = (pool, compute(pools))
            _, features = stacks[id(pool)]
            return split._replace(x=Pooled(features, leaves[0].index))
        clients, n_max = split.y.shape[:2]
        real = np.arange(n_max) < np.asarray(split.size)[:clients, None]
        examples = jax.tree.map(lambda leaf: np.asarray(leaf)[real], split.x, is_leaf=is_pooled)
        features = compute(examples)
        padded = room((clients, n_max, *features.shape[1:]))
        padded[real] = features
        return split._replace(x=padded)

    splits = {name: compute_split(getattr(federation, name)) for name in SPLITS}
    return dataclasses.replace(federation, **splits, tokens=False)


def share_a_pool(leaves: Sequence[Any]) -> bool:
    """Whether the arrays of examples are all pooled, with the same rows."""
    if not all(map(is_pooled, leaves)):
        return False
    return len({leaf.pool.shape[0] for leaf in leaves}) == 1


def with_placeholders(federation: Federation, shape: tuple[int, ...]) -> Federation:
    """The clients with zeros (*shape) in place of the features of missing examples."""

    def with_zeros(split: Split) -> Split:
        index = np.zeros(split.y.shape[:2], np.int32)
        return split._replace(x=Pooled(np.zeros((1, *shape), FLOAT32), index))

    splits = {name: with_zeros(getattr(federation, name)) for name in SPLITS}
    return dataclasses.replace(federation, **splits, tokens=False)
