"""Commands as users run them, with one cache for all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def experiment(tmp_path_factory):
    """Runs experiments.NAME in a process of its own: (name, flags, exit code) -> what it printed."""
    environment = os.environ | {"PFLJAX_CACHE": str(tmp_path_factory.mktemp("cache"))}

    def run(name, *flags, code=0):
        command = [sys.executable, "-m", f"experiments.{name}", *flags]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=300)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run
