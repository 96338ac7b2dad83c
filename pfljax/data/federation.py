"""All clients' data on the host."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from pfljax.contract import processes, tree
from pfljax.contract.errors import ArgumentError, warn_former
from pfljax.contract.mapped import in_file
from pfljax.contract.pooled import Filed, Pooled, Standardized, is_pooled
from pfljax.contract.types import ClientData, PyTree, Split, Task
from pfljax.data import partitions, preparation
from pfljax.data.dealing import Assignment
from pfljax.data.former import renamed_arguments
from pfljax.data.sources.arrays import TaskName, as_arrays, make_source
from pfljax.data.sources.source import Scaling, Source, generator
from pfljax.data.sources.torch_data import is_torch_data, read_torch
from pfljax.data.splits import Splits, make_splits, split_within_clients
from pfljax.settings.fields import NumClients, Seed, checked, hyperparameter

AnyArray = Annotated[ArrayLike, hyperparameter(accepted="an array")]
SPLITS = ("train", "validation", "test")
# Former name of an attribute -> its present name
FORMER = {
    "own": "local_clients",
    "of_all": "gather_rows",
    "returned": "validation_returned",
}
# What `repr` says about official test examples
TEST_SPLITS = {
    None: "",
    True: " (the data set's own)",
    False: " (drawn; the data set's own are not used)",
}


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
        local_clients: The clients whose x and y are in this process; None: all. Everything else covers all clients.
        index_digest: A fingerprint of the assignment of examples to clients, independent of their content.
        attacker: (K,) bool, whether each client attacks; None: no client does.
        class_names: Names of classes 0..C-1 if the labels were strings; otherwise empty.
        client_names: (K,) the data set's own ids of the clients, strings or integers; None: their numbers.
        scaling: How models standardize x, with statistics of the training examples; x itself is not scaled. None: they
            do not.
        official_test: Whether the clients' test examples are the data set's own; None: it has none of its own.
        tokens: Whether uint8 in x are tokens; otherwise they are numbers, such as pixels.
        feature_names: Names of the columns of x if the data set is a table; otherwise empty. `predict` takes tables
            with these columns in any order.
        origin: The function of `pfljax.data` that made it and its arguments, as JSON; None: unknown.
        whole_scaling: Measures `scaling` on the training and validation examples together; None: unknown.
        validation_returned: Whether validation examples were moved to the training split; see `return_validation`.
        recorded_digest: Fingerprint of the examples if x and y are placeholders, as a run's folder records its clients
            without their examples. None: the examples are here.

    Examples:
        >>> import numpy as np
        >>> import pfljax as pfl
        >>> x = np.arange(12.0).reshape(6, 2)
        >>> y = np.array([0, 1, 0, 1, 0, 1])
        >>> clients = pfl.Federation.from_arrays(x, y, client=["a", "a", "a", "b", "b", "b"])
        >>> clients
        <arrays, natural: 2 clients, 2 classes, x (2,); 4 train, 2 test>
        >>> clients.train.size.tolist()
        [2, 2]
        >>> clients.client_names.tolist()
        ['a', 'b']
    """

    train: Split
    validation: Split
    test: Split
    group: np.ndarray | None
    task: Task
    num_classes: int
    name: str
    target: np.ndarray | None = None
    local_clients: slice | None = None
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
    validation_returned: bool = False
    recorded_digest: str | None = None

    def __post_init__(self):
        for name in SPLITS:
            split = getattr(self, name)
            # For a plan, there are only shapes.
            if isinstance(split.size, jax.ShapeDtypeStruct):
                continue
            size = np.asarray(split.size)
            capacity = split.y.shape[1]
            if size.size and not 0 <= size.min() <= size.max() <= capacity:
                text = f"has sizes from {size.min()} to {size.max()}"
                raise ArgumentError(name, f"{text}; accepted: 0 to {capacity}, the rows of y")

    def __getattr__(self, name: str) -> Any:
        if name not in FORMER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_former(f"Federation.{name}", FORMER[name])
        return getattr(self, FORMER[name])

    @property
    def num_clients(self) -> int:
        """K, the number of clients in all processes."""
        return int(self.train.size.shape[0])

    @property
    def local_rows(self) -> slice:
        """The rows of all clients' arrays that are those of the clients in this process."""
        return self.local_clients or slice(0, self.num_clients)

    @property
    def inputs(self) -> PyTree:
        """Shape and dtype of an example's x, or of each array in it, for a network: numbers are float32."""

        def input_of_network(leaf: Any) -> jax.ShapeDtypeStruct:
            is_pixels = leaf.dtype == np.uint8 and not self.tokens
            is_number = leaf.dtype.kind == "f" or is_pixels
            dtype = np.float32 if is_number else leaf.dtype
            return jax.ShapeDtypeStruct(leaf.shape[2:], dtype)

        return jax.tree.map(input_of_network, self.standardized.train.x, is_leaf=is_pooled)

    @functools.cached_property
    def standardized(self) -> Federation:
        """The same clients as the engine reads them: x is standardized when it is read, and no pool is copied.

        Pixels (uint8) in a file are read as they are, and networks scale them; see `late_scaling`.
        """
        if self.scaling is None:
            return self
        splits = {}
        for name in SPLITS:
            split = getattr(self, name)
            size = np.asarray(split.size)[self.local_rows]
            splits[name] = split._replace(x=_standardized(split.x, size, self.scaling))
        return dataclasses.replace(self, **splits)

    @property
    def late_scaling(self) -> Scaling | None:
        """How networks scale pixels (uint8) of `standardized`, which stay so; None: there are none."""
        if self.scaling is None:
            return None

        def is_late(mean: np.ndarray | None, x: Any) -> bool:
            return mean is not None and x.dtype == np.uint8

        x = self.standardized.train.x
        late = jax.tree.map(is_late, self.scaling.mean, x, is_leaf=_is_none)
        return self.scaling if any(jax.tree.leaves(late)) else None

    def client_number(self, client: int | str) -> int:
        """The number of a client, which is given by its number or its name.

        Names that are integers are passed as strings, since they are not the clients' numbers 0 to K - 1.

        Raises:
            ArgumentError: if there is no such client, or an integer is the number of one and the name of another.

        Examples:
            >>> import pfljax as pfl
            >>> x = [[0.0], [1.0], [2.0], [3.0]]
            >>> clients = pfl.Federation.from_arrays(x, [0, 1, 1, 0], ["east", "east", "west", "west"])
            >>> clients.client_number("west")
            1
        """
        names: list[str] = []
        if self.client_names is not None:
            names = self.client_names.astype(str).tolist()
        if isinstance(client, str) and client in names:
            return names.index(client)
        is_integer = isinstance(client, int | np.integer) and not isinstance(client, bool)
        number = int(client) if is_integer else -1
        named = names.index(str(number)) if is_integer and str(number) in names else number
        if named != number and number < self.num_clients:
            text = f"is the number of one client and the name of client number {named}"
            raise ArgumentError("client", f"{text}; pass the name, {str(number)!r}", client)
        if 0 <= number < self.num_clients:
            return number
        accepted = f"accepted: 0 to {self.num_clients - 1}"
        raise ArgumentError("client", accepted + _hint_at_name(client, names), client)

    @renamed_arguments(part="split")
    @checked()
    def examples(
        self, client: int | str, split: Literal["train", "validation", "test"] = "test"
    ) -> tuple[PyTree, Any]:
        """Returns one client's examples, without padding, as they were given: `Result.predict` takes this x.

        For example, `x, y = clients.examples("hospital 3")`, and then
        `(result.predict(x, client="hospital 3").argmax(axis=1) == y).mean()` is its test accuracy.

        Args:
            client: The client's number, 0 to K - 1, or its name.
            split: "train", "validation" or "test".

        Returns:
            x (n_k, *features), or a tree of such arrays, not scaled; and y (n_k, ...), classes as numbers. Copies.

        Raises:
            ArgumentError: if there is no such client, or its examples are in another process.

        Examples:
            >>> import pfljax as pfl
            >>> clients = pfl.data.digits(num_clients=4)
            >>> x, y = clients.examples(3, "train")
            >>> x.shape[1:]
            (8, 8, 1)
            >>> bool(len(y) == clients.train.size[3])
            True
        """
        number = self.client_number(client)
        if self.recorded_digest is not None:
            raise ArgumentError("clients", "were loaded without their examples")
        local = self.local_rows
        if not local.start <= number < local.stop:
            accepted = f"accepted here: {local.start} to {local.stop - 1}"
            raise ArgumentError(
                "client", f"its examples are in another process; {accepted}", client
            )
        stacked: Split = getattr(self, split)
        size = int(stacked.size[number])
        row = number - local.start

        def client_rows(leaf: Any) -> np.ndarray:
            return np.array(leaf[row, :size])

        x = jax.tree.map(client_rows, stacked.x, is_leaf=is_pooled)
        return x, client_rows(stacked.y)

    @property
    def client_data(self) -> ClientData:
        """The data that methods may see: everything except the test data."""
        return ClientData(self.train, self.validation, self.attacker)

    def class_counts(self, split: str = "train") -> np.ndarray | None:
        """(K, C) int32 examples of a split per class; None for regression and for sequences, which have no class.

        Examples:
            >>> import pfljax as pfl
            >>> x = [[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]]
            >>> is_test = [False, False, True, False, False, True]
            >>> clients = pfl.Federation.from_arrays(x, [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], is_test=is_test)
            >>> clients.class_counts().tolist()
            [[2, 0], [0, 2]]
        """
        stacked: Split = getattr(self, split)
        y = stacked.y
        if self.task != "classification" or y.ndim > 2:
            return None
        size = stacked.size[self.local_rows]
        is_example = np.arange(y.shape[1]) < size[:, None]
        client, position = np.nonzero(is_example)
        cells = client * self.num_classes + y[client, position]
        counts = np.bincount(cells, minlength=len(y) * self.num_classes)
        counts = counts.reshape(len(y), -1).astype(np.int32)
        return self.gather_rows(counts)

    def gather_rows(self, rows: np.ndarray) -> np.ndarray:
        """All clients' rows (K, ...), from the rows of this process's clients."""
        if len(rows) == self.num_clients:
            return rows
        return processes.gather_rows(rows)

    @checked()
    def with_attackers(
        self, share: Annotated[float, hyperparameter(at_least=0, below=1)], seed: Seed = 0
    ) -> Federation:
        """The federation with a share of its clients, drawn uniformly, as attackers.

        Attackers have no validation or test examples, so that scores are those of the honest clients.

        Args:
            share: Share of the clients that attack.
            seed: Seed that draws them.

        Examples:
            >>> import pfljax as pfl
            >>> attacked = pfl.data.digits(num_clients=10).with_attackers(0.2)
            >>> int(attacked.attacker.sum())
            2
            >>> attacked.test.size[attacked.attacker].tolist()
            [0, 0]
        """
        attacker = draw_attackers(self.num_clients, share, seed)

        def without_attackers(split: Split) -> Split:
            size = np.where(attacker, 0, split.size)
            return split._replace(size=size.astype(np.int32))

        return dataclasses.replace(
            self,
            attacker=attacker,
            validation=without_attackers(self.validation),
            test=without_attackers(self.test),
        )

    def __repr__(self) -> str:
        task = "regression"
        if self.task != "regression":
            outputs = "labels" if self.task == "multilabel" else "classes"
            task = f"{self.num_classes} {outputs}"
        counts = []
        for name in SPLITS:
            count = int(getattr(self, name).size.sum())
            if count:
                counts.append(f"{count:,} {name}")
        shapes = jax.tree.map(lambda leaf: leaf.shape, self.inputs)
        sizes = ", ".join(counts) + TEST_SPLITS[self.official_test]
        return f"<{self.name}: {self.num_clients:,} clients, {task}, x {shapes}; {sizes}>"

    @classmethod
    @checked(options=[Splits])
    def from_arrays(
        cls,
        x: Annotated[Any, hyperparameter(accepted="an array, or a dict or tuple of arrays")],
        y: AnyArray | None = None,
        client: AnyArray | None = None,
        *,
        num_clients: NumClients | None = None,
        partition: partitions.Choice | None = None,
        seed: Seed = 0,
        is_test: AnyArray | None = None,
        time: AnyArray | None = None,
        num_classes: Annotated[int, hyperparameter(at_least=1)] | None = None,
        task: TaskName = "auto",
        ignored_index: int | None = None,
        standardize: bool = True,
        channels_first: bool | None = None,
        name: str = "arrays",
        splits: Splits | None = None,
        **options: Any,
    ) -> Federation:
        """Creates a federation from your own examples.

        Arrays may be NumPy's or JAX's, lists of equal lengths, columns and data frames of pandas (whose numbers are
        features: whole numbers become floats), PyTorch's tensors and SciPy's sparse matrices, which become dense.
        Missing values (NaN, masked, None) are refused.

        x is not scaled here: models standardize it. Integers, such as tokens, reach the network as integers;
        pixels (uint8) and all other numbers as float32. Pixels that are not standardized stay uint8 on the devices, and
        each mini-batch is converted.

        Args:
            x: (n, *features) numbers; or a dict, tuple or named tuple of such arrays, which the model receives as well.
                Or, without y, a Dataset or DataLoader of PyTorch with pairs (x, y), all of which are read once; or a
                list or dict with one of these, or a pair of them to train and to test on, for each client.
            y: (n,) targets: integers are classes 0..C-1; strings are classes in sorted order, with their names in
                `class_names` (predictions stay numbers); floats are regression targets (unless `num_classes` is given).
                Or (n, ...): a class for each position of a sequence or image, where negative ones are ignored; several
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
            time: (n,) when each example was taken, for `partitions.Time` and `by_time`: numbers, dates, or texts such
                as "2024-05-31" or "2024-05-31T12:00".
            num_classes: Number of classes C, if y may not contain all of them.
            task: "classification", "regression", "multilabel" (y is 0 or 1), or "auto": as y says.
            ignored_index: Class of positions of sequences and images that are ignored, too, such as that of padding.
            standardize: Whether to scale each feature (each channel of images) to mean 0 and standard deviation 1,
                measured on the clients' training examples. The model does so: `predict` and all else take x as it is
                given here. Integers other than uint8 may be tokens and are never scaled.
            channels_first: Whether images are (n, channels, height, width), as PyTorch's networks take them. None: if
                they come from PyTorch's data sets.
            name: Name for titles.
            splits: Splits of each client's examples.
            **options: Fields of `Splits` that override those of `splits`.

        Raises:
            ArgumentError: for an invalid argument.

        Examples:
            Clients are named by their ids:

            >>> import numpy as np
            >>> import pfljax as pfl
            >>> rng = np.random.default_rng(0)
            >>> x = rng.normal(size=(60, 4))
            >>> y = np.where(x[:, 0] > 0, "high", "low")
            >>> sensor = np.repeat(["north", "south", "west"], 20)
            >>> clients = pfl.Federation.from_arrays(x, y, client=sensor, validation_fraction=0.25)
            >>> clients
            <arrays, natural: 3 clients, 2 classes, x (4,); 36 train, 12 validation, 12 test>
            >>> clients.class_names
            ('high', 'low')

            Without clients, a partition assigns the examples:

            >>> partition = pfl.partitions.IID()
            >>> pfl.Federation.from_arrays(x, y, num_clients=5, partition=partition).num_clients
            5
        """
        if is_torch_data(x):
            if y is not None:
                raise ArgumentError(
                    "y", "accepted with arrays; x is a data set with targets of its own"
                )
            if channels_first is None:
                channels_first = True
            read = read_torch(x)
            x = read.x
            y = read.y
            if read.client is not None and client is not None:
                text = "accepted with one data set; x has one for each client"
                raise ArgumentError("client", text)
            if read.is_test is not None and is_test is not None:
                text = "accepted with one data set for each client; x has one of test examples, too"
                raise ArgumentError("is_test", text)
            client = read.client if read.client is not None else client
            is_test = read.is_test if read.is_test is not None else is_test
        names_test_split = {"official_test", "replacement"} & options.keys()
        if is_test is not None and "test_fraction" in options and not names_test_split:
            text = "is_test says which examples are for testing; name one of the two"
            raise ArgumentError("test_fraction", text)
        splits = make_splits(splits, options, official_test=is_test is not None)
        if y is None:
            raise ArgumentError("y", "is missing; accepted: the targets of the examples in x")
        if num_classes is not None and task == "auto":
            task = "classification"
        source = make_source(
            as_arrays(x, y=y, client=client, is_test=is_test, time=time),
            num_classes=num_classes,
            task=task,
            ignored_index=ignored_index,
            images=False,
            standardize=standardize,
            channels_first=bool(channels_first),
            name=name,
        )
        federation = load(source, partition, splits, num_clients=num_clients, seed=seed)
        columns = getattr(x, "columns", None)
        if columns is None:
            return federation
        return dataclasses.replace(federation, feature_names=tuple(map(str, columns)))


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _hint_at_name(client: Any, names: list[str]) -> str:
    """The end of the message for an unknown client, which says what names there are."""
    if not names:
        return ""
    if str(client) in names:
        return f", or the name {str(client)!r}, a string"
    similar = difflib.get_close_matches(str(client), names, n=1) if isinstance(client, str) else []
    if similar:
        return f", or a name; did you mean {similar[0]}?"
    return f", or a name such as {', '.join(names[:3])}"


def _standardized(x: PyTree, size: np.ndarray, scaling: Scaling) -> PyTree:
    """Stacked examples that are standardized when they are read.

    Args:
        x: Examples (K, n_max, *features), or a tree of them.
        size: (K,) numbers of examples.
        scaling: Statistics of x. Arrays without them stay as they are, and so do pixels in a file.
    """

    def scaled(mean: np.ndarray | None, std: np.ndarray | None, leaf: Any) -> Any:
        if mean is None or std is None or isinstance(leaf, Standardized):
            return leaf
        examples = leaf if is_pooled(leaf) else pooled(leaf, size)
        if examples.dtype == np.uint8 and in_file(examples.pool):
            return leaf
        return Standardized(examples.pool, examples.index, mean=mean, std=std)

    return jax.tree.map(scaled, scaling.mean, scaling.std, x, is_leaf=_is_none)


def pooled(examples: np.ndarray, size: np.ndarray) -> Pooled:
    """Stacked examples (K, n_max, *features), of which each client has `size` (K,), as a pool and an index."""
    num_clients, n_max = examples.shape[:2]
    positions = np.arange(num_clients * n_max, dtype=np.int32).reshape(num_clients, n_max)
    is_example = np.arange(n_max) < size[:, None]
    index = np.where(is_example, positions, -1)
    pool = examples.reshape(-1, *examples.shape[2:])
    return Pooled(pool, index.astype(np.int32))


def draw_attackers(num_clients: int, share: float, seed: int) -> np.ndarray:
    """(K,) bool: a share of the clients as attackers, drawn uniformly."""
    rng = generator(seed, "attackers")
    drawn = rng.choice(num_clients, round(share * num_clients), replace=False)
    attacker = np.zeros(num_clients, bool)
    attacker[drawn] = True
    return attacker


@renamed_arguments(own="local_clients")
@checked()
def load(
    source: Source,
    partition: partitions.Choice | None = None,
    splits: Splits | None = None,
    *,
    num_clients: NumClients | None = None,
    seed: Seed = 0,
    local_clients: Callable[[int], slice] | None = None,
) -> Federation:
    """Partitions the examples of a source among clients, splits each client's examples and stacks them.

    Args:
        source: The examples.
        partition: Partition of the examples among clients; None: natural if the examples have clients, otherwise two
            label groups (random for regression).
        splits: Splits of each client's examples; None: a fifth of them for testing.
        num_clients: K; None: all clients of a natural partition, otherwise 16.
        seed: Seed for partition and splits.
        local_clients: K -> the clients whose examples this process needs; None: all.

    Raises:
        ArgumentError: for an invalid argument.

    Examples:
        >>> from pfljax import data
        >>> source = data.sources.digits(fraction=0.5)
        >>> data.load(source, data.partitions.Dirichlet(alpha=0.5), num_clients=8)
        <digits, dirichlet: 8 clients, 10 classes, x (8, 8, 1); 719 train, 179 test>
    """
    splits = splits or Splits()
    partition = partition or partitions.default(source)
    assignment = partitions.assign(
        source, partition, num_clients=num_clients, splits=splits, seed=seed
    )
    # Shuffled targets come from all clients, and so are packed with all of them.
    is_shuffled = splits.targets != "own"
    federation = pack(
        source,
        assignment,
        splits,
        seed=seed,
        local_clients=None if is_shuffled else local_clients,
    )
    federation = dataclasses.replace(
        federation,
        name=f"{source.name}, {partition.name}",
        official_test=None if source.is_test is None else splits.official_test,
        class_names=source.class_names,
    )
    if not is_shuffled:
        return federation
    federation = shuffle_targets(federation, seed)
    if local_clients is None:
        return federation
    return keep_clients(federation, local_clients(federation.num_clients))


@checked()
def pack(
    source: Source,
    assignment: Assignment,
    splits: Splits | None = None,
    *,
    seed: Seed = 0,
    local_clients: Callable[[int], slice] | None = None,
) -> Federation:
    """Splits each client's examples and indexes them; see `Pooled`.

    Examples that take no more memory than an index, such as classes, are copied for each client and padded with zeros.

    Args:
        source: The examples.
        assignment: The examples of each client.
        splits: Splits of each client's examples; None: a fifth of them for testing.
        seed: Seed for the splits.
        local_clients: K -> the clients whose examples this process needs; None: all.

    Raises:
        ArgumentError: if a client lacks official training or test examples.
    """
    num_clients = len(assignment.indices)
    local = slice(0, num_clients) if local_clients is None else local_clients(num_clients)
    assigned = split_within_clients(assignment, splits or Splits(), seed, source.time)

    # All processes measure all clients' training examples, so that they prepare theirs alike.
    train_ids = np.unique(assigned["train"].ids)
    prepare = preparation.fit(source, train_ids)
    train_and_validation = np.union1d(train_ids, assigned["validation"].ids)
    whole_scaling = functools.partial(
        preparation.scaling, source, train_and_validation, prepare.fill, prepare.columns
    )

    # Pools have the examples of this process's clients.
    local_ids = [
        ids[(owner >= local.start) & (owner < local.stop)] for ids, owner in assigned.values()
    ]
    pools = _pools(source, np.concatenate(local_ids), prepare)

    digest = hashlib.sha256()
    stacked = {}
    for name, (ids, owner) in assigned.items():
        count = np.bincount(owner, minlength=num_clients)
        for array in (ids.astype(np.int64), count, source.y[ids]):
            digest.update(np.ascontiguousarray(array).data)
        rank = np.arange(len(ids)) - (np.cumsum(count) - count)[owner]
        index = np.full((num_clients, count.max()), -1, np.int32)
        index[owner, rank] = pools.position[ids]
        local_index = index[local]
        x = jax.tree.map(functools.partial(_stacked, index=local_index), pools.x)
        y = _stacked(pools.y, local_index)
        stacked[name] = Split(x, y, count.astype(np.int32))

    return Federation(
        train=stacked["train"],
        validation=stacked["validation"],
        test=stacked["test"],
        group=assignment.group,
        task=source.task,
        num_classes=source.num_classes,
        name=source.name,
        client_names=assignment.names,
        scaling=prepare.scaling,
        whole_scaling=whole_scaling,
        tokens=source.tokens,
        feature_names=prepare.names(source.features),
        local_clients=None if local_clients is None else local,
        index_digest=digest.hexdigest()[:12],
    )


class Pools(NamedTuple):
    """The examples that clients index.

    Attributes:
        x: (P, *features), or a tree of such arrays, complete but not scaled.
        y: (P, ...) targets.
        position: (n,) position of each of the source's examples in the pool.
    """

    x: PyTree
    y: np.ndarray
    position: np.ndarray


def _pools(source: Source, ids: np.ndarray, prepare: preparation.Preparation) -> Pools:
    """Pools of the examples `ids`.

    They have all examples of the source, unless less than half of these are used and x does not stay in a file.
    """
    num_examples = len(source.y)
    is_used = np.bincount(ids, minlength=num_examples) > 0
    stays_in_file = any(in_file(leaf) for leaf in jax.tree.leaves(source.x))
    if stays_in_file or 2 * is_used.sum() >= num_examples:
        return Pools(prepare(source.x), source.y, np.arange(num_examples))
    rows = np.flatnonzero(is_used)
    return Pools(prepare(source.x, rows), source.y[rows], np.cumsum(is_used) - 1)


def _stacked(pool: Any, index: np.ndarray) -> Pooled | np.ndarray:
    """Pooled examples, or copies if an example takes no more memory than its index entry."""
    pool_type = Pooled if isinstance(pool, np.ndarray) else Filed
    examples = pool_type(pool, index)
    example_bytes = pool.itemsize * math.prod(pool.shape[1:])
    return examples if example_bytes > index.itemsize else examples[...]


def keep_clients(federation: Federation, clients: slice) -> Federation:
    """The federation with only the examples of this process's `clients`; everything else covers all clients.

    Examples:
        >>> from pfljax import data
        >>> federation = data.digits(num_clients=4)
        >>> local = data.keep_clients(federation, slice(2, 4))
        >>> local.num_clients, local.train.y.shape[0]
        (4, 2)
    """

    def rows(leaf: Any) -> Any:
        return leaf[clients]

    splits = {}
    for name in SPLITS:
        split = getattr(federation, name)
        x = tree.map_rows(rows, split.x)
        y = tree.map_rows(rows, split.y)
        splits[name] = split._replace(x=x, y=y)
    return dataclasses.replace(federation, local_clients=clients, **splits)


def shuffle_targets(federation: Federation, seed: int) -> Federation:
    """Permutes (validation, test) pairs among clients: out-of-local-distribution targets (FedFomo, Section 4).

    By chance, a client may keep its own pair or get one from its own group.

    Examples:
        >>> from pfljax import data
        >>> federation = data.digits(num_clients=4)
        >>> shuffled = data.shuffle_targets(federation, seed=1)
        >>> sorted(shuffled.test.size) == sorted(federation.test.size)
        True
        >>> shuffled.target.tolist() == federation.group.tolist()
        False
    """
    order = generator(seed, "targets").permutation(federation.num_clients)

    def permuted(leaf: Any) -> Any:
        return leaf[order]

    return dataclasses.replace(
        federation,
        validation=tree.map_rows(permuted, federation.validation),
        test=tree.map_rows(permuted, federation.test),
        target=None if federation.group is None else federation.group[order],
        name=f"{federation.name}, shuffled targets",
    )
