"""--help: all flags of a command by group, the named methods' knobs, and where defaults come from."""

import re

import pytest
from commands import call

from pfljax import cli
from pfljax.cli import compare, scaling, train
from pfljax.cli.settings import read
from pfljax.settings.method import METHODS


@pytest.mark.parametrize("module", [train, compare, scaling])
def test_every_flag_is_shown_with_its_default_and_knobs_of_the_named_methods_only(module):
    text = call(module.COMMAND, "--help")
    shown = set(re.findall(r"^  --([\w.]+)=", text, re.MULTILINE))
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


def test_defaults_accepted_values_and_where_they_come_from():
    text = call(train.COMMAND, "--help", "--method=fedem", "--batch_size=4")
    assert (
        "--train_examples=15  (digits.flags)" in text
        and "digits.flags has the defaults for --dataset=digits" in text
    )
    assert "--batch_size=4  (as given)" in text
    assert "--fedem.components=3" in text and "--federico.epsilon" not in text
    assert "accepted: own, shuffled" in text and "accepted: whole numbers of 1 or more" in text
    text = call(train.COMMAND, "--dataset=synthetic", "-h")
    assert "--num_clients=300  (synthetic.flags)" in text
    assert re.search(r"--federico.epsilon=0.3\n.*\n?.*accepted: 0 to 1", text)


def test_the_commands_are_listed(capsys):
    for words, code in ((["--help"], 0), ([], 0), (["trian"], 2)):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        out, err = capsys.readouterr()
        assert (end.value.code or 0) == code
        assert all(name in out + err for name in ("train", "compare", "scaling"))
