"""Wrong flags of every command: each is refused in one line with exit code 2 that names the flag, and begins nothing.

The command lines are made from the declarations; see `tests/mistakes.py`. Texts that may be accepted are played up to
where the command would train.
"""

import pytest
from mistakes import COMMANDS, wrong_commands
from outcomes import refused
from samples import check, order, sample

from pfljax.folder import planned

PARTS = 8  # into which each command's cases are divided


def by_kind(wrong):
    return wrong.kind


def by_both(wrong):
    return wrong.name, wrong.kind


def play(cases, folder):
    """Plays command lines; each is refused as it must be, and begins nothing."""
    for number, wrong in enumerate(cases):
        module, cheap = COMMANDS[wrong.name]
        out = folder / str(number)
        line = refused(module.COMMAND, [f"--out={out}", *cheap, *wrong.flags])
        if wrong.words is not None:
            assert line is not None, f"accepted: {wrong}"
            assert line.startswith(f"--{wrong.flag}") and wrong.words in line, f"{wrong}: {line}"
        # which scaling says of each
        none_fits = line is not None and "no cell can be measured" in line
        listed = line is None and {path.name for path in out.rglob("*")} <= {planned.NAME}
        assert none_fits or listed or not out.exists(), f"begun: {wrong}"


def test_a_wrong_flag_of_each_kind_is_refused(tmp_path):
    play(sample(wrong_commands(), by_kind, share=0), tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("name", COMMANDS)
def test_a_sample_of_wrong_flags_is_refused(name, tmp_path):
    play([wrong for wrong in sample(wrong_commands(), by_both) if wrong.name == name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_flags_are_refused(name, part, tmp_path):
    cases = [wrong for wrong in wrong_commands() if wrong.name == name]
    play([wrong for wrong in cases if order(wrong) % PARTS == part], tmp_path)


def test_the_campaign_is_large():
    cases = wrong_commands()
    assert len(cases) == len({*map(str, cases)}) >= 7000
    assert {wrong.name for wrong in cases} == {*COMMANDS}
    assert sum(wrong.words is not None for wrong in cases) >= 6000
    check(cases, sample(cases, by_both), by_both)
