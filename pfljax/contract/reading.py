"""Safe reading of users' files: no file can hang a command, exhaust memory or cause a traceback.

Sizes stated in a file are not trusted. They are compared with the file's actual size and with free memory.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import os
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from pfljax.contract import pickled
from pfljax.contract.errors import ArgumentError, few
from pfljax.contract.host import free_memory, readable

# used by numpy.savez and numpy.savez_compressed
COMPRESSION = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
DENSEST = 1100  # more than the maximum compression ratio of deflate, 1,032
ENCRYPTED = 1  # bit in a member's flags
MARKS = {  # byte order mark -> encoding; that of UTF-16 also begins UTF-32's
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


@contextlib.contextmanager
def opened(file: str, argument: str = "file") -> Iterator[BinaryIO]:
    """Opens a regular file for reading.

    Args:
        file: Path of the file.
        argument: Name of the argument, for error messages.

    Raises:
        ArgumentError: if the file does not exist or cannot be read.
    """
    try:
        with open(file, "rb", opener=_open) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ArgumentError(argument, "cannot be read (Not a regular file)", file)
            yield stream
    except ArgumentError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(argument, f"cannot be read ({reason})", file) from error


def _open(path: str, flags: int) -> int:
    """Opens a file without waiting for a pipe's writer."""
    no_waiting = getattr(os, "O_NONBLOCK", 0)  # not on Windows
    return os.open(path, flags | no_waiting)


def read_text(file: str, argument: str = "file") -> str:
    r"""Reads a text file: UTF-8, or UTF-16 or UTF-32 with a byte order mark. Lines end in "\n", whatever the system.

    Raises:
        ArgumentError: see `opened`; also if the file is not such a text or does not fit in memory.
    """
    with opened(file, argument) as stream:
        check_memory(os.fstat(stream.fileno()).st_size, file, argument)
        content = stream.read()
    encodings = [name for mark, name in MARKS.items() if content.startswith(mark)]
    encoding = encodings[0] if encodings else "utf-8"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        reason = f"is not {encoding.upper()} text (byte {error.start})"
        raise ArgumentError(argument, reason, file) from error
    if "\0" in text:
        reason = "is not UTF-8 text (it has null bytes; is it UTF-16 without a mark?)"
        raise ArgumentError(argument, reason, file)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_npy(file: str, argument: str = "file") -> np.ndarray:
    """Reads the array in an npy file.

    Raises:
        ArgumentError: see `opened`; also if the file is not an array of a plain dtype, or does not fit in memory.
    """
    with opened(file, argument) as stream:
        check_memory(os.fstat(stream.fileno()).st_size, file, argument)
        try:
            return _array(stream)
        except Exception as error:  # a damaged header can make NumPy raise anything
            text = "is not an npy file with a plain array (numpy.save)"
            raise ArgumentError(argument, text, file) from error


def map_npy(file: str, argument: str = "file") -> np.ndarray:
    """The array in an npy file as a read-only memory map.

    Raises:
        ArgumentError: see `opened`; also if the file is not an array of numbers.
    """
    with opened(file, argument):
        pass
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header can make NumPy raise anything
        text = "is not an npy file with an array of numbers (numpy.save)"
        raise ArgumentError(argument, text, file) from error


def read_npz(file: str, needed: Sequence[str], others: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Reads arrays of an npz file. Returns them by name.

    Args:
        file: Path of the file.
        needed: Names of required arrays.
        others: Names of optional arrays.

    Raises:
        ArgumentError: see `opened`; also if an array is missing or unknown, the file is damaged, encrypted or not an
            npz of plain arrays, or it claims more bytes than it contains or than fit in memory.
    """
    contents = "plain arrays (numpy.savez; no object arrays or pickles)"
    return _read_archive(file, needed, others, _array, contents)


def read_pickled_npz(file: str, name: str) -> Any:
    """Reads an object that numpy.savez has pickled, such as a dict of arrays; see `pickled` for what is admitted.

    Args:
        file: Path of the npz file.
        name: Name of its only array, which holds the object.

    Raises:
        ArgumentError: see `read_npz`; also if the pickle has anything but numbers, texts, lists, dicts and arrays.
    """
    contents = f"a pickled dict of arrays (numpy.savez({name}=...))"
    return _read_archive(file, [name], [], _pickled_object, contents)[name]


def read_pickle(file: str, argument: str = "file", encoding: str = "ascii") -> Any:
    """Reads a pickle; see `pickled` for what is admitted.

    Args:
        file: Path of the file.
        argument: Name of the argument, for error messages.
        encoding: How texts of Python 2 are read; "latin1" also reads its arrays.

    Raises:
        ArgumentError: see `opened`; also if the file is damaged, or has anything but numbers, texts, lists, dicts and
            arrays.
    """
    with opened(file, argument) as stream:
        check_memory(os.fstat(stream.fileno()).st_size, file, argument)
        try:
            return pickled.load(stream, encoding)
        except pickled.NotPlain as error:
            raise ArgumentError(argument, f"is refused, since {error}", file) from error
        except Exception as error:  # a damaged pickle can raise anything
            raise ArgumentError(argument, "is not a pickle, or is damaged", file) from error


def _read_archive(
    file: str,
    needed: Sequence[str],
    others: Sequence[str],
    read: Callable[[Any], Any],
    contents: str,
) -> dict[str, Any]:
    """Reads an npz; see `read_npz`.

    Args:
        file: Path of the file.
        needed: Names of required members.
        others: Names of optional members.
        read: Reads a member.
        contents: What an accepted file has, for messages.
    """
    accepted = f"accepted: an npz with {' and '.join(needed)}"
    with opened(file) as stream:
        if stream.read(6) == np.lib.format.MAGIC_PREFIX:
            raise ArgumentError("file", f"contains a single array; {accepted} (numpy.savez)", file)
        try:
            with zipfile.ZipFile(stream) as archive:
                if len(archive.infolist()) != _num_entries(stream):
                    raise ValueError("its directory is damaged")
                members = _members(archive, os.fstat(stream.fileno()).st_size, file)
                _check_names(list(members), needed, others, file)
                check_memory(sum(member.file_size for member in members.values()), file)
                values = {}
                for name, member in members.items():
                    with archive.open(member) as content:
                        values[name] = read(content)
                return values
        except ArgumentError:
            raise
        except pickled.NotPlain as error:
            raise ArgumentError("file", f"is refused, since {error}", file) from error
        except Exception as error:  # a damaged file can make zipfile, zlib and NumPy raise anything
            raise ArgumentError("file", f"is not an npz of {contents}", file) from error


def _check_names(
    names: Sequence[str], needed: Sequence[str], others: Sequence[str], file: str
) -> None:
    """Raises `ArgumentError` if an npz lacks a required array, or has an unknown one."""
    missing = [name for name in needed if name not in names]
    if missing:
        accepted = f"accepted: an npz with {' and '.join(needed)}"
        text = f"lacks {' and '.join(missing)}; {accepted}, found {few(names) or 'nothing'}"
        raise ArgumentError("file", text, file)
    known = [*needed, *others]
    unknown = [name for name in names if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        text = f"has an unknown array {unknown[0]}; {hint}accepted: {', '.join(known)}"
        raise ArgumentError("file", text, file)


def names_of(file: str) -> list[str]:
    """Returns the names of an npz file's arrays; empty if it cannot be read (`read_npz` then raises the error)."""
    try:
        with opened(file) as stream, zipfile.ZipFile(stream) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except Exception:  # a damaged file can make zipfile raise anything
        return []


def check_memory(num_bytes: int, file: str, argument: str = "file") -> None:
    """Raises `ArgumentError` if a file needs more memory than is free."""
    free = free_memory()
    if num_bytes > free:
        text = f"needs {readable(num_bytes)} of memory, but only {readable(free)} is free"
        raise ArgumentError(argument, text, file)


def _num_entries(stream: BinaryIO) -> int:
    """Returns the number of members stated at a zip's end, since a damaged directory may silently lose some."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - 2**16))
    _, _, end = stream.read().rpartition(b"PK\5\6")
    return int.from_bytes(end[6:8], "little")


def _members(archive: zipfile.ZipFile, size: int, file: str) -> dict[str, zipfile.ZipInfo]:
    """Returns the members of an npz of `size` bytes by array name. Unpacks nothing yet."""
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        problem = "occurs twice" if name in members else _problem(member, size)
        if problem:
            text = f"{name} {problem}; accepted: an npz written by numpy.savez"
            raise ArgumentError("file", text, file)
        archive.open(member).close()  # checks its name against its local header
        members[name] = member
    return members


def _problem(member: zipfile.ZipInfo, size: int) -> str:
    """Why a member of a zip of `size` bytes cannot be read; "" if it can."""
    if member.flag_bits & ENCRYPTED:
        return "is encrypted"
    if member.compress_type not in COMPRESSION:
        return "uses a compression that numpy.savez does not"
    if member.compress_size > size or member.file_size > DENSEST * member.compress_size:
        return f"claims {readable(member.file_size)}, which cannot fit in the file"
    return ""


def _array(stream: Any) -> np.ndarray:
    """Reads an array in npy format, which ends where the stream ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # doubtful headers raise warnings
        array = np.lib.format.read_array(stream)
    if stream.read(1):  # at a member's end, its checksum is checked
        raise ValueError("more bytes than the header says")
    return array


def _pickled_object(stream: Any) -> Any:
    """Reads the object in an npy file with an array () of objects, which NumPy pickles."""
    version = np.lib.format.read_magic(stream)
    is_old = version == (1, 0)
    read_header = (
        np.lib.format.read_array_header_1_0 if is_old else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read_header(stream)
    if not dtype.hasobject or shape != ():
        raise ValueError("no pickled object")
    array = pickled.load(stream)
    if stream.read(1):  # at a member's end, its checksum is checked
        raise ValueError("more bytes than the pickle")
    return array[()]
