"""Hyperparameters that a method no longer has: one line says what has become of them."""

import pytest
from commands import call, one_line

import pfljax as pfl
from pfljax.cli import train
from pfljax.settings import recorded

NOW = "federico is now Algorithm 1 of its paper; the former default, rule=friends, is federico_friends"


def test_python_says_where_the_former_rule_is():
    with pytest.raises(pfl.ArgumentError) as error:
        pfl.FedeRiCo(rule="friends")
    assert str(error.value) == f"federico.rule=friends: {NOW}"
    with pytest.raises(
        pfl.ArgumentError, match=r"^federico\.effective_examples=2\.0: all examples"
    ):
        pfl.FedeRiCo(effective_examples=2.0)
    with pytest.raises(pfl.ArgumentError, match=r"^federico\.rul=1: unknown argument; accepted: "):
        pfl.FedeRiCo(rul=1)


def test_the_command_line_says_where_the_former_rule_is():
    line = one_line(call(train.COMMAND, "--method=federico", "--federico.rule=friends", code=2))
    assert line.endswith(NOW) and "--federico.rule" in line


def test_a_record_of_the_former_method_is_refused_in_one_line():
    record = recorded.recorded(pfl.FedeRiCo(neighbors=1))
    record["fields"]["rule"] = "friends"
    with pytest.raises(pfl.ArgumentError, match=r"^method: .*has changed .*federico_friends.*$"):
        recorded.restored(record, "method")


def test_a_former_name_of_literal_works():
    with pytest.warns(FutureWarning, match=r"^federico\.faithful is now federico\.literal$"):
        assert pfl.FedeRiCo(faithful=True) == pfl.FedeRiCo(literal=True)
