"""All clients' data on the host."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import numpy as np
from numpy.typing import ArrayLike

from pfljax.contract import processes, tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.mapped import in_file
from pfljax.contract.pooled import Filed, Pooled, Standardized, is_pooled
from pfljax.contract.types import ClientData, PyTree, Split, Task
from pfljax.data import partitions, preparation
from pfljax.data.dealing import Assignment
from pfljax.data.sources.arrays import TaskName, as_arrays, make_source
from pfljax.data.sources.source import Scaling, Source, generator
from pfljax.data.splits import Splits, make_splits, split_within_clients
from pfljax.settings.fields import NumClients, Seed, checked, hyperparameter

AnyArray = Annotated[ArrayLike, hyperparameter(accepted="an array")]
PARTS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """All clients' data on the host, and information about it.

    Attributes:
        train: The engine's stacked training splits, K clients: padded to the largest client's size with zeros, class 0.
            Read a client's own examples with `examples`.
        validation: The same of the validation splits (n_max may be 0).
        test: The same of the test splits; only evaluation reads them.
        group: (K,) int32, the true group of each client: clients of a group draw their examples from one distribution.
            For colors and reports, never for training. None: unknown. It is known if the source provides it or the
            partition puts clients into groups.
        task: "classification", "regression" or "multilabel".
        num_classes: Number of classes or labels C; 1 for regression.
        name: Data set and partition, for titles.
        target: (K,) int32, the group of each client's validation and test data; None: as `group`.
        own: The clients whose x and y are in this process; None: all. Everything else covers all clients.
        index_digest: A fingerprint of the assignment of examples to clients, independent of their content.
        attacker: (K,) bool, whether each client attacks; None: no client does.
        class_names: Names of classes 0..C-1 if the labels were strings; otherwise empty.
        client_names: (K,) the data set's own ids of the clients, strings or integers; None: their numbers.
        scaling: How models standardize x, which is kept as given, with statistics of the training examples. None: they
            do not.
        official_test: Whether the clients' test examples are the data set's own; None: it has none of its own.
        tokens: Whether uint8 in x are tokens; otherwise they are numbers, such as pixels.
        feature_names: Names of the columns of x if the data set is a table; otherwise empty. `predict` takes tables
            with these columns in any order.
        origin: The function of `pfljax.data` that made it and its arguments, as JSON; None: unknown.
        whole_scaling: Measures `scaling` on the training and validation examples together; None: unknown.
        returned: Whether validation examples were returned to the training part; see `return_validation`.
    """

    train: Split
    validation: Split
    test: Split
    group: np.ndarray | None
    task: Task
    num_classes: int
    name: str
    target: np.ndarray | None = None
    own: slice | None = None
    index_digest: str = ""
    attacker: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    client_names: np.ndarray | None = None
    scaling: Scaling | None = None
    official_test: bool | None = None
    tokens: bool = False
    feature_names: tuple[str, ...] = ()
    origin: dict[str, dict[str, Any]] | None = None
    whole_scaling: Callable[[], Scaling | None] | None = None
    returned: bool = False

    def __post_init__(self):
        for part in PARTS:
            split = getattr(self, part)
            if isinstance(split.size, jax.ShapeDtypeStruct):  # a shape alone, for a plan
                continue
            size = np.asarray(split.size)
            if size.size and not 0 <= size.min() <= size.max() <= split.y.shape[1]:
                text = f"has sizes from {size.min()} to {size.max()}; accepted: 0 to {split.y.shape[1]}, the rows of y"
                raise ArgumentError(part, text)

    @property
    def num_clients(self) -> int:
        return int(self.train.size.shape[0])

    @property
    def inputs(self) -> PyTree:
        """Shape and dtype of an example's x, or of each array in it, for a network: numbers are float32."""

        def one(leaf: Any) -> jax.ShapeDtypeStruct:
            is_number = leaf.dtype.kind == "f" or (leaf.dtype == np.uint8 and not self.tokens)
            return jax.ShapeDtypeStruct(leaf.shape[2:], np.float32 if is_number else leaf.dtype)

        return jax.tree.map(one, self.standardized.train.x, is_leaf=is_pooled)

    @functools.cached_property
    def standardized(self) -> Federation:
        """The same clients as the engine reads them: x is standardized when it is read, and no pool is copied.

        Pixels (uint8) in a file are read as they are, and networks scale them; see `late_scaling`.
        """
        if self.scaling is None:
            return self
        mean, std = self.scaling

        def of_split(split: Split) -> Split:
            size = np.asarray(split.size)[self.own or slice(None)]

            def one(mean: np.ndarray | None, std: np.ndarray | None, x: Any) -> Any:
                if mean is None or std is None or isinstance(x, Standardized):
                    return x
                examples = x if is_pooled(x) else pooled(x, size)
                late = examples.dtype == np.uint8 and in_file(examples.pool)
                return (
                    x if late else Standardized(examples.pool, examples.index, mean=mean, std=std)
                )

            return split._replace(
                x=jax.tree.map(one, mean, std, split.x, is_leaf=lambda leaf: leaf is None)
            )

        return dataclasses.replace(self, **{part: of_split(getattr(self, part)) for part in PARTS})

    @property
    def late_scaling(self) -> Scaling | None:
        """How networks scale pixels (uint8) of `standardized`, which stay so; None: there are none."""

        def is_late(mean: np.ndarray | None, x: Any) -> bool:
            return mean is not None and x.dtype == np.uint8

        if self.scaling is None:
            return None
        late = jax.tree.map(
            is_late, self.scaling.mean, self.standardized.train.x, is_leaf=lambda leaf: leaf is None
        )
        return self.scaling if any(jax.tree.leaves(late)) else None

    def client_number(self, client: int | str) -> int:
        """The number of a client, which is given by its number or its name.

        Raises:
            ArgumentError: if there is no such client.
        """
        num = self.num_clients
        names = self.client_names
        words = [] if names is None or names.dtype.kind not in "UO" else names.tolist()
        if isinstance(client, str) and client in words:
            return words.index(client)
        if (
            not isinstance(client, int | np.integer)
            or isinstance(client, bool)
            or not 0 <= client < num
        ):
            near = difflib.get_close_matches(str(client), words, n=1)
            hint = f"; did you mean {near[0]}?" if near else f" such as {', '.join(words[:3])}"
            raise ArgumentError(
                "client", f"accepted: 0 to {num - 1}{f', or a name{hint}' if words else ''}", client
            )
        return int(client)

    @checked()
    def examples(
        self, client: int | str, part: Literal["train", "validation", "test"] = "test"
    ) -> tuple[PyTree, Any]:
        """Returns one client's examples, without padding, as they were given: `Result.predict` takes this x.

        For example, `x, y = clients.examples("hospital 3")`, and then
        `(result.predict(x, client="hospital 3").argmax(axis=1) == y).mean()` is its test accuracy.

        Args:
            client: The client's number, 0 to K - 1, or its name.
            part: "train", "validation" or "test".

        Returns:
            x (n_k, *features), or a tree of such arrays, not scaled; and y (n_k, ...), classes as numbers. Copies.

        Raises:
            ArgumentError: if there is no such client, or its examples are in another process.
        """
        number = self.client_number(client)
        here = self.own or slice(0, self.num_clients)
        if not here.start <= number < here.stop:
            text = f"its examples are in another process; accepted here: {here.start} to {here.stop - 1}"
            raise ArgumentError("client", text, client)
        split = getattr(self, part)
        size = int(split.size[number])

        def own(leaf: Any) -> np.ndarray:
            return np.array(leaf[number - here.start, :size])

        return jax.tree.map(own, split.x, is_leaf=is_pooled), own(split.y)

    @property
    def client_data(self) -> ClientData:
        """The data that methods may see: everything except the test data."""
        return ClientData(self.train, self.validation, self.attacker)

    def class_counts(self) -> np.ndarray | None:
        """(K, C) int32 training examples per class; None for regression and for sequences, which have no class."""
        y = self.train.y
        size = self.train.size[self.own or slice(None)]
        if self.task != "classification" or y.ndim > 2:
            return None
        client, position = np.nonzero(np.arange(y.shape[1]) < size[:, None])
        cells = client * self.num_classes + y[client, position]
        counts = np.bincount(cells, minlength=len(y) * self.num_classes).reshape(len(y), -1)
        return self.of_all(counts.astype(np.int32))

    def of_all(self, rows: np.ndarray) -> np.ndarray:
        """All clients' rows, from the rows of this process's clients."""
        return rows if len(rows) == self.num_clients else processes.gather_rows(rows)

    @checked()
    def with_attackers(
        self, share: Annotated[float, hyperparameter(at_least=0, below=1)], seed: Seed = 0
    ) -> Federation:
        """The federation with a share of its clients, drawn uniformly, as attackers.

        Attackers have no validation or test examples, so that scores are those of the honest clients.
        """
        attacker = draw_attackers(self.num_clients, share, seed)

        def unscored(split):
            return split._replace(size=np.where(attacker, 0, split.size).astype(np.int32))

        honest = {part: unscored(getattr(self, part)) for part in ("validation", "test")}
        return dataclasses.replace(self, attacker=attacker, **honest)

    def __repr__(self) -> str:
        what = "labels" if self.task == "multilabel" else "classes"
        kind = "regression" if self.task == "regression" else f"{self.num_classes} {what}"
        counts = ((int(getattr(self, part).size.sum()), part) for part in PARTS)
        told = ", ".join(f"{count:,} {part}" for count, part in counts if count)
        tests = {
            None: "",
            True: " (the data set's own)",
            False: " (drawn; the data set's own are not used)",
        }
        told += tests[self.official_test]
        shapes = jax.tree.map(lambda leaf: leaf.shape, self.inputs)
        return f"<{self.name}: {self.num_clients:,} clients, {kind}, x {shapes}; {told}>"

    @classmethod
    @checked(options=[Splits])
    def from_arrays(
        cls,
        x: Annotated[Any, hyperparameter(accepted="an array, or a dict or tuple of arrays")],
        y: AnyArray,
        client: AnyArray | None = None,
        *,
        num_clients: NumClients | None = None,
        partition: partitions.Choice | None = None,
        seed: Seed = 0,
        is_test: AnyArray | None = None,
        num_classes: Annotated[int, hyperparameter(at_least=1)] | None = None,
        task: TaskName = "auto",
        ignored_index: int | None = None,
        standardize: bool = True,
        name: str = "arrays",
        splits: Splits | None = None,
        **options: Any,
    ) -> Federation:
        """Creates a federation from your own examples.

        Arrays may be NumPy's or JAX's, lists of equal lengths, columns and data frames of pandas (whose numbers are
        features: whole numbers become floats), PyTorch's tensors and SciPy's sparse matrices, which become dense.
        Missing values (NaN, masked, None) are refused.

        x is kept as it is given, and models standardize it. Integers, such as tokens, reach the network as integers;
        pixels (uint8) and all other numbers as float32. Pixels that are not standardized stay uint8 on the devices, and
        each mini-batch is converted.

        Args:
            x: (n, *features) numbers; or a dict, tuple or named tuple of such arrays, which the model receives as well.
            y: (n,) targets: integers are classes 0..C-1; strings are classes in sorted order, with their names in
                `class_names` (predictions stay numbers); floats are regression targets (unless `num_classes` is given).
                Or (n, ...): a class for each place of a sequence or image, where negative ones are ignored; several
                numbers to predict; or booleans (n, C), whether each of C labels applies.
            client: (n,) the client of each example, integers or strings. Clients are numbered in sorted order, and
                `client_names` has their ids.
            num_clients: K; None: all clients in `client`, or 16 without it. If `client` has more, K of them are drawn
                uniformly.
            partition: Partition of the examples among clients; None: by `client` if given, otherwise two label groups
                (random for regression).
            seed: Seed for partition and splits.
            is_test: (n,) bool, whether each example is for testing (ignored with `official_test=False`); None:
                `test_fraction` of each client's examples.
            num_classes: Number of classes C, if y may not contain all of them.
            task: "classification", "regression", "multilabel" (y is 0 or 1), or "auto": as y says.
            ignored_index: Class of places of sequences and images that are ignored, too, such as that of padding.
            standardize: Whether to scale each feature (each channel of images) to mean 0 and standard deviation 1,
                measured on the clients' training examples. The model does so: `predict` and all else take x as it is
                given here. Integers other than uint8 may be tokens and are never scaled.
            name: Name for titles.
            splits: Splits of each client's examples.
            **options: Fields of `Splits` that override those of `splits`.

        Raises:
            ArgumentError: for an invalid argument.
        """
        if (
            is_test is not None
            and "test_fraction" in options
            and not {"official_test", "replacement"} & options.keys()
        ):
            raise ArgumentError(
                "test_fraction", "is_test says which examples are for testing; name one of the two"
            )
        splits = make_splits(splits, options, official_test=is_test is not None)
        given = as_arrays(x, y=y, client=client, is_test=is_test)
        task = "classification" if num_classes is not None and task == "auto" else task
        options = {
            "ignored_index": ignored_index,
            "num_classes": num_classes,
            "standardize": standardize,
            "name": name,
        }
        source = make_source(given, task=task, images=False, **options)
        found = load(source, partition, splits, num_clients=num_clients, seed=seed)
        columns = getattr(x, "columns", None)
        return (
            found
            if columns is None
            else dataclasses.replace(found, feature_names=tuple(map(str, columns)))
        )


def pooled(examples: np.ndarray, size: np.ndarray) -> Pooled:
    """Stacked examples (K, n_max, *features), of which each client has `size` (K,), as a pool and an index."""
    num_clients, n_max = examples.shape[:2]
    places = np.arange(num_clients * n_max, dtype=np.int32).reshape(num_clients, n_max)
    index = np.where(np.arange(n_max) < size[:, None], places, -1)
    return Pooled(examples.reshape(-1, *examples.shape[2:]), index.astype(np.int32))


def draw_attackers(num_clients: int, share: float, seed: int) -> np.ndarray:
    """(K,) bool: a share of the clients as attackers, drawn uniformly."""
    attacker = np.zeros(num_clients, bool)
    attacker[
        generator(seed, "attackers").choice(num_clients, round(share * num_clients), replace=False)
    ] = True
    return attacker


@checked()
def load(
    source: Source,
    partition: partitions.Choice | None = None,
    splits: Splits | None = None,
    *,
    num_clients: NumClients | None = None,
    seed: Seed = 0,
    own: Callable[[int], slice] | None = None,
) -> Federation:
    """Partitions the examples of a source among clients, splits each client's examples and stacks them.

    Args:
        source: The examples.
        partition: Partition of the examples among clients; None: natural if the examples have clients, otherwise two
            label groups (random for regression).
        splits: Splits of each client's examples; None: a fifth of them for testing.
        num_clients: K; None: all clients of a natural partition, otherwise 16.
        seed: Seed for partition and splits.
        own: K -> the clients whose examples this process needs; None: all.

    Raises:
        ArgumentError: for an invalid argument.
    """
    splits = splits or Splits()
    partition = partition or partitions.default(source)
    assignment = partitions.assign(
        source, partition, num_clients=num_clients, splits=splits, seed=seed
    )
    federation = pack(
        source, assignment, splits, seed=seed, own=own if splits.targets == "own" else None
    )
    official = None if source.is_test is None else splits.official_test
    federation = dataclasses.replace(
        federation,
        name=f"{source.name}, {partition.name}",
        official_test=official,
        class_names=source.class_names,
    )
    if splits.targets == "own":
        return federation
    federation = shuffle_targets(federation, seed)  # needs all clients
    return keep_own(federation, own(federation.num_clients)) if own else federation


@checked()
def pack(
    source: Source,
    assignment: Assignment,
    splits: Splits | None = None,
    *,
    seed: Seed = 0,
    own: Callable[[int], slice] | None = None,
) -> Federation:
    """Splits each client's examples into parts and indexes them; see `Pooled`. Packs the clients own(K); None: all.

    Examples that take no more memory than an index, such as classes, are copied for each client and padded with zeros.
    Raises `ArgumentError` if a client lacks official training or test examples.
    """
    num_clients = len(assignment.indices)
    here = own(num_clients) if own else slice(0, num_clients)
    index = hashlib.sha256()

    parts = split_within_clients(assignment, splits or Splits(), seed)
    # All processes measure all clients' training examples, so that they prepare theirs alike.
    trained_on = np.unique(parts["train"][0])
    prepare = preparation.fit(source, trained_on)
    whole = np.union1d(trained_on, parts["validation"][0])

    def is_here(owner):
        return (owner >= here.start) & (owner < here.stop)

    ids = np.concatenate([ids[is_here(owner)] for ids, owner in parts.values()])
    pools, place_of = _pools(source, ids, prepare)

    def stack(ids: np.ndarray, owner: np.ndarray) -> Split:
        count = np.bincount(owner, minlength=num_clients)
        for part in (ids.astype(np.int64), count, source.y[ids]):
            index.update(np.ascontiguousarray(part).data)
        rank = np.arange(len(ids)) - (np.cumsum(count) - count)[owner]
        places = np.full((num_clients, count.max()), -1, np.int32)
        places[owner, rank] = place_of[ids]
        x, y = jax.tree.map(lambda pool: _stacked(pool, places[here]), pools)
        return Split(x, y, count.astype(np.int32))

    return Federation(
        train=stack(*parts["train"]),
        validation=stack(*parts["validation"]),
        test=stack(*parts["test"]),
        group=assignment.group,
        task=source.task,
        num_classes=source.num_classes,
        name=source.name,
        client_names=assignment.names,
        scaling=prepare.scaling,
        whole_scaling=functools.partial(
            preparation.scaling, source, whole, prepare.fill, prepare.kept
        ),
        tokens=source.tokens,
        feature_names=prepare.names(source.features),
        own=here if own else None,
        index_digest=index.hexdigest()[:12],
    )


def _pools(
    source: Source, ids: np.ndarray, prepare: preparation.Preparation
) -> tuple[tuple[PyTree, np.ndarray], np.ndarray]:
    """Pools of x, complete, and y for examples `ids`, and the position of each example in them.

    They have all examples of the source, unless less than half of these are used and x does not stay in a file.
    """
    used = np.bincount(ids, minlength=len(source.y)) > 0
    if 2 * used.sum() >= len(used) or any(in_file(leaf) for leaf in jax.tree.leaves(source.x)):
        return (prepare(source.x), source.y), np.arange(len(used))
    rows = np.flatnonzero(used)
    return (prepare(source.x, rows), source.y[rows]), np.cumsum(used) - 1


def _stacked(pool: np.ndarray, index: np.ndarray) -> Pooled | np.ndarray:
    """Pooled examples, or copies if an example takes no more memory than its index entry."""
    examples = (Pooled if isinstance(pool, np.ndarray) else Filed)(pool, index)
    return examples if pool.itemsize * math.prod(pool.shape[1:]) > index.itemsize else examples[...]


def keep_own(federation: Federation, own: slice) -> Federation:
    """The federation with only this process's examples, those of clients `own`."""
    splits = {part: getattr(federation, part) for part in PARTS}

    def of_own(examples):
        return tree.map_rows(lambda leaf: leaf[own], examples)

    kept = {
        part: split._replace(x=of_own(split.x), y=of_own(split.y)) for part, split in splits.items()
    }
    return dataclasses.replace(federation, own=own, **kept)


def shuffle_targets(federation: Federation, seed: int) -> Federation:
    """Permutes (validation, test) pairs among clients: out-of-local-distribution targets (FedFomo, Section 4).

    By chance, a client may keep its own pair or get one from its own group.
    """
    order = generator(seed, "targets").permutation(federation.num_clients)

    def deal(split):
        return tree.map_rows(lambda leaf: leaf[order], split)

    dealt = {part: deal(getattr(federation, part)) for part in ("validation", "test")}
    target = None if federation.group is None else federation.group[order]
    name = f"{federation.name}, shuffled targets"
    return dataclasses.replace(dataclasses.replace(federation, **dealt), target=target, name=name)
