"""Every code block of README and the docs runs: Python as written, commands as typed, both with fewer rounds."""

import importlib
import importlib.util
import re
import shlex
import sys
import tomllib
import types
from pathlib import Path

import pytest
from commands import call

import pfljax as pfl
from pfljax.algorithms import METHODS
from pfljax.cli.launch import named
from pfljax.cli.settings import parse

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SNIPPET = re.compile(r'--8<-- "(.*?)"')

# What makes a block small enough for a test; nothing else is changed.
SHORTER = {
    "python": {
        r"rounds=\d+": "rounds=2",
        r"range\(3\)": "range(1)",
        r"num_clients=1000\b": "num_clients=100",
        r"learning_rates=\[0.03, 0.1, 0.3\]": "learning_rates=[0.1, 0.3], widen=0",
        r"tune=\[0.03, 0.1, 0.3\]": "tune=[0.1, 0.3], tune_widen=0",
    },
    "bash": {
        r"--rounds=\d+": "",
        r"--drift=labels@\d+": "--drift=labels@1",
        r"--methods=all\b": "--methods=local,fedper",
        r"--seeds=0,1,2 ": "--seeds=0,1 ",
        r"--methods=local,fedavg,ditto,federico_friends ": "--methods=local,ditto ",
        r"--methods=fedavg,ditto,federico_friends --tune": "--methods=ditto --tune",
        r"--methods=local,fedavg,federico_friends,ditto,fedper,ifca ": "--methods=local,ifca ",
        r"--tune(?=\s)": "--tune=0.1,0.3",
        r"--tune=0.03,0.1,0.3": "--tune=0.1,0.3",
        r"--tune=0.1,0.3": "--tune=0.1,0.3 --tune_widen=0",
        r"--splits=0,1,2,3,4": "--splits=0,1",
        r"--num_clients=1000000": "--num_clients=2000",
        r"--participation=0.001": "--participation=0.01",
        r"--eval_clients=10000": "--eval_clients=50",
        r"--num_clients=2000,100000 --cohort=1000": "--num_clients=100,200 --cohort=10",
        r"--num_clients=10,100,1000": "--num_clients=10,20",
    },
}


def blocks(page):
    """(language, code) of each block of a page."""
    return BLOCK.findall((ROOT / page).read_text())


def lines_of(code):
    """The commands of a shell block."""
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]


def command(name):
    return importlib.import_module(f"pfljax.cli.{name}").COMMAND


def runs_here(line):
    """Whether one process on this machine can run a command in seconds."""
    elsewhere = line.startswith(
        ("pfljax estimate ", "pfljax watch ")
    )  # needs another compiler; serves until it is ended
    return (
        line.startswith("pfljax ")
        and not elsewhere
        and "--coordinator" not in line
        and "experiments/" not in line
    )


def shorter(code, language):
    for pattern, text in SHORTER[language].items():
        code = re.sub(pattern, text, code)
    return code


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that commands name, as in a checkout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


WITH_CODE = [page for page in PAGES if any(language in SHORTER for language, _ in blocks(page))]
# The pages that a newcomer reads first are played in CI, all others at night.
FIRST = ("README.md", "docs/quickstart.md", "docs/howto/method.md")


# Packages that are no part of the extra test.
NEEDS = {"docs/howto/from-pytorch.md": ("torch", "torchax")}


def marks(page):
    return pytest.mark.slow if page in FIRST else pytest.mark.long


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks(page)) for page in WITH_CODE])
def test_the_blocks_of_a_page_run(page, folder, monkeypatch):
    """One after the other, the Python as one program, README's as it stands, with the pages of its runs."""
    for package in NEEDS.get(page, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    if page != "README.md":
        monkeypatch.setattr(pfl.Result, "write_report", lambda result: result.out / "report.html")
    program = types.ModuleType("program")
    # where a dataclass looks its types up
    monkeypatch.setitem(sys.modules, program.__name__, program)
    registered = set(METHODS)
    for language, code in blocks(page):
        if language == "python":
            whole = SNIPPET.sub(lambda found: (ROOT / found[1]).read_text(), code)
            made = whole if page == "README.md" else shorter(whole, language)
            exec(compile(made, page, "exec"), vars(program))
        for line in filter(runs_here, lines_of(code) if language == "bash" else ()):
            for own in set(METHODS) - registered:  # a command is a process of its own
                METHODS.pop(own)
            _, name, *flags = shlex.split(shorter(f"{line} ", language))
            call(command(name), *flags, *([] if name in ("report", "methods") else ["--rounds=2"]))
    results = [value for value in vars(program).values() if isinstance(value, pfl.Result)]
    assert all(0 <= result.accuracy <= 1 for result in results)


def test_the_first_pages_have_code():
    assert set(FIRST) <= set(WITH_CODE)


def test_other_blocks_are_few():
    """Those that need a server or an account; "text" is what a program prints, or a cluster's script."""
    others = {
        page for page in PAGES for language, _ in blocks(page) if language not in (*SHORTER, "text")
    }
    assert others == {"docs/howto/track.md"}


def test_commands_that_take_hours_or_hosts_are_right():
    """Every flag is known; every module and extra is there."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    lines = [
        line
        for page in PAGES
        for language, code in blocks(page)
        if language == "bash"
        for line in lines_of(code)
    ]
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        if program == "pip":
            assert words[0] == "install" and set(re.findall(r"\[(\w+)\]", words[-1])) <= set(
                extras
            ), line
        elif program == "pfljax":
            made = command(words[0])
            assert runs_here(line) or parse(
                made.define, named(words[1:], made.listed) if made.listed else words[1:]
            )
        else:
            assert (program, words[0]) == ("python", "-m"), f"{line}: no test runs this"
            assert "--out" in call(importlib.import_module(words[1]).COMMAND, *words[2:], "--help")
