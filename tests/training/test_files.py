"""Files are written whole, under a name that nobody can guess."""

import os

import pytest

from pfljax.training import files


def test_a_file_is_there_whole_or_as_before(tmp_path):
    path = tmp_path / "new" / "summary.json"
    files.write_json(path, {"loss": float("nan"), "round": 3})
    assert files.read_json(path) == {"loss": None, "round": 3}

    def fail(file):
        file.write(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        files.write_atomically(path, fail)
    assert files.read_json(path)["round"] == 3 and [file.name for file in path.parent.iterdir()] == ["summary.json"]


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
