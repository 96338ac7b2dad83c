"""Users' own npz files, and what all kinds of files share."""

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

PARTS = ("train", "test")  # names of files, folders and marks of official parts
Names = str | Sequence[str]  # a list, or separated by commas
Shape = Annotated[Sequence[int], hyperparameter(at_least=1, empty=True)]
NPZ = "an npz file with x and y; client (or writer), coarse and is_test are optional"
NPY = "a folder with x.npy and y.npy"
Ignored = Annotated[int | None, hyperparameter(at_least=-(2**63), at_most=2**64 - 1)]
ARRAYS = ("x", "y", "client", "writer", "coarse", "is_test")


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
            sorted order); optionally client or writer (n,) integers or strings, coarse (n,) integers, and is_test (n,)
            booleans. uint8 values in x are read as pixels (divided by 255).
        seed: Seed for the subsample.
        fraction: Fraction of the examples to keep, sampled uniformly.
        standardize: Whether to give x mean 0 and standard deviation 1, per channel for images and per feature
            otherwise. They are measured on the clients' training examples, once these are drawn.
        task: "classification", "regression", "multilabel" for labels 0 or 1 in y (n, C), or "auto": regression if y
            contains floats, multilabel if it is boolean (n, C).
        ignored_index: Class of places of sequences and images, y (n, ...), that are ignored; negative ones are, too.

    Raises:
        ArgumentError: if file, fraction or task is not accepted.
    """
    file = str(file)
    arrays = read_npz(file, ARRAYS[:2], ARRAYS[2:])
    clients = "client" if "client" in arrays else "writer"
    if clients in arrays:
        arrays["client"] = arrays.pop(clients)
    options: Any = {"task": task, "ignored_index": ignored_index, "standardize": standardize}
    return of_file(
        arrays, file, seed=seed, fraction=fraction, called={"client": clients}, **options
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
    """
    folder = pathlib.Path(file)
    arrays = {"x": map_npy(str(folder / "x.npy")), "y": read_npy(str(folder / "y.npy"))}
    paths = {name: folder / f"{name}.npy" for name in ARRAYS[2:]}
    arrays |= {name: read_npy(str(path)) for name, path in paths.items() if path.exists()}
    if "writer" in arrays:
        arrays["client"] = arrays.pop("writer")
    options: Any = {"task": task, "ignored_index": ignored_index, "standardize": standardize}
    return of_file(arrays, str(file), seed=seed, fraction=fraction, **options)


def of_file(
    arrays: Mapping[str, Any],
    file: str,
    *,
    seed: int,
    fraction: float,
    called: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> Source:
    """Makes a `Source` of what was read from a file or folder; `options` are those of `make_source`.

    Its messages name the file and the array, as the file calls it (`called`).
    """
    rows = subsample(generator(seed, "load"), len(arrays["x"]) if arrays["x"].ndim else 0, fraction)
    try:
        return make_source(arrays, rows, **options, name=pathlib.Path(file).stem)
    except ArgumentError as error:
        if error.argument not in ARRAYS:
            raise
        raise ArgumentError(
            "file", f"{called.get(error.argument, error.argument)} {error.text}", file
        ) from error


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
        told = text.format(kind=type(error).__name__, error=str(error).partition("\n")[0])
        raise ArgumentError("file", told, file) from error


def names_in(text: Names) -> list[str]:
    """The names in a list, or in a text with commas."""
    return (
        [name.strip() for name in text.split(",") if name.strip()]
        if isinstance(text, str)
        else list(text)
    )


def shaped(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Gives examples (n, *features) a shape; () keeps theirs."""
    size = math.prod(x.shape[1:])
    if shape and math.prod(shape) != size:
        raise ArgumentError(
            "shape",
            f"examples have {size} numbers; accepted: a shape of as many",
            ",".join(map(str, shape)),
        )
    return x.reshape(len(x), *shape) if shape else x
