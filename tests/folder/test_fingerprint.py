"""Sources of a user's files, which are compared where versions of libraries differ."""

import importlib
import sys

import pytest

from pfljax.folder import fingerprint
from pfljax.settings import own_files

FILES = {
    "mine.py": "from helper import SCALE\nimport part.inner as inner\nimport numpy\ndef update(x): return SCALE * x",
    "helper.py": "import deeper\nSCALE = 2.0",
    "deeper.py": "def f():\n    from part import late",
    "part/__init__.py": "",
    "part/inner.py": "from . import beside",
    "part/beside.py": "X = 1",
    "part/late.py": "X = 2",
    "apart.py": "X = 3",
    "numbers_of_another.py": "import apart",
}
IMPORTED = {
    "mine.py",
    "helper.py",
    "deeper.py",
    *(f"part/{name}.py" for name in ("__init__", "inner", "beside", "late")),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of files of which one, mine.py, imports some."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(own_files, "FOLDERS", {*own_files.FOLDERS})
    folder = tmp_path / "study"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_files_that_an_own_file_imports_are_among_the_sources(folder):
    update = own_files.load("method", f"{folder / 'mine.py'}:update")
    before = fingerprint.source(update)
    assert set(before) == {f"study/{name}" for name in IMPORTED}
    for name in FILES:
        path = folder / name
        path.write_text(FILES[name] + "\n# a comment")
        assert fingerprint.source(update) == before
        path.write_text(FILES[name] + "\nCHANGED = 1")
        now = fingerprint.source(update)
        assert [n for n in before if now[n] != before[n]] == [f"study/{name}"] * (name in IMPORTED)
        path.write_text(FILES[name])


def test_a_package_names_its_own_modules_in_full(folder, monkeypatch):
    (folder / "__init__.py").touch()
    (folder / "mine.py").write_text(
        "import study.helper\nfrom study.part import late\ndef update(x): return x"
    )
    (folder / "helper.py").write_text("from .deeper import f")
    monkeypatch.syspath_prepend(folder.parent)
    found = fingerprint.source(importlib.import_module("study.mine").update)
    names = ("__init__.py", "mine.py", "helper.py", "deeper.py", "part/__init__.py", "part/late.py")
    assert set(found) == {f"study/{name}" for name in names}


def test_a_changed_neighbor_is_named_where_versions_differ(folder):
    def described():
        return {
            "method": "Mine",
            "parts": {},
            "sources": fingerprint.source(own_files.load("method", f"{folder / 'mine.py'}:update")),
        }

    before = described() | {"versions": dict.fromkeys(fingerprint.LIBRARIES, "1")}
    (folder / "helper.py").write_text("import deeper\nSCALE = 3.0")
    now = described() | {"versions": dict.fromkeys(fingerprint.LIBRARIES, "2")}
    assert fingerprint.differences(before, now) == ["study/helper.py"]
