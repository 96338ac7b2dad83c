"""--help: all flags of a command by group, the named methods' hyperparameters, and where defaults come from."""

import re

import pytest
from commands import call

from pfljax import cli
from pfljax.cli import compare, estimate, methods, report, scaling, train, watch
from pfljax.cli.flag_help import HELP
from pfljax.cli.help import WIDTH
from pfljax.cli.settings import read
from pfljax.settings.method import METHODS


@pytest.mark.parametrize("module", [train, compare, scaling])
def test_every_flag_is_shown_with_its_default_and_hyperparameters_of_the_named_methods_only(module):
    text = call(module.COMMAND, "--help")
    shown = set(re.findall(r"^  --([\w.]+)$", text, re.MULTILINE))
    registry = read(module.define, [])
    named = registry["methods"].value if "methods" in registry else [registry["method"].value]
    owner = {
        flag.name: head for head, group in registry.flags_by_module_dict().items() for flag in group
    }
    assert shown == {
        name for name in registry if owner[name] not in METHODS or owner[name] in named
    }
    heads = [
        text.index(f"\n{head}\n") for head in ("Training", "Data", "Execution", "Runs and output")
    ]
    assert heads == sorted(heads)
    assert "--method" in text and "=NAME --help" in text


def entries(text):
    """The texts of --help by flag, each in one line."""
    found = re.findall(r"^  --([\w.]+)\n((?: {6}.*\n)+)", text, re.MULTILINE)
    return {name: " ".join(body.split()) for name, body in found}


def test_defaults_accepted_values_and_where_they_come_from():
    text = call(train.COMMAND, "--help", "--method=fedem", "--batch_size=4")
    shown = entries(text)
    assert shown["train_examples"].endswith(" Default: 15 (digits.flags).")
    assert "digits.flags has the defaults for --dataset=digits" in text
    assert shown["batch_size"].endswith(" Here: 4.")
    assert (
        shown["fedem.components"].endswith(" Default: 3.")
        and "federico_friends.epsilon" not in shown
    )
    assert "Choices: own, shuffled. " in shown["targets"]
    assert "Accepted: whole numbers of 1 or more. " in shown["rounds"]
    shown = entries(call(train.COMMAND, "--dataset=synthetic", "-h"))
    assert shown["num_clients"].endswith(" Default: 300 (synthetic.flags).")
    assert shown["federico_friends.epsilon"].endswith(" Accepted: 0 to 1. Default: 0.3.")


def test_long_lists_break_at_commas_and_marks_are_in_quotes():
    text = call(train.COMMAND, "--help", "--decimal=,")
    rates = re.search(r"  --learning_rates\n((?: {6}.*\n)+)", text)[1].splitlines()
    assert all(len(line) <= WIDTH for line in rates)
    assert all(line[-1] in ",." or " " in line.strip() for line in rates)
    assert not any(re.search(r"\d\.$|^ *\d", line) for line in rates[:-1])
    shown = entries(text)
    assert shown["decimal"].endswith(" Here: ','.")
    assert entries(call(train.COMMAND, "--help"))["decimal"].endswith(" Default: a point.")
    assert "--aggregator=trimmed_mean, krum, multi_krum, bulyan or dnc." in shown["server_trim"]
    assert "Accepted: an integer of at most 64 bits." in shown["ignored_index"]


@pytest.mark.parametrize("module", [train, compare, scaling, estimate, methods, report, watch])
def test_texts_are_for_the_command_line(module):
    """They have one default at most, and nothing of Python."""
    methods = f"--methods={','.join(METHODS)}"
    words = [methods] if module in (compare, scaling, estimate) else []
    shown = entries(call(module.COMMAND, "--help", *words))
    for name, text in shown.items():
        assert text.count("Default: ") + text.count("Here: ") == (name != "folder"), (name, text)
        wrong = re.findall(r"\bNone\b|function of|`|\bTrue\b(?! or test)|\bFalse\b|empty", text)
        assert not wrong or text.endswith("Default: empty."), (name, text)


def test_every_flag_has_a_text_of_its_own():
    """Those in the table are flags of a command, and a command's flags have a text that says something."""
    names = set()
    for module in (train, compare, scaling, estimate, methods, report, watch):
        registry = read(module.define, [])
        for name in registry:
            assert len(str(registry[name].help).split()) > 1, name
        names |= {*registry}
    assert HELP.keys() <= names


def test_the_commands_are_listed(capsys):
    for words, code in ((["--help"], 0), ([], 0), (["trian"], 2)):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        out, err = capsys.readouterr()
        assert (end.value.code or 0) == code
        assert all(name in out + err for name in ("train", "compare", "scaling"))
