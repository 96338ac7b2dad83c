"""Names of flags: those of the library's fields and arguments. Former names still work, and say what they are now."""

import importlib
import typing
from collections.abc import Mapping

import pytest
from absl import flags
from commands import call, one_line, refused

import pfljax as pfl
from pfljax import cli, data
from pfljax.cli import build, compare, estimate, scaling, train
from pfljax.cli.names import FORMER, LIBRARY
from pfljax.cli.settings import FlagError, parse, read
from pfljax.data import partitions, sources
from pfljax.folder import files
from pfljax.settings.fields import Field, fields_of
from pfljax.settings.method import METHODS

SMALL = (
    "--method=local",
    "--num_clients=4",
    "--rounds=2",
    "--eval_every=2",
    "--hidden=4",
    "--plan=map",
)
DEFINED = [train.define, compare.define, scaling.define, estimate.define]
# Flags of version 0.2 that have another name now; a command line with one of them must go on working.
OF_0_2 = (
    *("algorithm", "algorithms", "local_epochs", "local_steps"),
    *("dp_noise_multiplier", "dp_clip_norm", "dp_delta", "noise_seed"),
    *(
        "client_dp_noise_multiplier",
        "client_dp_clip_norm",
        "client_dp_mechanism",
        "client_dp_adaptive_quantile",
    ),
    *("client_dp_clip_rate", "client_dp_count_noise", "client_dp_delta", "client_dp_noise_seed"),
    *("sampler_candidates", "aggregator_trim", "attack", "compress", "compress_download"),
    *("dropout_clients", "lost_uploads", "broken_uploads", "on_divergence"),
    *("num_distributions", "balanced_groups", "dirichlet_alpha", "classes_per_client"),
    *(
        "text_stride",
        "label_column",
        "client_column",
        "feature_columns",
        "categorical_columns",
        "text_column",
    ),
    *(
        "test_column",
        "image_column",
        "image_size",
        "image_shape",
        "missing_values",
        "synthetic.labels",
    ),
    "unseen_clients",
    "tune_knobs",  # former name
)


def takes(field: Field, kind: type) -> bool:
    """Whether an argument accepts objects of a class."""
    return kind in (field.hint, *typing.get_args(field.hint))


def owners(declaring: typing.Any) -> set[str]:
    """The words under which Python code passes what has these fields or arguments, besides none."""
    # the flags of partitions are also those of data with groups of their own
    if declaring in sources.SOURCES.values():
        return {"data", "partition", declaring.__name__}
    if not isinstance(declaring, type):
        return set()
    if issubclass(declaring, partitions.Partition):
        return {"partition"}
    passed = {**fields_of(pfl.LocalTraining), **fields_of(pfl.Run)}
    return {name for name, field in passed.items() if takes(field, declaring)}


@pytest.mark.parametrize("declaring", LIBRARY, ids=lambda declaring: declaring.__qualname__)
def test_owners_are_the_words_of_python(declaring):
    listed = [name for names in LIBRARY[declaring].values() for name in names]
    assert {*listed} <= fields_of(declaring).keys() and len({*listed}) == len(listed)
    assert LIBRARY[declaring].keys() - {""} <= owners(declaring)


@pytest.mark.parametrize("define", DEFINED, ids=lambda define: define.__module__)
def test_a_flag_has_the_name_of_its_field_or_that_of_its_owner_before_it(define):
    settings = parse(define, [])
    for argument, flag in settings.flag_of.items():
        owner, dot, field = argument.rpartition(".")
        assert flag == f"{owner}_{field}" if dot else flag == field or flag.endswith(f"_{field}"), (
            argument,
            flag,
        )
    by_owner = {flag for argument, flag in settings.flag_of.items() if "." in argument}
    by_field = {flag for argument, flag in settings.flag_of.items() if argument == flag}
    assert {*settings.flag_of.values()} == by_owner | by_field
    for flag, heading in settings.headings.items():
        if heading in METHODS:
            method, _, hyperparameter = flag.partition(".")
            assert method == heading and hyperparameter in fields_of(METHODS[heading])


def test_fields_of_one_name_have_flags_of_their_own():
    assert parse(train.define, []).flag_of["privacy.clip_norm"] == "privacy_clip_norm"
    for owner in ("privacy", "client_privacy"):
        words = (*SMALL, f"--{owner}_noise_multiplier=1")
        line = one_line(call(train.COMMAND, *words, code=2))
        assert line.startswith(f"--{owner}_noise_multiplier=1.0: needs a finite clip_norm")


def test_a_field_of_an_attack_is_not_an_argument_of_the_table(tmp_path):
    words = ("--methods=fedavg", "--num_clients=4", "--attack_kind=backdoor", "--attack_target=10")
    assert "accepted: a class, 0 to 9" in refused(compare.COMMAND, tmp_path / "out", *words)


def written(flag: flags.Flag) -> str:
    """Text that a flag accepts: its default, or 1."""
    if flag.default is None:
        return "1"
    return ",".join(flag.default) if isinstance(flag.default, list) else str(flag.default)


@pytest.mark.parametrize("old", OF_0_2)
def test_a_former_name_is_the_same_flag(old, capsys):
    new = FORMER[old]
    in_tables = ("algorithms", "tune_knobs")  # former name
    define = compare.define if old in in_tables else train.define
    registry = read(define, [])
    assert old not in registry
    value = written(registry[new])
    settings = parse(define, [f"--{old}={value}", "--rounds=2"])
    assert capsys.readouterr().err == f"note: --{old} is now --{new}\n"
    expected = parse(define, [f"--{new}={value}", "--rounds=2"])
    assert capsys.readouterr().err == ""
    assert settings.values == expected.values and settings.on_command_line == {new, "rounds"}


def test_no_name_is_both_former_and_present():
    assert {*OF_0_2} == FORMER.keys()
    for define in DEFINED:
        assert not FORMER.keys() & {*read(define, [])}


def test_a_former_name_is_noted_once_wherever_it_is(tmp_path, capsys):
    (tmp_path / "my.flags").write_text("--local_epochs=4\n--nobalanced_groups\n")
    words = [
        "--local_epochs=2",
        f"--flagfile={tmp_path / 'my.flags'}",
        "-num_distributions",
        "3",
    ]
    settings = parse(train.define, words)
    notes = "note: --local_epochs is now --epochs\n"
    notes += "note: --balanced_groups is now --partition_balanced\n"
    notes += "note: --num_distributions is now --partition_groups\n"
    assert capsys.readouterr().err == notes
    # the last one, as of any flag
    assert (settings.epochs, settings.partition_balanced, settings.partition_groups) == (
        4,
        False,
        3,
    )


@pytest.mark.parametrize(
    ("define", "words", "line"),
    [
        (
            compare.define,
            ["--algorithms=local", "--methods=fedavg"],
            "--algorithms: is now --methods; accepted: only one of --algorithms and --methods",
        ),
        (
            train.define,
            ["--epochs=5", "--local_epochs", "2"],
            "--local_epochs: is now --epochs; accepted: only one of --epochs and --local_epochs",
        ),
        (
            train.define,
            ["--ditto.strength=1", "--ditto.mu=2"],
            "--ditto.strength: is now --ditto.mu; accepted: only one of ",
        ),
    ],
)
def test_a_flag_under_both_names_is_refused(define, words, line):
    with pytest.raises(FlagError) as caught:
        parse(define, words)
    assert str(caught.value).startswith(line)


def test_a_flag_file_may_have_the_former_name_of_a_flag_on_the_command_line(tmp_path):
    (tmp_path / "my.flags").write_text("--local_epochs=4\n")
    words = [f"--flagfile={tmp_path / 'my.flags'}", "--epochs=5"]
    assert parse(train.define, words).epochs == 5


def test_hyperparameters_keep_their_former_names(capsys):
    settings = parse(train.define, ["--method=ditto", "--ditto.strength=0.5"])
    assert settings["ditto.mu"] == 0.5
    assert capsys.readouterr().err == "note: --ditto.strength is now --ditto.mu\n"


def test_case_does_not_matter_in_names(capsys):
    words = ["--method=FedPer", "--dataset=Digits", "--model=MLP", "--partition=Dirichlet"]
    words += ["--metrics=F1,AUROC", "--FedPer.personal_layers=2", "--learning_rates=FedPer:0.5"]
    settings = parse(train.define, words)
    assert (settings.method, settings.dataset, settings.model) == ("fedper", "digits", "mlp")
    assert (settings.partition, settings.metrics) == ("dirichlet", ["f1", "auroc"])
    assert settings["fedper.personal_layers"] == 2
    assert settings.for_method("fedper").learning_rate == 0.5
    table = parse(compare.define, ["--methods=FedAvg,LOCAL", "--reference=Local"])
    assert (table.methods, table.reference) == (["fedavg", "local"], "local")
    assert capsys.readouterr().err == ""


def test_mistakes_name_the_present_flag():
    for word, line in (
        ("--num_distributions=0", "--partition_groups=0: accepted: whole numbers of 1 or more"),
        (
            "--num_distribution=2",
            "--num_distribution: unknown flag; did you mean --partition_groups?",
        ),
        (
            "--partition_group=2",
            "--partition_group: unknown flag; did you mean --partition_groups, ",
        ),
    ):
        with pytest.raises(FlagError) as caught:
            parse(train.define, [word])
        assert str(caught.value).startswith(line)


def test_help_has_present_names_only():
    text = call(train.COMMAND, "--help")
    assert (
        not [old for old in FORMER if f"  --{old}\n" in text] and "  --partition_groups\n" in text
    )


@pytest.mark.parametrize("old", cli.FORMER)
def test_a_command_keeps_its_former_name(old, capsys):
    new = cli.FORMER[old]
    said = {}
    for name in (old, new):
        with pytest.raises(SystemExit) as end:
            cli.main([name, "--help"])
        assert not end.value.code
        said[name] = capsys.readouterr()
    assert said[old].out == said[new].out and said[new].err == ""
    assert said[old].err == f"note: pfljax {old} is now pfljax {new}\n"
    assert new in cli.COMMANDS and old not in cli.COMMANDS
    importlib.import_module(f"pfljax.cli.{new}")


def as_recorded_before(values: Mapping[str, typing.Any], dashes: str = "") -> dict[str, typing.Any]:
    """Values of flags under the names that they had in version 0.2."""
    old = {f"{dashes}{new}": f"{dashes}{former}" for former, new in FORMER.items()}
    return {old.get(name, name): value for name, value in values.items()}


@pytest.fixture
def run_of_before(tmp_path, monkeypatch):
    """Folder of a run whose files have the names of version 0.2, and the flags that it was trained with."""
    config = build.config

    def old_config(*args):
        found = config(*args)
        renamed = {
            "flags": as_recorded_before(found["flags"]),
            "settings": as_recorded_before(found["settings"], "--"),
        }
        return found | renamed

    words = (*SMALL, "--partition_groups=2", "--epochs=2", f"--out={tmp_path / 'run'}")
    with monkeypatch.context() as patched:
        patched.setattr(build, "config", old_config)
        call(train.COMMAND, *words)
    recorded = files.read_json(tmp_path / "run" / "config.json")
    assert (
        recorded["flags"]["num_distributions"] == 2
        and recorded["settings"]["--algorithm"] == "local"
    )
    return tmp_path / "run", words


@pytest.mark.slow
def test_a_run_of_before_is_loaded_and_resumed(run_of_before):
    """Settings are compared if both runs have them, so a renamed one is not: data and program are, by their digests."""
    out, words = run_of_before
    found = pfl.load(out)
    assert (found.experiment.local.epochs, found.experiment.name) == (2, "local")
    assert (
        found.experiment.federation.train.size.sum()
        == data.digits(4, train_examples=15).train.size.sum()
    )
    line = one_line(
        call(train.COMMAND, *words, "--partition_groups=1", "--rounds=4", "--resume", code=2)
    )
    assert line.startswith(f"--resume: {out} was run on other data")
    line = one_line(call(train.COMMAND, *words, "--epochs=3", "--rounds=4", "--resume", code=2))
    assert line.startswith(f"--resume: {out} was run by another program")
    call(train.COMMAND, *words, "--rounds=4", "--resume")
    assert files.read_json(out / "summary.json")["last"]["round"] == 4
    assert "--method" in files.read_json(out / "config.json")["settings"]


@pytest.mark.slow
def test_a_cell_of_before_is_not_measured_again(tmp_path):
    words = (
        "--methods=fedavg",
        "--num_clients=4",
        "--hidden=4",
        "--shape=4,4,1",
        "--train_examples=6",
        "--rounds=2",
    )
    words = (*words, "--devices=1", "--plan=map", f"--out={tmp_path}")
    call(scaling.COMMAND, *words)
    (path,) = tmp_path.glob("cells/*/cell.json")
    cell = files.read_json(path)
    files.write_json(path, cell | {"settings": as_recorded_before(cell["settings"], "--")})
    assert "already finished" in call(scaling.COMMAND, *words)
    refusal = one_line(call(scaling.COMMAND, *words, "--epochs=2", code=2))
    assert "--epochs was 1 and is 2" in refusal
