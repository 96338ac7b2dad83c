"""Folders of images, whose names are those of clients and classes."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, BinaryIO

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.contract.fields import Seed, checked, knob
from pfljax.contract.reading import check_memory, opened
from pfljax.data.sources.files import PARTS, damaged, of_file
from pfljax.data.sources.source import Fraction, Source, Standardize

IMAGES = "a folder of images, CLASS/FILE or CLIENT/CLASS/FILE, also in train and test"
GRAY = {"1", "L"}  # modes of images that have one channel
DEEP = {"I", "F"}  # how modes begin that have more than 8 bits
Size = Annotated[Sequence[int], knob(at_least=1, empty=True, flag="image_size")]
Open = Callable[[], contextlib.AbstractContextManager[BinaryIO]]


@checked()
def images(
    file: Annotated[str | pathlib.Path, knob(accepted=IMAGES, help=IMAGES, flag="data_file")],
    *,
    size: Size = (),
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: Standardize = True,
) -> Source:
    """Reads a folder of images. All are gray, or else all are converted to RGB.

    The other arguments are those of `npz`.

    Args:
        file: Folder with images in CLASS/FILE or CLIENT/CLASS/FILE. If it consists of train and test, these hold the
            images, and those in test are the official test examples.
        size: Rows and columns to which images are resized; empty: all images must have one size.

    Raises:
        ArgumentError: if the folder or an image is not accepted.
    """
    check_size(size)
    file = str(file)
    paths, names, tests = _found(pathlib.Path(file))
    pillow = optional.load("PIL.Image", "file", file)
    files = {str(path): functools.partial(opened, str(path)) for path in paths}
    arrays = {"x": read_images(pillow, files, tuple(size)), "y": np.array([name[-1] for name in names])}
    if len(names[0]) == 2:
        arrays["client"] = np.array([name[0] for name in names])
    if any(tests):
        arrays["is_test"] = np.array(tests)
    return of_file(arrays, file, seed=seed, fraction=fraction, standardize=standardize)


def check_size(size: Sequence[int]) -> None:
    """Raises `ArgumentError` for a size that is not one of images."""
    if len(size) not in (0, 2):
        raise ArgumentError("size", "accepted: rows and columns", ",".join(map(str, size)))


def has_test_part(path: pathlib.Path) -> bool:
    """Whether a folder consists of train and test."""
    return path.is_dir() and {each.name for each in _visible(path)} == {*PARTS}


def _visible(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(each for each in folder.iterdir() if not each.name.startswith("."))


def _found(folder: pathlib.Path) -> tuple[list[pathlib.Path], list[tuple[str, ...]], list[bool]]:
    """The images in sorted order, the names of the folders that they are in, and whether they are for testing."""
    try:
        parts = [folder / part for part in PARTS] if has_test_part(folder) else [folder]
        found = [(path, part) for part in parts for path in _files(part)]
    except OSError as error:
        raise ArgumentError("file", f"cannot be read ({error.strerror})", str(folder)) from error
    names = [path.relative_to(part).parts[:-1] for path, part in found]
    odd = next((path for (path, _), name in zip(found, names, strict=True) if len(name) not in (1, 2)), None)
    odd = odd or next((path for (path, _), name in zip(found, names, strict=True) if len(name) != len(names[0])), None)
    if odd or not found:
        text = f"{odd.relative_to(folder)} is elsewhere" if odd else "has no images"
        raise ArgumentError("file", f"{text}; accepted: {IMAGES}", str(folder))
    return [path for path, _ in found], names, [part.name == PARTS[1] and len(parts) > 1 for _, part in found]


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """All files at any depth, in sorted order."""
    for each in _visible(folder):
        if each.is_dir() and not each.is_symlink():
            yield from _files(each)
        else:
            yield each


def read_images(pillow: Any, files: Mapping[str, Open], size: tuple[int, ...]) -> np.ndarray:
    """The images in files, uint8 (n, rows, columns, 1 or 3); `pillow` is the module `PIL.Image`, `size` as in `images`.

    `files` has what opens each file, by its name for messages.
    """
    first = next(iter(files))
    with _image(pillow, first, files[first]) as image:
        shape = size or image.size[::-1]
    gray = True
    for name, open_file in files.items():
        with _image(pillow, name, open_file) as image:
            gray &= image.mode in GRAY
            if image.mode[0] in DEEP:
                raise ArgumentError("file", f"has mode {image.mode}; accepted: 8 bits per channel", name)
            if not size and image.size[::-1] != shape:
                sizes = [f"{rows} x {columns}" for rows, columns in (image.size[::-1], shape)]
                text = f"has {sizes[0]} pixels, but {first} has {sizes[1]}"
                raise ArgumentError("file", f"{text}; accepted: images of one size, or a size for all", name)
    full = (len(files), *shape, 1 if gray else 3)
    check_memory(math.prod(full), first)
    x = np.empty(full, np.uint8)
    for row, (name, open_file) in zip(x, files.items(), strict=True):
        with _image(pillow, name, open_file) as image:
            image = image.convert("L" if gray else "RGB")
            image = image.resize(shape[::-1], pillow.Resampling.BILINEAR) if image.size != shape[::-1] else image
            row[:] = np.asarray(image).reshape(row.shape)
    return x


@contextlib.contextmanager
def _image(pillow: Any, name: str, open_file: Open) -> Iterator[Any]:
    text = "is damaged, or no image that Pillow reads"
    with open_file() as stream, damaged(name, text), warnings.catch_warnings():
        warnings.simplefilter("error")  # of images that are suspiciously large
        with pillow.open(stream) as image:
            yield image
