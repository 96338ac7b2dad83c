"""Files that are not what a flag asks for: refused in one line that names the flag, by every flag that names a file."""

import io
import os
import zipfile

import numpy as np
import pytest
from outcomes import refused
from samples import check, params, sample

from pfljax.cli import compare, scaling, train

# A flag that names a file: the command, its words but for the file, and the suffix that a file of its kind has.
FLAGS = {
    "npz": (train, "--dataset=npz --data_file=", "npz"),
    "npz, compare": (compare, "--dataset=npz --methods=local --data_file=", "npz"),
    "npz, scaling": (scaling, "--num_clients=4 --devices=1 --data_file=", "npz"),
    "text": (train, "--dataset=text --data_file=", "txt"),
    **{
        kind: (train, f"--dataset={kind} --data_file=", kind)
        for kind in (
            "csv",
            "parquet",
            "huggingface",
            "leaf",
            "hdf5",
            "sqlite",
            "images",
            "arrayrecord",
            "pfllib",
            "flbench",
        )
    },
    "edges": (train, "--method=dfedem --dfedem.graph=file --dfedem.edge_file=", "txt"),
    "matrix": (train, "--method=dfedem --dfedem.mixing=file --dfedem.mixing_file=", "csv"),
    "array": (train, "--method=dfedem --dfedem.mixing=file --dfedem.mixing_file=", "npy"),
    "flags": (train, "--flagfile=", "flags"),
    "model": (train, "--model=", "py"),
    "method": (train, "--method=", "py"),
}


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in members.items():
            out.writestr(f"{name}.npy", content if isinstance(content, bytes) else npy(content))
    return file.getvalue()


def header(shape):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f8", "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


X = np.ones((20, 3))
Y = np.arange(20) % 3
CONTENTS = {
    "empty": b"",
    "zeros": bytes(1000),
    "noise": np.random.default_rng(0).bytes(5000),
    "executable": b"\x7fELF\x02\x01\x01" + bytes(range(256)),
    "utf-16": "0 1\n1 2\n".encode("utf-16"),
    "superscript": "0 ²\n".encode(),
    "a lone 1": b"1\n",
    "brackets": b"[" * 10_000,
    "a long line": b"9" * 10**6,
    "html": b"<!doctype html><title>404</title>",
    "a zip of nothing": archive(),
    "a zip of texts": archive(x=b"hello", y=b"world"),
    "a bomb": archive(x=header((10**12, 10)) + bytes(10**7), y=Y),
    "objects": archive(x=np.array([{}] * 20, object), y=Y),
    "fields": archive(x=np.zeros(20, [("a", "f4"), ("b", "i8")]), y=Y),
    "complex": archive(x=X * 1j, y=Y),
    "NaN": archive(x=X * np.nan, y=Y),
    "no dimension": archive(x=np.array(1.0), y=np.array(1)),
    "nothing": archive(x=X[:0], y=Y[:0]),
    "words": archive(x=np.array([["a"]] * 20), y=Y),
    "dates": archive(x=np.zeros((20, 1), "M8[s]"), y=Y),
    "times as classes": archive(x=X, y=np.zeros(20, "m8[s]")),
    "far classes": archive(x=X, y=Y * 10**12),
    "a client of floats": archive(x=X, y=Y, client=X[:, 0]),
    "all tests": archive(x=X, y=Y, is_test=Y >= 0),
    "an array of objects": npy(np.array([{}], object)),
    "an array of 72 TiB": header((10**12, 10)),
    "an array of complex numbers": npy(np.eye(16) * 1j),
    "an array of NaN": npy(np.full((16, 16), np.nan)),
    "an array of another shape": npy(np.eye(3)),
    "a torn array": npy(np.eye(16))[:-9],
}
# what is no file, or 8 TiB of nothing
MADE = ("missing", "folder", "pipe", "loop", "socket", "sparse")


def make(path, kind):
    if kind in CONTENTS:
        path.write_bytes(CONTENTS[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "socket":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch()
        try:
            os.truncate(path, 1 << 43)
        except OSError:
            pytest.skip("no file system for a sparse file")


CASES = [
    (flag, kind)
    for flag, (*_, suffix) in FLAGS.items()
    for kind in (*MADE, *CONTENTS)
    # code of one's own is executed, and its author answers for it
    if (suffix, kind) != ("py", "sparse")
]


def by_flag(case):
    return case[0]


def by_kind(case):
    return case[1]


def by_option(case):
    """The flag that names the file, whatever kind of file that is."""
    _, words, _ = FLAGS[case[0]]
    return words.split(" ")[-1]


FEW = sample(CASES, by_option, share=0)
SOME = sample(CASES, by_kind, by_flag)


def test_the_sample_has_every_flag_and_every_kind():
    check(CASES, SOME, by_flag, by_kind)


@pytest.mark.parametrize(("flag", "kind"), params(CASES, FEW, SOME))
def test_a_file_that_is_not_what_is_asked_for_is_refused(flag, kind, tmp_path):
    module, words, suffix = FLAGS[flag]
    path = tmp_path / f"given.{suffix}"
    make(path, kind)
    *first, last = words.split(" ")
    name = ":Own" if suffix == "py" else ""
    line = refused(module.COMMAND, [f"--out={tmp_path / 'run'}", *first, f"{last}{path}{name}"])
    accepted = flag == "flags" and kind == "empty"  # a file without flags
    assert (line is None) == accepted
    what = ("given.", "--dfedem.graph=file: not connected", "not a flag", "unknown flag")
    assert accepted or any(words in line for words in what)
    assert accepted or not (tmp_path / "run").exists()
