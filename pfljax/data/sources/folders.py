"""Folders of images, whose names are those of splits, clients and classes."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError, warn
from pfljax.contract.reading import check_memory, opened
from pfljax.data.sources.files import damaged, source_from_file
from pfljax.data.sources.source import Fraction, Source
from pfljax.settings.fields import Seed, checked, hyperparameter

IMAGES = "a folder of images, CLASS/FILE or CLIENT/CLASS/FILE, also in train and test"
GRAY = {"1", "L"}  # modes of images that have one channel
# Modes with 8 bits per channel
MODES = GRAY | {"LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"}
TRANSPARENT = {"LA", "La", "PA", "RGBA", "RGBa"}  # modes with an alpha channel
ORIENTATION = 0x0112  # EXIF tag: how a camera was held

# Names of folders that are splits; other names are clients or classes.
SPLIT = re.compile(
    r"(?:(train|training)|(val|valid|validation|dev)|(test|testing))(?:[-_ ]?(?:set|data|images|split))?"
)
PREFIXED = re.compile(rf"(?:.*[-_ ])?{SPLIT.pattern}")  # such as seg_train and seg_test
SPLITS = ("train", "validation", "test")

# Files that are read as images; those without a suffix are, too, if Pillow knows them.
SUFFIXES = {
    ".apng", ".avif", ".bmp", ".dib", ".gif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg",
    ".mpo", ".pbm", ".pcx", ".pgm", ".png", ".pnm", ".ppm", ".sgi", ".tga", ".tif", ".tiff",
    ".webp",
}  # fmt: skip
# Formats that Pillow decodes itself; of others, such as EPS, it starts programs.
FORMATS = (
    "PNG", "JPEG", "MPO", "JPEG2000", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "AVIF", "TGA",
    "PCX", "SGI",
)  # fmt: skip
# Files that are images but are not read
UNSUPPORTED = {
    ".arw", ".cr2", ".cr3", ".dng", ".eps", ".exr", ".heic", ".heif", ".jxl", ".nef", ".orf",
    ".psd", ".raf", ".raw", ".svg",
}  # fmt: skip
# Files and folders that operating systems leave
SYSTEM_FILES = frozenset(
    {"thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir", "icon\r"}
)
DEEPEST = 5  # levels of folders: a split, a client and a class, and two splits more
NAMED = 3  # files and folders that a message names
Size = Annotated[Sequence[int], hyperparameter(at_least=1, empty=True)]
Open = Callable[[], contextlib.AbstractContextManager[BinaryIO]]


class ImageFile(NamedTuple):
    """An image in a folder.

    Attributes:
        path: Its path.
        names: The folders that it is in, without splits: its class, or its client and class.
        split: One of `SPLITS`; "" if the folder has none.
    """

    path: pathlib.Path
    names: tuple[str, ...]
    split: str


class Contents(NamedTuple):
    """The files of a folder.

    Attributes:
        images: Files that are images.
        others: Files that are no images.
        empty: Folders without anything.
    """

    images: list[pathlib.Path]
    others: list[pathlib.Path]
    empty: list[pathlib.Path]


@checked()
def images(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=IMAGES, help=IMAGES)],
    *,
    size: Size = (),
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
) -> Source:
    """Reads a folder of images. All are gray, or else all are converted to RGB.

    Photos are turned as their EXIF orientation says, and transparent images are put on white. Links are followed. Files
    that are no images are left out. The other arguments are those of `npz`.

    Args:
        file: Folder with images in CLASS/FILE or CLIENT/CLASS/FILE. Folders train, val (or valid, validation) and test,
            at any level, are splits: images in test are the official test examples, those in train and val all others.
        size: Rows and columns to which images are resized; empty: all images must have one size.

    Raises:
        ArgumentError: if the folder or an image is not accepted.

    Examples:
        >>> import pathlib
        >>> from PIL import Image
        >>> from pfljax.data import sources
        >>> for name in ("cat", "dog"):
        ...     pathlib.Path("photos", name).mkdir(parents=True)
        ...     Image.new("RGB", (8, 6)).save(f"photos/{name}/1.png")
        >>> source = sources.images("photos")
        >>> source.x.shape, source.class_names
        ((2, 6, 8, 3), ('cat', 'dog'))
    """
    check_size(size)
    file = str(file)
    pillow = optional.load("PIL.Image", "file", file)
    folder = pathlib.Path(file)
    contents = _contents(folder)
    files = _image_files(folder, contents)
    _warn(folder, contents, files)
    openers = {str(image.path): functools.partial(opened, str(image.path)) for image in files}
    arrays = {
        "x": read_images(pillow, openers, tuple(size)),
        "y": np.array([image.names[-1] for image in files]),
    }
    if len(files[0].names) == 2:
        arrays["client"] = np.array([image.names[0] for image in files])
    is_test = np.array([image.split == "test" for image in files])
    if is_test.any():
        arrays["is_test"] = is_test
    return source_from_file(arrays, file, seed=seed, fraction=fraction, standardize=standardize)


def check_size(size: Sequence[int]) -> None:
    """Raises `ArgumentError` for a size that is not one of images."""
    if len(size) not in (0, 2):
        raise ArgumentError("size", "accepted: rows and columns", ",".join(map(str, size)))


def has_test_split(path: pathlib.Path) -> bool:
    """Whether a folder has images in a split for testing."""
    if not path.is_dir():
        return False
    return any(image.split == "test" for image in _image_files(path, _contents(path)))


def split_of(name: str) -> str:
    """Which of `SPLITS` the name of a folder says that its images are; "": none, so that it is a client or a class."""
    match = PREFIXED.fullmatch(name.lower())
    if match is None:
        return ""
    return next(split for split, text in zip(SPLITS, match.groups(), strict=True) if text)


def _contents(folder: pathlib.Path) -> Contents:
    """All files and empty folders below a folder, in sorted order. Follows links.

    Raises `ArgumentError` for a folder that cannot be read, a link to a folder around it, or folders that are too deep.
    """
    contents = Contents([], [], [])
    try:
        _visit(folder, folder, (), contents)
    except OSError as error:
        text = f"cannot be read ({error.strerror})"
        raise ArgumentError("file", text, str(error.filename or folder)) from error
    return contents


def _visit(
    folder: pathlib.Path, root: pathlib.Path, above: tuple[tuple[int, int], ...], contents: Contents
) -> None:
    """Adds what is in a folder; `above` has device and number of the folders that it is in."""
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        text = f"{folder.relative_to(root)} is a link to a folder that it is in"
        raise ArgumentError("file", f"{text}; accepted: {IMAGES}", str(root))
    if len(above) > DEEPEST:
        text = f"{folder.relative_to(root)} is elsewhere; accepted: {IMAGES}"
        raise ArgumentError("file", text, str(root))
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if _is_visible(entry.name))
    if not names and above:
        contents.empty.append(folder)
    for name in names:
        path = folder / name
        if path.is_dir():
            _visit(path, root, (*above, identity), contents)
        elif _is_image(path):
            contents.images.append(path)
        else:
            contents.others.append(path)


def _is_visible(name: str) -> bool:
    """Whether a name is neither hidden nor one of those that systems leave in folders."""
    return not name.startswith(".") and name.lower() not in SYSTEM_FILES


def _is_image(path: pathlib.Path) -> bool:
    """Whether a file is to be read as an image, by its suffix; without one, by its content."""
    suffix = path.suffix.lower()
    if suffix in UNSUPPORTED:
        text = f"is an image of a format that is not read; accepted: {', '.join(sorted(SUFFIXES))}"
        raise ArgumentError("file", text, str(path))
    if suffix and not suffix[1:].isdigit():
        return suffix in SUFFIXES
    pillow = optional.load("PIL.Image", "file", str(path))
    with opened(str(path)) as stream, warnings.catch_warnings(action="ignore"):
        try:
            _opened(pillow, stream).close()
        except pillow.UnidentifiedImageError:
            return False
        except Exception:
            # Reading it says what is wrong.
            return True
    return True


def _image_files(folder: pathlib.Path, contents: Contents) -> list[ImageFile]:
    """The images of a folder: those to train on first, in sorted order. Raises `ArgumentError` for another layout."""
    if not contents.images:
        others = f", and {_named(folder, contents.others)} is no image" if contents.others else ""
        raise ArgumentError("file", f"has no images{others}; accepted: {IMAGES}", str(folder))
    names = [path.relative_to(folder).parts[:-1] for path in contents.images]
    splits = [""] * len(names)

    # Take levels of splits out of the names until there is none.
    while (level := _level_of_splits(names)) is not None:
        splits_here = [split_of(name[level]) for name in names]
        for outer, inner in zip(splits, splits_here, strict=True):
            if outer not in ("", inner):
                text = f"has splits in other splits; accepted: {IMAGES}"
                raise ArgumentError("file", text, str(folder))
        splits = splits_here
        names = [name[:level] + name[level + 1 :] for name in names]
    _check_layout(folder, contents.images, names, splits)
    files = map(ImageFile, contents.images, names, splits)
    return sorted(files, key=lambda image: image.split == "test")


def _level_of_splits(names: Sequence[tuple[str, ...]]) -> int | None:
    """The first level at which all folders are splits; None: there is none."""
    for level in range(min(map(len, names))):
        if all(map(split_of, {name[level] for name in names})):
            return level
    return None


def _check_layout(
    folder: pathlib.Path,
    paths: Sequence[pathlib.Path],
    names: Sequence[tuple[str, ...]],
    splits: Sequence[str],
) -> None:
    """Raises `ArgumentError` unless all images are in a class, or in a client and a class.

    Args:
        folder: The folder.
        paths: The images.
        names: The folders that each is in, without splits.
        splits: The split of each.
    """
    # Some folders at the first level are splits, others are not.
    first = {name[0] for name in names if name}
    mixed = sorted(name for name in first if SPLIT.fullmatch(name.lower()))
    is_deep = max(map(len, names)) > 1
    if mixed and (is_deep or len({*map(split_of, mixed)}) > 1):
        others = sorted(first - {*mixed})
        text = f"has {', '.join(mixed)} next to other folders, {', '.join(others[:NAMED])}"
        raise ArgumentError("file", f"{text}; accepted: {IMAGES}", str(folder))

    # Images at another level than others
    depths = [len(name) for name in names]
    elsewhere = [path for path, depth in zip(paths, depths, strict=True) if depth not in (1, 2)]
    elsewhere += [path for path, depth in zip(paths, depths, strict=True) if depth != depths[0]]
    if elsewhere:
        text = f"{elsewhere[0].relative_to(folder)} is elsewhere; accepted: {IMAGES}"
        raise ArgumentError("file", text, str(folder))

    if {*splits} <= {"validation", "test"}:
        text = f"has a split for {' and '.join(sorted({*splits}))}, but none to train on"
        raise ArgumentError("file", f"{text}; accepted: {IMAGES}", str(folder))


def _warn(folder: pathlib.Path, contents: Contents, files: Sequence[ImageFile]) -> None:
    """Says what of a folder is left out, or read in a way that may not be meant."""
    if contents.others:
        text = f"{_named(folder, contents.others)} in {folder.name} is no image and is left out"
        warn("file", text)
    if contents.empty:
        text = f"{_named(folder, contents.empty)} in {folder.name} has no images and is left out"
        warn("file", text)
    if any(image.split == "validation" for image in files):
        text = f"the images for validation in {folder.name} are read as training examples"
        hint = "validation_fraction gives each client validation examples of its own"
        warn("file", f"{text}; {hint}")
    clients = {image.names[0] for image in files if len(image.names) == 2}
    if len(clients) == 1:
        text = f"all images are in {folder.name}/{clients.pop()}, which is read as a single client"
        warn("file", f"{text}; if its folders are classes and it is no client, read that folder")


def _named(folder: pathlib.Path, paths: Sequence[pathlib.Path]) -> str:
    """The first path, and how many others there are."""
    others = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return f"{paths[0].relative_to(folder)}{others}"


def read_images(pillow: Any, files: Mapping[str, Open], size: tuple[int, ...]) -> np.ndarray:
    """The images in files, as a viewer shows them.

    Args:
        pillow: The module `PIL.Image`.
        files: What opens each file, by its name for messages.
        size: See `images`.

    Returns:
        uint8 (n, rows, columns, 1 or 3).

    Raises:
        ArgumentError: for an image that is damaged, larger than Pillow's limit, animated or of more than 8 bits, or of
            another size than the first.
    """
    # Pillow's sizes are columns and rows.
    first = next(iter(files))
    with _image(pillow, first, files[first]) as image:
        shape = size or _upright(image).size[::-1]
    is_gray = True
    for name, open_file in files.items():
        with _image(pillow, name, open_file) as image:
            _check(image, name)
            is_gray &= image.mode in GRAY
    x_shape = (len(files), *shape, 1 if is_gray else 3)
    check_memory(math.prod(x_shape), first)
    x = np.empty(x_shape, np.uint8)
    transparent = []
    for row, (name, open_file) in zip(x, files.items(), strict=True):
        with _image(pillow, name, open_file) as image:
            image = _upright(image)
            rows_and_columns = image.size[::-1]
            if rows_and_columns != shape and not size:
                text = f"has {_in_pixels(rows_and_columns)} pixels, but {first} has {_in_pixels(shape)}"
                accepted = "accepted: images of one size, or `size`, one for all"
                raise ArgumentError("file", f"{text}; {accepted}", name)
            opaque = _on_white(pillow, image)
            if opaque is not image:
                transparent.append(name)
            image = opaque.convert("L" if is_gray else "RGB")
            if rows_and_columns != shape:
                image = image.resize(shape[::-1], pillow.Resampling.BILINEAR)
            row[:] = np.asarray(image).reshape(row.shape)
    if transparent:
        others = f" (and {len(transparent) - 1} more)" if len(transparent) > 1 else ""
        warn("file", f"{transparent[0]}{others} is transparent in places, which become white")
    return x


def _in_pixels(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _check(image: Any, name: str) -> None:
    """Raises `ArgumentError` for an image that is not one picture with 8 bits per channel; `name` is its file's."""
    if image.mode not in MODES:
        raise ArgumentError("file", f"has mode {image.mode}; accepted: 8 bits per channel", name)
    if any(";16" in str(tile[3:]) for tile in image.tile):
        raise ArgumentError("file", "has 16 bits per channel; accepted: 8 bits per channel", name)
    # Phones store a preview with the photo.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise ArgumentError("file", "has several frames or pages; accepted: images with one", name)


def _upright(image: Any) -> Any:
    """The image as its EXIF orientation says that it is shown."""
    operations = optional.load("PIL.ImageOps", "file")
    # A PNG may have its orientation after the pixels.
    image.load()
    try:
        image.getexif().get(ORIENTATION)
    except Exception:
        # Damaged metadata have no orientation.
        return image
    return operations.exif_transpose(image)


def _on_white(pillow: Any, image: Any) -> Any:
    """A transparent image on a white background; the image itself if all of it is opaque."""
    if image.mode not in TRANSPARENT and "transparency" not in image.info:
        return image
    layer = image.convert("RGBA")
    if layer.getchannel("A").getextrema() == (255, 255):
        return image
    return pillow.alpha_composite(pillow.new("RGBA", layer.size, "white"), layer)


@contextlib.contextmanager
def _image(pillow: Any, name: str, open_file: Open) -> Iterator[Any]:
    """An image of a file; `name` is the file's, for messages."""
    largest = pillow.MAX_IMAGE_PIXELS or 0
    large = f"has more than {largest:,} pixels, which may exhaust the memory; accepted: fewer"
    text = "is damaged, or no image that Pillow reads"
    bombs = (pillow.DecompressionBombWarning, pillow.DecompressionBombError)
    with (
        open_file() as stream,
        damaged(name, text),
        damaged(name, large, bombs),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of odd metadata
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        with _opened(pillow, stream) as image:
            yield image


def _opened(pillow: Any, stream: BinaryIO) -> Any:
    """An image that Pillow has opened, if it is of one of `FORMATS`."""
    pillow.init()  # registers all of them
    return pillow.open(stream, formats=[name for name in FORMATS if name in pillow.OPEN])
