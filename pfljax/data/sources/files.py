"""Users' npz and npy files, and what all formats of files share."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.reading import map_npy, read_npy, read_npz
from pfljax.data.sources.arrays import TaskName, make_source
from pfljax.data.sources.source import Fraction, Source, generator, subsample
from pfljax.settings.fields import Seed, checked, hyperparameter

SPLITS = ("train", "test")  # names of files, folders and marks of official splits
Names = str | Sequence[str]  # a list, or separated by commas
Shape = Annotated[Sequence[int], hyperparameter(at_least=1, empty=True)]
NPZ = "an npz file with x and y; client (or writer), coarse, is_test and time are optional"
NPY = "a folder with x.npy and y.npy"
Ignored = Annotated[
    int | None,
    hyperparameter(at_least=-(2**63), at_most=2**64 - 1, accepted="an integer of at most 64 bits"),
]
ARRAYS = ("x", "y", "client", "writer", "coarse", "is_test", "time")


@checked()
def npz(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=NPZ, help=NPZ)],
    *,
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
    ignored_index: Ignored = None,
) -> Source:
    """Reads the examples of an npz file.

    Args:
        file: Path of the file. It contains x (n, *features) numbers, and y (n, ...) numbers or (n,) strings (classes in
            sorted order); optionally client or writer (n,) integers or strings, coarse (n,) integers, is_test (n,)
            booleans, and time (n,) numbers, dates or texts such as 2024-05-31. uint8 values in x are read as pixels
            (divided by 255).
        seed: Seed for the subsample.
        fraction: Fraction of the examples to keep, sampled uniformly.
        standardize: Whether to give x mean 0 and standard deviation 1, per channel for images and per feature
            otherwise. They are measured on the clients' training examples, once these are drawn.
        task: "classification", "regression", "multilabel" for labels 0 or 1 in y (n, C), or "auto": regression if y
            contains floats, multilabel if it is boolean (n, C).
        ignored_index: Class of positions of sequences and images, y (n, ...), that are ignored; negative ones are, too.

    Raises:
        ArgumentError: if file, fraction or task is not accepted.

    Examples:
        >>> import numpy as np
        >>> from pfljax.data import sources
        >>> pixels = np.zeros((4, 8, 8, 1), np.uint8)
        >>> np.savez("images.npz", x=pixels, y=["cat", "dog", "cat", "dog"], client=[0, 0, 1, 1])
        >>> sources.npz("images.npz").class_names
        ('cat', 'dog')
    """
    file = str(file)
    arrays = read_npz(file, ARRAYS[:2], ARRAYS[2:])
    client_name = "client" if "client" in arrays else "writer"
    if client_name in arrays:
        arrays["client"] = arrays.pop(client_name)
    return source_from_file(
        arrays,
        file,
        seed=seed,
        fraction=fraction,
        array_names={"client": client_name},
        standardize=standardize,
        task=task,
        ignored_index=ignored_index,
    )


@checked()
def npy(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=NPY)],
    *,
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
    ignored_index: Ignored = None,
) -> Source:
    """Maps the arrays of a folder, which may be larger than memory: examples are read when their client takes part.

    The other arguments are those of `npz`.

    Args:
        file: Path of the folder, with the arrays of an npz file as x.npy, y.npy and so on; see `npz`. Pixels (uint8)
            and float32 that are not standardized stay in the file; other numbers are converted, and so are in memory.
        fraction: See `npz`. A subsample is in memory.
        standardize: See `npz`. Pixels are scaled in each mini-batch, with the mean and standard deviation of 10,000
            training examples that are spread evenly over the file.

    Raises:
        ArgumentError: if file, fraction or task is not accepted.

    Examples:
        >>> import pathlib
        >>> import numpy as np
        >>> from pfljax.data import sources
        >>> pathlib.Path("large").mkdir()
        >>> np.save("large/x.npy", np.zeros((4, 8, 8, 1), np.uint8))
        >>> np.save("large/y.npy", np.array([0, 1, 0, 1]))
        >>> type(sources.npy("large").x)
        <class 'numpy.memmap'>
    """
    folder = pathlib.Path(file)
    arrays = {"x": map_npy(str(folder / "x.npy")), "y": read_npy(str(folder / "y.npy"))}
    for name in ARRAYS[2:]:
        path = folder / f"{name}.npy"
        if path.exists():
            arrays[name] = read_npy(str(path))
    if "writer" in arrays:
        arrays["client"] = arrays.pop("writer")
    return source_from_file(
        arrays,
        str(file),
        seed=seed,
        fraction=fraction,
        standardize=standardize,
        task=task,
        ignored_index=ignored_index,
    )


def source_from_file(
    arrays: Mapping[str, Any],
    file: str,
    *,
    seed: int,
    fraction: float,
    array_names: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> Source:
    """Makes a `Source` of what was read from a file or folder; its messages name the file and the array.

    Args:
        arrays: See `make_source`.
        file: Path of the file.
        seed: Seed for the subsample.
        fraction: Share of the examples to keep.
        array_names: Names that the file has for arrays.
        **options: Arguments of `make_source`.
    """
    num_examples = len(arrays["x"]) if arrays["x"].ndim else 0
    rows = subsample(generator(seed, "load"), num_examples, fraction)
    try:
        return make_source(arrays, rows, **options, name=pathlib.Path(file).stem)
    except ArgumentError as error:
        if error.argument not in ARRAYS:
            raise
        name = array_names.get(error.argument, error.argument)
        raise ArgumentError("file", f"{name} {error.text}", file) from error


@contextlib.contextmanager
def damaged(
    file: str, text: str, errors: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Raises `ArgumentError` for errors of what reads a file; by default any, since a damaged file can cause any.

    In the text, {kind} and {error} are replaced by the error's type and first line.
    """
    try:
        yield
    except ArgumentError:
        raise
    except errors as error:
        first_line = str(error).partition("\n")[0]
        message = text.format(kind=type(error).__name__, error=first_line)
        raise ArgumentError("file", message, file) from error


def names_in(text: Names) -> list[str]:
    """The names in a list, or in a text with commas."""
    if not isinstance(text, str):
        return list(text)
    return [name.strip() for name in text.split(",") if name.strip()]


def shaped(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Gives examples (n, *features) a shape; () keeps theirs."""
    if not shape:
        return x
    size = math.prod(x.shape[1:])
    if math.prod(shape) != size:
        text = f"examples have {size} numbers; accepted: a shape of as many"
        raise ArgumentError("shape", text, ",".join(map(str, shape)))
    return x.reshape(len(x), *shape)
