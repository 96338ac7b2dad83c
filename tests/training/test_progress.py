"""What a run shows of its progress, and its seconds by part."""

import sys
import time

import pytest

from pfljax.training import progress


@pytest.mark.parametrize(("seconds", "told"), [(0.0, ["  compiling ..."]), (60.0, [])])
def test_a_step_is_told_once_it_takes_long(monkeypatch, said, seconds, told):
    monkeypatch.setattr(progress, "SLOW_SECONDS", seconds)
    with progress.announced("compiling"):
        until = time.monotonic() + 30
        while told and not said and time.monotonic() < until:
            time.sleep(0.01)
    assert said == told


def test_a_notebook_without_widgets_gets_lines(monkeypatch, said):
    """rich's bar would warn in each run that a package is missing."""
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    display = progress.Display(bar=True)
    with display.rounds(total=2, done=0):
        display.advance(1, left=90)
    assert len(said) == 1
    assert said[0].startswith("  round 1 of 2, ") and said[0].endswith(", 90 s left")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "less than 1 s left"),
        (119.4, "119 s left"),
        (600.0, "10 min left"),
        (9000.0, "2.5 h left"),
    ],
)
def test_the_time_left_is_never_0(seconds, text):
    assert progress.text_of_left(seconds) == text


def test_seconds_add_up_by_part():
    seconds = progress.Seconds()
    seconds.add("evaluation", 2.0)
    seconds.add("evaluation", 3.0)
    assert seconds.total == {"evaluation": 5.0} and seconds.last == {"evaluation": 3.0}
    by_part = {"rounds": 1.0, "evaluation": 5.0, "other": 4.0, "total": 10.0}
    assert progress.described(by_part) == "10.0 s: rounds 1.0, evaluation 5.0, other 4.0"


@pytest.mark.parametrize("ends_in_step", [True, False])
def test_a_bar_shows_the_round_and_then_the_step(monkeypatch, capsys, ends_in_step):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    display = progress.Display(bar=True)
    with display.rounds(total=3, done=0):
        display.advance(2, left=0.2)
        with display.step("evaluating 5,000 clients"):
            pass
        if not ends_in_step:
            display.advance(3, left=0.0)
    shown = capsys.readouterr().out
    expected = "evaluating 5,000 clients" if ends_in_step else "round 3/3"
    assert expected in shown and "0 s left" not in shown
