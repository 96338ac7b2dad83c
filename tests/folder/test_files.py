"""Files are written whole, under a name that nobody can guess."""

import os

import numpy as np
import pytest

from pfljax.contract.errors import ArgumentError
from pfljax.folder import files


def test_a_file_is_there_whole_or_as_before(tmp_path):
    path = tmp_path / "new" / "summary.json"
    files.write_json(
        path, {"loss": float("nan"), "round": np.int64(3), "all": [np.float32(1.5), np.arange(2)]}
    )
    assert files.read_json(path) == {"loss": None, "round": 3, "all": [1.5, [0, 1]]}

    def fail(file):
        file.write(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        files.write_atomically(path, fail)
    assert files.read_json(path)["round"] == 3 and [
        file.name for file in path.parent.iterdir()
    ] == ["summary.json"]


def test_temporary_names_differ_and_what_lies_there_is_not_written_to(tmp_path, monkeypatch):
    seen = []
    files.write_atomically(tmp_path / "a", lambda file: seen.append(file.name))
    files.write_atomically(tmp_path / "a", lambda file: seen.append(file.name))
    first, second = (os.path.basename(name) for name in seen)
    assert first != second and first.startswith(".a.") and len(first) >= len(".a.") + 16
    (tmp_path / "victim").write_text("mine")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".a.guessed.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        files.write_text(tmp_path / "a", "theirs")
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_folder_that_cannot_be_written_to_is_refused_and_nothing_is_made(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path, tmp_path / "a" / "b" / "c"):
        files.check_writable(folder)
    for name in ("file", "file/x", "broken", "broken/x", "y" * 300, "a\0b"):
        with pytest.raises(
            ArgumentError,
            match=r"^out=.*cannot be written to .*; accepted: an existing or new folder$",
        ):
            files.check_writable(tmp_path / name)
    with pytest.raises(ArgumentError, match=r"^profile=.*cannot be written to"):
        files.check_writable(tmp_path / "file", "profile")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "file"]
