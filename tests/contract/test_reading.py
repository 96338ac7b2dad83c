"""Files with false headers, or paths that are not files: rejected at once in one line, before memory is allocated."""

import io
import os
import struct
import zipfile

import numpy as np
import pytest

from pfljax.contract import reading
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources

X = np.arange(12.0).reshape(4, 3)
Y = np.arange(4)


def npy(array):
    """The bytes of an npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def claims(shape, dtype="<f8", body=b"\0" * 96):
    """An npy file with this header and 96 bytes of data."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return file.getvalue() + body


def archive(path, members, compression=zipfile.ZIP_STORED):
    """Writes a zip of (name, bytes) pairs."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members:
            file.writestr(name, content)
    return str(path)


def patched(path, marker, offset, value):
    """Writes a 16-bit value `offset` bytes after each of a zip's records that begin with `marker`."""
    content = bytearray(path.read_bytes())
    place = content.find(marker)
    while place >= 0:
        struct.pack_into("<H", content, place + offset, value)
        place = content.find(marker, place + 1)
    path.write_bytes(content)


HOSTILE = {
    "a header of 36 TiB": (
        [("x.npy", claims((5_000_000, 1_000_000))), ("y.npy", npy(Y))],
        "is not an npz",
    ),
    "a header of fewer bytes": ([("x.npy", claims((3, 3))), ("y.npy", npy(Y))], "is not an npz"),
    "a negative size": ([("x.npy", claims((-4, -3))), ("y.npy", npy(Y))], "is not an npz"),
    "a size beyond 64 bits": ([("x.npy", claims((2**64,))), ("y.npy", npy(Y))], "is not an npz"),
    "a member that is no array": ([("x.npy", b"what is this"), ("y.npy", npy(Y))], "is not an npz"),
    "an empty member": ([("x.npy", b""), ("y.npy", npy(Y))], "is not an npz"),
    "pickles": (
        [("x.npy", claims((4,), "|O", b"cos\nsystem\n.")), ("y.npy", npy(Y))],
        "is not an npz",
    ),
    "a field": (
        [("x.npy", npy(np.zeros(4, [("a", "f4")]))), ("y.npy", npy(Y))],
        "x is .*; accepted: numbers",
    ),
    "complex numbers": (
        [("x.npy", npy(X + 1j)), ("y.npy", npy(Y))],
        "x is complex128; accepted: numbers",
    ),
    "no members": ([], "lacks x and y"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused(tmp_path, case):
    members, message = HOSTILE[case]
    with pytest.raises(ArgumentError, match=f"^file=.*{message}") as error:
        sources.npz(archive(tmp_path / "f.npz", members))
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_array_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="x occurs twice"):
        sources.npz(
            archive(
                tmp_path / "f.npz", [("x.npy", npy(X)), ("x.npy", npy(X + 1)), ("y.npy", npy(Y))]
            )
        )


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(tmp_path, kind):
    with pytest.raises(ArgumentError, match=r"x uses a compression that numpy\.savez does not"):
        sources.npz(archive(tmp_path / "f.npz", [("x.npy", npy(X)), ("y.npy", npy(Y))], kind))


def test_encryption_is_refused(tmp_path):
    path = tmp_path / "f.npz"
    np.savez(path, x=X, y=Y)
    patched(path, b"PK\x01\x02", 8, 1)  # the flags in the directory
    with pytest.raises(ArgumentError, match="x is encrypted"):
        sources.npz(str(path))


def test_a_bomb_is_refused_by_what_it_claims(tmp_path, monkeypatch):
    path = tmp_path / "f.npz"
    np.savez_compressed(path, x=np.zeros((4, 10**6)), y=Y)
    assert path.stat().st_size < 10**5 and sources.npz(str(path)).x.shape == (4, 10**6)
    monkeypatch.setattr(reading, "free_memory", lambda: 10**7)
    with pytest.raises(
        ArgumentError, match=r"needs 30\.5 MiB of memory, but only 9\.5 MiB is free"
    ):
        sources.npz(str(path))


def test_a_member_claims_no_more_than_its_bytes_can_be(tmp_path):
    path = tmp_path / "f.npz"
    np.savez(path, x=X, y=Y)
    content = bytearray(path.read_bytes())
    place = content.find(b"PK\x01\x02")
    struct.pack_into("<I", content, place + 24, 2**31)  # the size of x unpacked, in the directory
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"x claims 2\.0 GiB, which cannot fit in the file"):
        sources.npz(str(path))


def test_orders_and_byte_orders_are_read(tmp_path):
    np.savez(tmp_path / "f.npz", x=np.asfortranarray(X), y=Y.astype(">i4"))
    arrays = reading.read_npz(str(tmp_path / "f.npz"), ["x", "y"], ["client"])
    assert list(arrays) == ["x", "y"]
    np.testing.assert_array_equal(arrays["x"], X)
    np.testing.assert_array_equal(arrays["y"], Y)


def test_pipes_folders_and_devices_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name, why in (
        ("pipe", "Not a regular file"),
        ("link", "Not a regular file"),
        (".", "Is a directory"),
    ):
        for read in (sources.npz, sources.text, reading.read_npy):
            with pytest.raises(ArgumentError, match=f"cannot be read .{why}"):
                read(str(tmp_path / name))
    with pytest.raises(ArgumentError, match="Not a regular file"):
        reading.read_text("/dev/zero", "edge_file")
    with pytest.raises(ArgumentError, match=r"^edge_file=.*null byte"):
        reading.read_text("a\0b", "edge_file")


def test_a_lone_array_is_one_of_a_plain_type(tmp_path):
    np.save(tmp_path / "f.npy", X)
    np.testing.assert_array_equal(reading.read_npy(str(tmp_path / "f.npy")), X)
    for content in (
        npy(np.array([{}], object)),
        b"",
        npy(X)[:-1],
        npy(X) + b"\0",
        claims((10**9,)),
    ):
        (tmp_path / "f.npy").write_bytes(content)
        with pytest.raises(ArgumentError, match="is not an npy file with a plain array"):
            reading.read_npy(str(tmp_path / "f.npy"))


def test_a_directory_that_swallows_a_member_is_damaged(tmp_path):
    path = tmp_path / "f.npz"
    np.savez(path, x=X, y=Y, client=Y)
    content = bytearray(path.read_bytes())
    second = content.find(b"PK\x01\x02", content.find(b"PK\x01\x02") + 1)
    third = content.find(b"PK\x01\x02", second + 1)
    # of the entry of client, which becomes a comment on y
    length = content.find(b"PK\x05\x06") - third
    struct.pack_into("<H", content, second + 32, length)
    path.write_bytes(content)
    with zipfile.ZipFile(path) as found:
        assert found.namelist() == ["x.npy", "y.npy"]
    with pytest.raises(ArgumentError, match="is not an npz of plain arrays"):
        sources.npz(str(path))
