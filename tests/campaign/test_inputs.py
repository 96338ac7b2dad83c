"""Bad values of every flag of `train`, `compare` and `scaling`: refused in one line with exit code 2, before training.

The cases are made of the flags' types, so that a new flag is in the campaign by being registered. `compare` and
`scaling` read the flags that they share with `train` by the same declarations, so each of these gets two values there.
"""

import zlib

import pytest
from absl import flags
from outcomes import refused

from pfljax.cli import compare, scaling, train
from pfljax.cli.parsing import Several
from pfljax.contract.method import METHODS
from pfljax.folder import planned

HUGE = "99999999999999999999999"
NUMBERS = {"nan", "abc", "", "0x", "1,2", "1e", "--5"}
LISTS = {",", "1,,2"}  # of which no list accepts any
# A kind of flag -> values that it never accepts, and values that it may or may not accept.
VALUES = {
    "float": (NUMBERS | {"inf", "-inf", "1e400"}, {"-1", "-0.5", "1e-400", HUGE, "2.5", "0", "1e-30"}),
    "int": (NUMBERS | {"inf", "2.5", HUGE, f"-{HUGE}"}, {"-1", "0", "2147483647"}),
    "bool": ({"maybe", "2", "nan"}, set()),
    "string enum": ({"foo", "²", "nan"}, {""}),
    "string": (set(), {"", "foo", "²", "nan", "/", "/dev/null", ".", "a/b/c"}),
    "comma separated list of strings": (LISTS | {"abc", "²"}, {"", "0", "-1"}),
}
LISTED = {
    str: (LISTS, {"0", "-1", "nan", "abc", HUGE, "²"}),
    int: (LISTS | {"-1", "nan", "inf", "abc", "2.5", HUGE, "²", "1,x"}, {"0", "2147483647"}),
    float: (LISTS | {"nan", "inf", "abc", "1e400", "²", "1,x"}, {"-1", "0", HUGE}),
}
INFINITE = {
    "dp_clip_norm",
    "client_dp_clip_norm",
    "clock_deadline",
    "federico.effective_examples",
    "pfedhn.clip",
    "pefll.clip",
}
WITH = {  # flags under which another is read
    "lr_decay": "--lr_schedule=exponential",
    "momentum": "--optimizer=sgd",
    "channels": "--model=cnn",
    "embedding": "--partition=latent",
    "embedding_epochs": "--partition=latent",
    "classes_per_client": "--partition=pathological",
    "dirichlet_alpha": "--partition=dirichlet",
    "aggregator_trim": "--aggregator=krum",
    "sampler": "--participation=0.5",
    "sampler_candidates": "--sampler=power_of_choice --participation=0.5",
    "dp_delta": "--dp_noise_multiplier=1 --dp_clip_norm=1",
    "noise_seed": "--dp_noise_multiplier=1 --dp_clip_norm=1",
    "attackers": "--attack=noise",
    "error_feedback": "--compress=topk:0.5",
    "attack_strength": "--attack=noise",
    "chunk": "--plan=chunk",
    "dfedem.degree": "--dfedem.graph=random_regular",
}
# absl's own, and those that start other processes or say where files go.
LEFT_OUT = {"coordinator", "num_processes", "process_id", "out", "profile", "help", "helpfull", "helpshort", "helpxml"}
COMMANDS = {  # each with flags under which a case costs little
    "train": (train.COMMAND, []),
    "compare": (compare.COMMAND, ["--algorithms=local,fedavg", "--seeds=0"]),
    "scaling": (scaling.COMMAND, ["--algorithms=fedavg", "--num_clients=10", "--devices=1"]),
}


def values_of(flag):
    """The values that a flag never accepts, and those that it may or may not."""
    if not isinstance(flag.parser, Several):
        return VALUES[flag.flag_type()]
    never, perhaps = LISTED[flag.parser.kind]
    if flag.parser.words:
        never, perhaps = never | perhaps, set()
    never = never | ({"3,3"} if flag.parser.distinct and flag.parser.kind is not str else set())
    return (never, perhaps | {""}) if flag.parser.empty else (never | {""}, perhaps)


def registry_of(name):
    """The flags of a command."""
    registry = flags.FlagValues()
    COMMANDS[name][0].define(registry)
    return registry


OF_TRAIN = registry_of("train")


def played(name, flag, never, perhaps):
    """The values that a command's flag gets: a flag of `train` elsewhere one of each kind, which differ by flag."""
    if name == "train" or flag not in OF_TRAIN:
        return sorted(never | perhaps)
    turn = zlib.crc32(f"{name} {flag}".encode())
    return [sorted(kind)[turn % len(kind)] for kind in (never, perhaps) if kind]


def cases(name):
    """(name of the command, words, whether they must be refused); knobs of methods by `train` alone."""
    registry = registry_of(name)
    for group, found in registry.flags_by_module_dict().items():
        if group.startswith("absl") or (group in METHODS and name != "train"):
            continue
        for flag in found:
            never, perhaps = values_of(flag)
            method = [f"--algorithm={group}"] if group in METHODS else []
            others = WITH.get(flag.name, "--clock" * flag.name.startswith("clock_")).split()
            others = others if all(other.partition("=")[0].strip("-") in registry for other in others) else []
            for value in played(name, flag.name, never, perhaps) if flag.name not in LEFT_OUT else ():
                infinite = flag.name in INFINITE and value in ("inf", "1e400")
                yield name, [f"--{flag.name}={value}", *method, *others], value in never and not infinite


CASES = [case for name in COMMANDS for case in cases(name)]
BY_FLAG = {}
for case in CASES:
    BY_FLAG.setdefault((case[0], case[1][0].split("=")[0]), []).append(case)
SAMPLE = 40  # of so many cases one is played by default


def in_sample(name, words):
    return zlib.crc32(" ".join([name, *words]).encode()) % SAMPLE == 0


def check(cases, folder):
    """Each case is refused where it must be, and begins nothing."""
    for number, (name, words, bad) in enumerate(cases):
        command, cheap = COMMANDS[name]
        out = folder / str(number)
        line = refused(command, [*cheap, *words, f"--out={out}"])
        assert line is not None or not bad, (name, words)
        none_fits = line is not None and "no cell can be measured" in line  # which the study says of each
        listed = line is None and {path.name for path in out.rglob("*")} <= {planned.NAME}  # what it would train
        assert none_fits or listed or not out.exists(), (name, words)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_some_bad_values_are_refused_in_one_line(name, tmp_path):
    check([case for case in CASES if case[0] == name and in_sample(*case[:2])], tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "flag"), BY_FLAG)
def test_bad_values_are_refused_in_one_line(name, flag, tmp_path):
    check(BY_FLAG[name, flag], tmp_path)


def test_the_campaign_is_large():
    assert len(CASES) >= 3000 and sum(bad for *_, bad in CASES) >= 2000
    assert {name for name, *_ in CASES} == {*COMMANDS}
    assert 40 <= sum(in_sample(name, words) for name, words, _ in CASES) <= 200
