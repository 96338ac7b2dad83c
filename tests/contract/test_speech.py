"""The library's lines: records of one logger."""

import logging

import pytest

from pfljax.contract import speech
from pfljax.contract.errors import ArgumentError


def test_nothing_is_shown_unless_logging_is_set_up(capfd):
    logging.getLogger("pfljax.training").info("  round 1 of 2")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_lines_go_to_a_function_until_the_block_ends():
    lines = []
    with speech.lines_to(lines.append):
        logging.getLogger("pfljax.training").info("round %d", 3)
        speech.logger.debug("a detail")
    speech.logger.info("after it")
    assert lines == ["round 3"]


def test_an_exception_of_the_function_reaches_the_caller():
    def refuse(line):
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match="enough"), speech.lines_to(refuse):
        speech.logger.info("enough")


def test_a_room_can_be_filtered():
    lines = []
    with speech.lines_to(lines.append), speech.only("pfljax.training", lambda line: "b" in line):
        for text in ("a", "b"):
            logging.getLogger("pfljax.training").info(text)
        speech.logger.info("a")
    assert lines == ["b", "a"]


def test_the_former_argument_gets_the_lines_of_its_call():
    @speech.with_former_say
    def work(number):
        speech.logger.info("working on %d", number)
        return number

    lines = []
    with pytest.warns(FutureWarning, match="say is deprecated"):
        assert work(2, say=lines.append) == 2
    assert work(3) == 3
    assert lines == ["working on 2"]
    with pytest.raises(ArgumentError, match="say=no: accepted: a function"):
        work(1, say="no")
