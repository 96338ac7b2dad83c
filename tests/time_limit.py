"""A plugin of pytest for `mutants.py`: a test that takes too long ends its process, which counts as a failure.

With pytest-xdist, another worker goes on with the tests after it.
"""

import signal

SECONDS_PER_TEST = 120


def pytest_runtest_setup() -> None:
    """Starts the alarm, whose default is to end the process, even one that runs compiled code."""
    signal.alarm(SECONDS_PER_TEST)


def pytest_runtest_teardown() -> None:
    """Stops the alarm."""
    signal.alarm(0)
