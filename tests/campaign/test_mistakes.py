"""Mistakes on the command line that no declaration gives: files, folders, and flags that do not go together.

Each was once a traceback, a hang or silence. Wrong values of single flags are in `test_inputs.py`.
"""

import pytest
from mistakes import COMMANDS
from outcomes import refused
from samples import check, params, sample

TABLES = [
    name
    for name in COMMANDS
    if name not in ("train", "scaling", "benchmark", "accelerator", "federico.figure1")
]
NOT_WRITTEN = "cannot be written to"
NINE = "--fedper.personal_layers=9"
LAYERS = "the number of layers"
DFEDEM = "--method=dfedem"
# Command, flags, and what the line says.
CASES = [
    *((name, "--out=/dev/null", f"{NOT_WRITTEN} (Not a directory)") for name in COMMANDS),
    *((name, "--out=/dev/null/x", f"{NOT_WRITTEN} (Not a directory)") for name in COMMANDS),
    *((name, "--out=/proc/x", NOT_WRITTEN) for name in COMMANDS),
    *(
        (name, f"--out=/tmp/{'x' * 300}", f"{NOT_WRITTEN} (File name too long)")
        for name in COMMANDS
    ),
    *((name, "--flagfile=/dev/zero", "Not a regular file") for name in COMMANDS),
    *((name, "--learning_rates=fedavg:inf", "rates above 0") for name in TABLES),
    *((name, "--learning_rates=fedavg:1,fedavg:2", "distinct methods") for name in TABLES),
    *((name, "--learning_rates=apple:1", "for this run's methods") for name in TABLES),
    *(
        (name, "--lr_schedule=constant --lr_decay=0.5", "--lr_schedule=exponential")
        for name in TABLES
    ),
    *((name, "--methods=fedsgd", "unknown method") for name in TABLES if name != "fedfomo.figure3"),
    ("fedfomo.figure3", "--methods=fedsgd", "accepted: fedfomo"),
    *((name, "--dataset=sine", "") for name in TABLES if name != "compare"),
    ("compare", f"--methods=fedper {NINE}", LAYERS),
    ("robustness", f"--methods=fedper {NINE}", LAYERS),
    ("fedem.table2", f"--methods=local,fedper {NINE} --dataset=digits", LAYERS),
    ("compare", f"--methods=local,fedper {NINE} --tune", LAYERS),
    ("compare", f"--methods=local,fedper {NINE} --replicate=vmap", LAYERS),
    ("compare", "--methods=all,local", "unknown method"),
    ("compare", "--eval_clients=99", "0 to 16"),
    (
        "compare",
        "--privacy_delta=1e-3 --privacy_clip_norm=1",
        "accepted with --privacy_noise_multiplier above 0",
    ),
    ("scaling", "--lr_decay=0.5", "--lr_schedule=exponential"),
    ("scaling", "--participation=0.5", "--cohort"),
    ("scaling", "--num_clients=5 --cohort=6", "at most --num_clients"),
    ("scaling", "--data_file=/nowhere", "No such file"),
    ("fedem.figure1", "--participations= --components=", "nothing to draw"),
    ("fedfomo.figure3", "--epsilons= --downloads=", "nothing to draw"),
    ("train", f"{DFEDEM} --dfedem.graph=file", "required with graph=file"),
    ("train", f"--method=fedper {NINE}", LAYERS),
    ("train", "--partition=latent --embedding=foo", "auto, pixels"),
    ("train", "--partition=pathological --partition_classes=99", "1 to 10"),
    ("train", "--dataset=sine --partition_groups=3", "the partition is natural"),
    ("train", "--dataset=synthetic --nopartition_balanced", "the partition is natural"),
    ("train", "--dataset=sine --hidden=9", "the model is linear"),
    ("train", "--official_test", "no official test examples"),
    ("train", "--official_test --test_fraction=0.3", "--official_test=false"),
    ("train", "--partition_groups=99", "at most"),
    ("train", "--dataset=npz", "--data_file: accepted: an npz"),
    ("train", "--dataset=text", "--data_file: accepted: a text"),
    ("train", "--dataset=csv", "--data_file: accepted: a CSV"),
    ("train", "--dataset=csv --data_file=/nowhere.csv", "No such file"),
    ("train", "--dataset=file", "--dataset=file: accepted with --data_file"),
    ("train", "--dataset=file --data_file=x.xyz", "x.xyz: unsupported format; expected a .npz"),
    ("train", "--data_file=/tmp/x.npz", "accepted with --dataset=npz, text"),
    ("train", "--dataset=tfds:", "unknown"),
    ("train", "--dataset=tfds:mnist --data_dir=/nowhere", "not prepared"),
    ("train", "--sampler=weighted", "accepted with participation below 1"),
    ("train", "--model=/nowhere.py:Net", "no such file"),
    ("train", "--method=/nowhere.py:Net", "--method=/nowhere.py:Net: no such file"),
    ("train", "--method=/nowhere.py", ":NAME"),
]


def by_command(case):
    return case[0]


def by_flag(case):
    return case[1].partition("=")[0]


FEW = sample(CASES, by_command, share=0)
SOME = sample(CASES, by_command, by_flag)


def test_the_sample_has_every_command_and_every_flag():
    check(CASES, SOME, by_command, by_flag)


@pytest.mark.parametrize(("name", "words", "said"), params(CASES, FEW, SOME))
def test_a_mistake_is_told_in_a_line(name, words, said, tmp_path):
    line = refused(COMMANDS[name].module.COMMAND, [f"--out={tmp_path / 'run'}", *words.split(" ")])
    assert line is not None and said in line
    assert not (tmp_path / "run").exists()
