"""A plugin of pytest for `mutants.py`: a test that takes too long fails."""

import signal
from typing import Any

import pytest

SECONDS_PER_TEST = 120


def fail(*_: Any) -> None:
    """Ends the test, once the interpreter runs again."""
    pytest.fail(f"has taken more than {SECONDS_PER_TEST} s")


def pytest_runtest_setup() -> None:
    """Starts the alarm."""
    signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS_PER_TEST)


def pytest_runtest_teardown() -> None:
    """Stops the alarm."""
    signal.alarm(0)
