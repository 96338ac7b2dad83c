"""What a command says while it works."""

import time

import pytest

from pfljax.training import progress


@pytest.mark.parametrize(("seconds", "said"), [(0.0, ["  compiling ..."]), (60.0, [])])
def test_a_step_is_told_once_it_takes_long(monkeypatch, seconds, said):
    monkeypatch.setattr(progress, "SLOW_SECONDS", seconds)
    lines = []
    with progress.announced("compiling", lines.append):
        until = time.monotonic() + 30
        while said and not lines and time.monotonic() < until:
            time.sleep(0.01)
    assert lines == said
