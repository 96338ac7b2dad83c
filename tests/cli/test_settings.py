"""Settings: the values of flags after presets, never changed; and the flags of methods and models of one's own."""

import dataclasses
import os
import shlex
import sys
from unittest import mock

import pytest

from pfljax import data
from pfljax.cli import build, compare, flags, train
from pfljax.cli.settings import PRESETS, FlagError, parse, read
from pfljax.contract.errors import ArgumentError
from pfljax.evaluation.statistics import Trial
from pfljax.settings.method import METHODS


def of(*words, define=train.define):
    return parse(define, words)


def test_values_are_items_and_attributes_and_know_whether_they_were_given():
    settings = of("--rounds=3", "--federico.epsilon=0.5", "--noresume")
    assert settings.rounds == settings["rounds"] == 3 and settings["federico.epsilon"] == 0.5
    assert (
        settings.present("rounds") and settings.present("resume") and not settings.present("seed")
    )
    assert "federico.epsilon" in settings and "epsilon" not in settings
    with pytest.raises(AttributeError, match="epsilon"):
        _ = settings.epsilon


def test_other_values_are_other_settings():
    settings = of("--rounds=3")
    other = settings.replace({"fedem.components": 5}, rounds=4)
    assert (other.rounds, other["fedem.components"]) == (4, 5)
    assert (settings.rounds, settings["fedem.components"]) == (3, METHODS["fedem"]().components)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.values = {}
    with pytest.raises(TypeError):
        settings.values["rounds"] = 5
    with pytest.raises(KeyError, match="round"):
        settings.replace(round=3)


def test_a_preset_gives_way_to_the_command_line(tmp_path):
    path = tmp_path / "x.flags"
    path.write_text(
        "# a result\n--learning_rate=0.25\n--rounds=7\n--fedem.components=5\n--nostandardize\n"
    )
    settings = of("--rounds=3").with_preset(path)
    assert (settings.learning_rate, settings.rounds, settings["fedem.components"]) == (0.25, 3, 5)
    assert settings.standardize is False
    assert settings.with_preset(tmp_path / "none.flags") is settings


def test_flag_files_count_as_the_command_line(tmp_path):
    path = tmp_path / "x.flags"
    path.write_text("--train_examples=9\n")
    settings = of(f"--flagfile={path}").with_defaults(["federico"])
    assert settings.present("train_examples") and settings.train_examples == 9


@pytest.mark.parametrize(
    ("words", "methods", "file", "values"),
    [
        (
            [],
            ["federico"],
            "digits.flags",
            {"train_examples": 15, "keep_optimizer": True, "partition_groups": 2},
        ),
        (
            ["--train_examples=7"],
            ["local"],
            "digits.flags",
            {"train_examples": 7, "keep_optimizer": True},
        ),
        (
            [],
            ["local", "fedfomo"],
            "digits-validated.flags",
            {"train_examples": 25, "partition_groups": 5, "validation_fraction": 0.2},
        ),
        (
            ["--partition=latent"],
            ["local"],
            "digits-latent.flags",
            {"train_examples": 50, "validation_fraction": 0.0},
        ),
        (
            ["--partition=latent", "--validation_fraction=0.5"],
            ["fedfomo"],
            "digits-latent.flags",
            {"train_examples": 50, "validation_fraction": 0.5, "weight_decay": 1e-4, "epochs": 5},
        ),
        (
            ["--partition=pairs"],
            ["pfedmb"],
            "digits-pairs.flags",
            {"train_examples": 30, "rounds": 20},
        ),
        (["--dataset=sine"], ["local"], "sine.flags", {"learning_rate": 0.01, "num_clients": 10}),
        (
            ["--dataset=synthetic"],
            ["fedem"],
            "synthetic.flags",
            {"num_clients": 300, "lr_schedule": "multistep"},
        ),
        (["--dataset=text"], ["fedem"], "text.flags", {"data_stride": 80, "official_test": True}),
        (["--dataset=npz"], ["fedem"], "", {"rounds": 150, "validation_fraction": 0.0}),
        (["--dataset=npz"], ["fedfomo"], "", {"rounds": 150, "validation_fraction": 0.2}),
        (["--dataset=tfds:emnist/byclass"], ["fedem"], "", {"rounds": 150}),
    ],
)
def test_the_data_set_and_the_methods_decide_the_preset(words, methods, file, values):
    settings = of(*words).with_defaults(methods)
    assert settings.defaults == file
    assert {name: settings[name] for name in values} == values


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.flags")), ids=lambda path: path.stem)
def test_every_preset_says_what_it_is_and_is_read_by_train_and_compare(path):
    assert path.read_text().startswith("# ")
    dataset, _, kind = path.stem.partition("-")
    assert not kind or kind in (*flags.PARTITIONS, "validated")
    for define in (train.define, compare.define):
        found = read(define, [f"--flagfile={path}"])
        assert any(found[name].present for name in found) and not found["dataset"].present
    assert dataset in str(found["dataset"].help)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--round=3"], "--round: unknown flag; did you mean --rounds?"),
        (["--quux"], "--quux: unknown flag; --help lists all flags"),
        (["--ditto.lam=1"], "--ditto.lam: unknown flag; did you mean --ditto.mu?"),
        (["--lr=1"], "--lr: unknown flag; did you mean --learning_rate?"),
        (["--mu=1", "--method=Ditto"], "--mu: unknown flag; did you mean --ditto.mu?"),
        (["--mu=1"], "--mu: unknown flag; did you mean --fedprox.mu, --"),
        (
            ["--plan=Vmapp"],
            "--plan=Vmapp: accepted: auto, vmap, map, chunk, python; did you mean vmap?",
        ),
        (["rounds=3"], "rounds=3: not a flag; flags start with --"),
        (["--rounds=many"], "--rounds=many: accepted: whole numbers of 1 or more"),
        (["--federico.tracking=median"], "--federico.tracking=median: accepted: ema, accumulated"),
        (["--resume=maybe"], "--resume=maybe: accepted: true, false"),
        (["--flagfile=nowhere.flags"], "--flagfile=nowhere.flags: cannot be read (No such file"),
    ],
)
def test_mistakes_are_one_line(words, line):
    with pytest.raises(FlagError) as caught:
        of(*words)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_flag_files_hold_flags_and_other_flag_files(tmp_path):
    (tmp_path / "inner.flags").write_text("# a comment\n\n--rounds=3\n// another\n  --seed=4\n")
    (tmp_path / "outer.flags").write_text(f"--flagfile={tmp_path / 'inner.flags'}\n--seed=5\n")
    for words in (
        [f"--flagfile={tmp_path / 'outer.flags'}"],
        ["-flagfile", str(tmp_path / "outer.flags")],
    ):
        settings = of("--rounds=2", *words)
        assert (settings.rounds, settings.seed) == (3, 5)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\x7fELF\xd0\xff", "is not UTF-8 text"),
        (None, "Not a regular file"),
        (b"--flagfile={}", "the file includes itself"),
        (b"--flagfile=", "cannot be read"),
        (b"rounds=3", "rounds=3: not a flag"),
        (b"--rounds=3\0", "is not UTF-8 text (it has null bytes"),
    ],
)
def test_flag_files_that_are_none_are_mistakes(tmp_path, content, line):
    path = tmp_path / "my.flags"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content.replace(b"{}", str(path).encode()))
    with pytest.raises(FlagError) as caught:
        of(f"--flagfile={path}")
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_is_one_that_a_shell_reads(monkeypatch):
    words = [
        "pfljax",
        "train",
        "--out=my run's; rm -rf $HOME",
        "--data_file=a b.npz",
        "--hidden=4,4",
    ]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pfljax", *words[1:]])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert shlex.split(build.command()) == words
    assert build.command().endswith("--hidden=4,4")  # no quotes where there need not be any
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", mock.Mock())
    sys.modules["__main__"].__spec__.name = "experiments.fedem.table2"
    assert shlex.split(build.command())[:3] == ["python", "-m", "experiments.fedem.table2"]


def test_hyperparameters_of_other_methods_are_mistakes():
    settings = of("--federico.epsilon=0.5")
    settings.check_hyperparameters(["local", "federico"])
    with pytest.raises(
        FlagError,
        match=r"--federico\.epsilon: not a hyperparameter of this run's methods \(local\)",
    ):
        settings.check_hyperparameters(["local"])


def test_tune_needs_no_value():
    for words in (["--tune"], ["--tune", "--rounds=3"], ["--rounds=3", "-tune"]):
        assert of(*words, define=compare.define).numbers("tune", float) == [
            0.01,
            0.03,
            0.1,
            0.3,
            1,
            3,
        ]
    assert of("--tune", "0.5", define=compare.define).numbers("tune", float) == [0.5]


def test_a_method_has_the_rate_that_is_given_for_it():
    words = ["--learning_rates=fedavg:0.5,local:2"]

    def rate(settings, name):
        return settings.for_method(name).learning_rate

    settings = of(*words)
    assert [rate(settings, name) for name in ("fedavg", "local", "ditto")] == [0.5, 2.0, 0.01]
    assert rate(of(*words, "--learning_rate=0.3"), "fedavg") == 0.3  # of the command line, for all
    for wrong in ("fedavg", "fedavg:x", "fedavg:0", "fedavk:1"):
        with pytest.raises(
            FlagError, match=f"^--learning_rates={wrong}: accepted: pairs such as fedavg:0.1"
        ):
            of(f"--learning_rates={wrong}").for_method("local")


def test_a_later_preset_has_one_rate_for_all(tmp_path):
    (tmp_path / "first.flags").write_text("--learning_rates=fedavg:0.5")
    (tmp_path / "second.flags").write_text("--learning_rate=0.2")
    settings = of().with_preset(tmp_path / "first.flags")
    assert settings.for_method("fedavg").learning_rate == 0.5
    assert settings.with_preset(tmp_path / "second.flags").for_method("fedavg").learning_rate == 0.2


def test_options_of_other_data_sets_are_mistakes():
    given = "--synthetic_labels=published"
    settings = of("--dataset=synthetic", "--num_clients=2", given)
    settings.check_hyperparameters(["local"])
    assert build.build_source(settings, 0).name == "synthetic, published labels"
    with pytest.raises(
        FlagError,
        match=r"--synthetic_labels: does not apply here: accepted with --dataset=synthetic",
    ):
        of(given).check_read()
    assert build.build_source(of(), 0).name == "digits"


def test_class_weights_are_those_of_the_clients_labels():
    words = ["--partition=pathological", "--num_clients=3"]
    clients = build.build_clients(of(*words), 0)

    def weights_of(*more):
        return build.build_run(
            of(*words, *more), "local", clients, Trial(0)
        ).experiment.local.class_weights

    assert weights_of() is None
    weights = weights_of("--class_weights=inverse")
    assert weights == data.inverse_frequency_weights(clients[0]) and len(set(weights)) > 1
    with pytest.raises(
        ArgumentError,
        match="class_weights=inverse: uses clients' label counts, which are not private",
    ):
        weights_of(
            "--class_weights=inverse", "--privacy_noise_multiplier=1", "--privacy_clip_norm=1"
        )


def test_numbers_of_a_list():
    settings = of("--tune=0.1,1", "--seeds=0,1", define=compare.define)
    assert settings.numbers("tune", float) == [0.1, 1.0] and settings.numbers("seeds", int) == [
        0,
        1,
    ]
    for words, text in (
        (
            ["--tune=0.1,x"],
            "--tune=0.1,x: accepted: different numbers above 0, separated by commas, or none",
        ),
        (
            ["--seeds=0,1,0"],
            "--seeds=0,1,0: accepted: different whole numbers of 0 or more, separated by commas",
        ),
        (["--methods=local,,fedavg"], "--methods=local,,fedavg: accepted: different values"),
        (
            ["--tune=2", "--learning_rate=1"],
            "--learning_rate: does not apply here: --tune sets its values",
        ),
    ):
        with pytest.raises(FlagError) as caught:
            of(*words, define=compare.define).numbers("tune", float, sets="learning_rate")
        assert str(caught.value).startswith(text)


METHOD = '''
import dataclasses
from neighbor import DEFAULT
from pfljax.settings.method import hyperparameter, method

@method(keeps="nothing", travels="nothing")
@dataclasses.dataclass(frozen=True)
class Own{number}:
    """Own (Me, 2026): a test."""
    power: float = hyperparameter(DEFAULT, above=0, help="of it")
    def build(self, problem): ...

class Other: ...
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A file of a method with a hyperparameter, beside a file that it imports."""
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "neighbor.py").write_text("DEFAULT = 0.5")
    (tmp_path / "mine.py").write_text(METHOD.format(number=1))
    return tmp_path / "mine.py"


def test_a_method_of_one_s_own_comes_from_its_file_with_its_hyperparameters(own):
    settings = of(f"--method={own}:Own1", "--own1.power=2")
    assert settings.method == "own1" and settings["own1.power"] == 2.0
    settings = of("--methods", f"local,{own}:Own1", define=compare.define)
    assert settings.methods == ["local", "own1"] and settings["own1.power"] == 0.5


def test_files_of_one_name_in_two_folders_are_two_files(own, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.py").write_text(METHOD.format(number=2))
    (tmp_path / "b" / "neighbor.py").write_text("DEFAULT = 0.25")
    settings = of("--methods", f"{own}:Own1,{tmp_path}/b/mine.py:Own2,local", define=compare.define)
    assert settings.methods == ["own1", "own2", "local"]
    files = [sys.modules[METHODS[name].__module__].__file__ for name in ("own1", "own2")]
    assert files == [str(own), str(tmp_path / "b" / "mine.py")]
    # Each has its own neighbor, and its type hints come from its own module.
    assert (METHODS["own1"]().power, METHODS["own2"]().power) == (0.5, 0.25)


def test_a_class_that_has_another_one_s_name_is_refused(own, tmp_path):
    other = tmp_path / "other.py"
    for name, taken in (
        ("FedAvg", "fedavg: is the name of pfljax.algorithms.fedavg.FedAvg"),
        ("Own1", "own1: is the"),
    ):
        other.write_text(METHOD.replace("Own{number}", name))
        line = (
            other.read_text().splitlines().index('@method(keeps="nothing", travels="nothing")') + 1
        )
        before = METHODS["fedavg"]
        with pytest.raises(
            FlagError, match=rf"^--methods={other}:{name}: line {line} of other.py: name={taken}"
        ):
            of("--methods", f"fedavg,{own}:Own1,{other}:{name}", define=compare.define)
        assert METHODS["fedavg"] is before


def test_what_is_wrong_with_a_file_is_said(own, tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_like_it")
    for text, words in (
        (f"{own}:Other", "not a method"),
        (f"{own}:None1", "has no None1"),
        (f"{tmp_path}/nowhere.py:X", "no such file"),
        (f"{tmp_path}/broken.py:X", "ModuleNotFoundError: No module named 'nothing_like_it'"),
    ):
        with pytest.raises(FlagError, match="^--method=.*" + words):
            of(f"--method={text}")
