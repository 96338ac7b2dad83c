"""Files that users name, read so that none can hang a command, exhaust memory or end it with a traceback.

What a file says of itself is not believed: sizes are compared with the file's own, and with the memory that is free.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.core.host import free_memory, readable

COMPRESSION = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # of numpy.savez and numpy.savez_compressed
DENSEST = 1100  # more bytes than a deflated byte can stand for, which are 1,032
ENCRYPTED = 1  # bit of a member's flags


@contextlib.contextmanager
def opened(file: str, argument: str = "file") -> Iterator[BinaryIO]:
    """A regular file that is open for reading.

    Args:
        file: Its path.
        argument: What names it, for messages.

    Raises:
        ArgumentError: if there is none, or it cannot be read.
    """
    try:
        with open(file, "rb", opener=_open) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ArgumentError(argument, "cannot be read (Not a regular file)", file)
            yield stream
    except ArgumentError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the path has a zero byte
        raise ArgumentError(argument, f"cannot be read ({getattr(error, 'strerror', None) or error})", file) from error


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # which does not wait for the writer of a pipe


def read_text(file: str, argument: str = "file") -> str:
    """The text of a file in UTF-8.

    Raises:
        ArgumentError: as `opened`, or if it is no such text or does not fit into memory.
    """
    with opened(file, argument) as stream:
        _check_memory(os.fstat(stream.fileno()).st_size, file, argument)
        content = stream.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(argument, f"is not UTF-8 text (byte {error.start})", file) from error


def read_npy(file: str, argument: str = "file") -> np.ndarray:
    """The array in an npy file.

    Raises:
        ArgumentError: as `opened`, or if it is not one array of a plain type, or does not fit into memory.
    """
    with opened(file, argument) as stream:
        size = os.fstat(stream.fileno()).st_size
        _check_memory(size, file, argument)
        try:
            return _array(stream, size)
        except Exception as error:  # whatever a damaged header makes NumPy raise
            raise ArgumentError(argument, "is not an npy file of a plain array (numpy.save)", file) from error


def read_npz(
    file: str, needed: Sequence[str], others: Sequence[str] = (), argument: str = "file"
) -> dict[str, np.ndarray]:
    """Arrays of an npz file by name.

    Args:
        file: Its path.
        needed: Names that it must have.
        others: Names that it may have.
        argument: What names the file, for messages.

    Raises:
        ArgumentError: as `opened`, or if the file lacks an array, is damaged, encrypted or no npz of plain arrays, or
            claims more bytes than it holds or memory has.
    """
    accepted = f"accepted: an npz with {' and '.join(needed)}"
    with opened(file, argument) as stream:
        if stream.read(6) == np.lib.format.MAGIC_PREFIX:
            raise ArgumentError(argument, f"holds a single array; {accepted} (numpy.savez)", file)
        try:
            with zipfile.ZipFile(stream) as archive:
                if len(archive.infolist()) != _entries(stream):
                    raise ValueError("its directory is damaged")
                members = _members(archive, os.fstat(stream.fileno()).st_size, file, argument)
                missing = [name for name in needed if name not in members]
                if missing:
                    text = f"lacks {' and '.join(missing)}; {accepted}, found {', '.join(members) or 'nothing'}"
                    raise ArgumentError(argument, text, file)
                wanted = {name: members[name] for name in [*needed, *others] if name in members}
                _check_memory(sum(member.file_size for member in wanted.values()), file, argument)
                return {name: _read_member(archive, member) for name, member in wanted.items()}
        except ArgumentError:
            raise
        except Exception as error:  # whatever a damaged file makes zipfile, zlib and NumPy raise
            text = "is not an npz of plain arrays (numpy.savez; no object arrays or pickles)"
            raise ArgumentError(argument, text, file) from error


def names_of(file: str) -> list[str]:
    """The names of an npz file's arrays; none where it cannot be read, which `read_npz` tells."""
    try:
        with opened(file) as stream, zipfile.ZipFile(stream) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except Exception:  # whatever a damaged file makes zipfile raise
        return []


def _check_memory(num_bytes: int, file: str, argument: str) -> None:
    free = free_memory()
    if num_bytes > free:
        raise ArgumentError(argument, f"needs {readable(num_bytes)} of memory, and {readable(free)} are free", file)


def _entries(stream: BinaryIO) -> int:
    """How many members a zip says that it has, at its end: a damaged directory may swallow some without a sign."""
    place = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, place - 2**16))
    end = stream.read().rpartition(b"PK\5\6")[2]
    return int.from_bytes(end[6:8], "little")


def _members(archive: zipfile.ZipFile, size: int, file: str, argument: str) -> dict[str, zipfile.ZipInfo]:
    """The members of an npz of `size` bytes by their arrays' names; nothing of them is unpacked yet."""
    found: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name, wrong = member.filename.removesuffix(".npy"), None
        if name in found:
            wrong = "is there twice"
        elif member.flag_bits & ENCRYPTED:
            wrong = "is encrypted"
        elif member.compress_type not in COMPRESSION:
            wrong = "is compressed as numpy.savez does not"
        elif member.compress_size > size or member.file_size > DENSEST * member.compress_size:
            wrong = f"claims {readable(member.file_size)}, which the file cannot hold"
        if wrong:
            raise ArgumentError(argument, f"{name} {wrong}; accepted: an npz by numpy.savez", file)
        archive.open(member).close()  # compares its name with the one in front of its bytes
        found[name] = member
    return found


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as stream:
        return _array(stream, member.file_size)


def _array(stream: Any, size: int) -> np.ndarray:
    """The array in the npy format that a stream of `size` bytes holds, no more and no less."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of doubtful headers
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = header(stream)
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype}")
    if stream.tell() + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"shape {shape} of {dtype} is not of the {size} bytes there are")
    flat = np.frombuffer(stream.read(), dtype)  # to the end, where a member's checksum is compared
    return flat.reshape(shape[::-1]).T if by_columns else flat.reshape(shape)
