"""What a command says while it works."""

import sys
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


def test_a_notebook_without_widgets_gets_lines(monkeypatch):
    """rich's bar would warn in each run that a package is missing."""
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(progress, "_bar", lambda total, done: pytest.fail("a bar"))
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    lines = []
    with progress.progress(2, 0, lines.append, bar=True) as advance:
        advance(1)
    assert len(lines) == 1 and "1" in lines[0]
