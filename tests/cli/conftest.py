"""Commands as users run them, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pfljax import api, report


@pytest.fixture(autouse=True)
def no_pages(monkeypatch, request):
    """Commands in the process of the tests draw no pages, which takes seconds, but for tests marked `pages`."""
    if not request.node.get_closest_marker("pages"):
        monkeypatch.setattr(api.Result, "write_report", lambda result: result.out / "report.html")
        monkeypatch.setattr(report, "write_comparison", lambda page, *_, **__: page)


@pytest.fixture(scope="session")
def process():
    """Runs `pfljax` in a process of its own: (flags, exit code) -> what it printed."""

    def run(*flags, code=0):
        command = [sys.executable, "-m", "pfljax.cli", *flags]
        root = Path(__file__).parents[2]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=root, env=os.environ, timeout=300
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run
