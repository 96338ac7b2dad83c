"""Mistakes that were once a traceback, a hang or silence, command by command: what each is told."""

import zlib

import pytest
from outcomes import refused

from experiments import accelerator, benchmark, robustness
from experiments.fedem import figure1 as fedem_figure1
from experiments.fedem import table2 as fedem_table2
from experiments.fedem import table3 as fedem_table3
from experiments.federico import figure1 as federico_figure1
from experiments.federico import table1 as federico_table1
from experiments.fedfomo import figure3 as fedfomo_figure3
from experiments.fedfomo import table1 as fedfomo_table1
from experiments.fedfomo import table4 as fedfomo_table4
from experiments.pfedmb import table1 as pfedmb_table1
from pfljax.cli import compare, scaling, train

COMMANDS = {
    "train": train,
    "compare": compare,
    "scaling": scaling,
    "fedem.table2": fedem_table2,
    "fedem.table3": fedem_table3,
    "fedem.figure1": fedem_figure1,
    "federico.table1": federico_table1,
    "federico.figure1": federico_figure1,
    "fedfomo.table1": fedfomo_table1,
    "fedfomo.table4": fedfomo_table4,
    "fedfomo.figure3": fedfomo_figure3,
    "pfedmb.table1": pfedmb_table1,
    "robustness": robustness,
    "benchmark": benchmark,
    "accelerator": accelerator,
}
TABLES = [name for name in COMMANDS if name not in ("train", "scaling", "benchmark", "accelerator", "federico.figure1")]
DFEDEM = "--algorithm=dfedem"
NINE, LAYERS = "--algorithms=local,fedper --fedper.personal_layers=9", "the number of layers"
# Command, flags, and what the line says.
CASES = [
    *((name, "--devices=99999999", "0 to 1024") for name in COMMANDS),
    *((name, "--devices=nan", "whole numbers") for name in COMMANDS),
    *((name, "--rounds=0", "1 or more") for name in COMMANDS if name not in ("benchmark", "accelerator")),
    *((name, "--num_processes=0", "1 or more") for name in COMMANDS),
    *((name, "--out=/dev/null", "cannot be written to (Not a directory)") for name in COMMANDS),
    *((name, "--out=/dev/null/x", "cannot be written to (Not a directory)") for name in COMMANDS),
    *((name, "--out=/proc/x", "cannot be written to") for name in COMMANDS),
    *((name, f"--out=/tmp/{'x' * 300}", "cannot be written to (File name too long)") for name in COMMANDS),
    *((name, "--flagfile=/dev/zero", "Not a regular file") for name in COMMANDS),
    *((name, "--no_such_flag", "unknown flag") for name in COMMANDS),
    *((name, "--algorithms=", "different values") for name in [*TABLES, "scaling"]),
    *((name, "--algorithms=local,local", "different values") for name in [*TABLES, "scaling"]),
    *(
        (name, "--algorithms=fedsgd", "accepted: fedfomo" if name == "fedfomo.figure3" else "unknown algorithm")
        for name in TABLES
    ),
    *((name, "--seeds=0,0", "different whole numbers of 0 or more") for name in TABLES),
    *((name, "--seeds=-1", "different whole numbers of 0 or more") for name in TABLES),
    *((name, "--splits=1,1", "different whole numbers of 0 or more") for name in TABLES),
    *((name, "--tune=nan", "different numbers above 0") for name in TABLES),
    *((name, "--learning_rates=fedavg:inf", "rates above 0") for name in TABLES),
    *((name, "--learning_rates=fedavg:1,fedavg:2", "distinct methods") for name in TABLES),
    *((name, "--learning_rates=apple:1", "for this run's methods") for name in TABLES),
    *((name, "--weight_decay=-1", "0 or more") for name in TABLES),
    *((name, "--lr_schedule=constant --lr_decay=0.5", "--lr_schedule=exponential") for name in TABLES),
    *((name, "--dataset=sine", "") for name in TABLES if name != "compare"),
    *(
        (name, "--algorithms=fedper --fedper.personal_layers=9", "the number of layers")
        for name in ("compare", "robustness")
    ),
    ("fedem.table2", "--algorithms=local,fedper --fedper.personal_layers=9 --dataset=digits", "the number of layers"),
    ("compare", "--algorithms=local,fedper --fedper.personal_layers=9 --tune", "the number of layers"),
    ("compare", "--algorithms=local,fedper --fedper.personal_layers=9 --replicate=vmap", "the number of layers"),
    ("compare", "--algorithms=dfedem --dfedem.graph_seed=-1", "0 or more"),
    ("compare", "--algorithms=all,local", "unknown algorithm"),
    ("compare", "--eval_clients=99", "0 to 16"),
    ("scaling", "--devices=", "0 to 1024"),
    ("scaling", "--num_clients=", "whole numbers"),
    ("scaling", "--cohort=", "whole numbers"),
    ("scaling", "--plan=", "auto, vmap, map, chunk"),
    ("scaling", "--chunk=0", "1 or more"),
    ("scaling", "--shape=", "1 or more"),
    ("scaling", "--shape=28,0", "1 or more"),
    ("scaling", "--lr_decay=0.5", "--lr_schedule=exponential"),
    ("scaling", "--participation=0.5", "--cohort"),
    ("scaling", "--num_clients=5 --cohort=6", "at most --num_clients"),
    ("scaling", "--data_file=/nowhere", "No such file"),
    ("fedem.figure1", "--participations= --components=", "nothing to draw"),
    ("fedem.figure1", "--participations=2", "above 0, at most 1"),
    ("fedem.figure1", "--components=0", "1 or more"),
    ("fedfomo.figure3", "--epsilons= --downloads=", "nothing to draw"),
    ("fedfomo.table4", "--sigmas=inf", "0 or more"),
    ("fedfomo.table1", "--clients=", "1 or more"),
    ("robustness", "--shares=", "0 to below 1"),
    ("robustness", "--shares=0,0", "0 to below 1"),
    ("robustness", "--attacks=", "label_flip, sign_flip"),
    ("robustness", "--attacks=noise,noise", "label_flip, sign_flip"),
    ("robustness", "--aggregators=mode", "mean, median"),
    ("accelerator", "--parts=", "matmul, rounds"),
    ("accelerator", "--table_splits=0,0", "different whole numbers"),
    ("benchmark", "--repeats=0", "3 or more"),
    ("train", f"{DFEDEM} --dfedem.graph_seed=-1", "0 or more"),
    ("train", f"{DFEDEM} --dfedem.graph=ring --dfedem.edge_probability=0.3", "applies only with graph=erdos_renyi"),
    ("train", f"{DFEDEM} --dfedem.degree=3", "applies only with graph=random_regular"),
    ("train", f"{DFEDEM} --dfedem.edge_file=/nowhere", "applies only with graph=file"),
    ("train", f"{DFEDEM} --dfedem.mixing_file=/nowhere", "applies only with mixing=file"),
    ("train", f"{DFEDEM} --dfedem.graph=file", "required with graph=file"),
    ("train", f"{DFEDEM} --dfedem.edge_probability=1e-30", "1e-06 to 1"),
    ("train", "--algorithm=afl --afl.rate=nan", "0 or more"),
    ("train", "--algorithm=fedamp --fedamp.sigma=inf", "above 0"),
    ("train", "--algorithm=clustered --clustered.warmup=-1", ""),
    ("train", "--algorithm=fedper --fedper.personal_layers=9", "the number of layers"),
    ("train", "--model=cnn --channels=", "1 or more"),
    ("train", "--hidden=99999999999999999999999", "1 or more"),
    ("train", "--num_clients=99999999999999999999999", "0 or more"),
    ("train", "--seed=99999999999999999999999", "0 or more"),
    ("train", "--embedding=foo", "--partition=latent"),
    ("train", "--partition=latent --embedding=foo", "auto, pixels"),
    ("train", "--text_stride=0", "1 or more"),
    ("train", "--text_stride=2", "--dataset=text"),
    ("train", "--standardize", "--dataset=npz or csv"),
    ("train", "--classes_per_client=99", "--partition=pathological or pairs"),
    ("train", "--partition=pathological --classes_per_client=99", "1 to 10"),
    ("train", "--partition=iid --num_distributions=3", "--partition=auto or label_groups"),
    ("train", "--partition=iid --dirichlet_alpha=0.3", "--partition=label_dirichlet or dirichlet"),
    ("train", "--dirichlet_alpha=0.3", "--partition=label_dirichlet or dirichlet"),
    ("train", "--dataset=sine --num_distributions=3", "the partition is natural"),
    ("train", "--dataset=synthetic --nobalanced_groups", "the partition is natural"),
    ("train", "--dataset=sine --hidden=9", "the model is linear"),
    ("train", "--official_test", "no official test examples"),
    ("train", "--official_test --test_fraction=0.3", "--official_test=False"),
    ("train", "--num_distributions=99", "at most"),
    ("train", "--dataset=npz", "--data_file: accepted: an npz"),
    ("train", "--dataset=text", "--data_file: accepted: a text"),
    ("train", "--data_file=/tmp/x.npz", "accepted with --dataset=npz or text"),
    ("train", "--dataset=file", "--dataset=file: accepted with --data_file"),
    (
        "train",
        "--dataset=file --data_file=nowhere.xyz",
        "--data_file=nowhere.xyz: is of no known kind; accepted: a .npz",
    ),
    ("train", "--dataset=csv", "--data_file: accepted: a CSV"),
    ("train", "--dataset=csv --data_file=/nowhere.csv", "No such file"),
    ("train", "--client_column=who", "accepted with --dataset=csv or parquet"),
    ("train", "--dataset=tfds:", "unknown"),
    ("train", "--dataset=tfds:mnist --data_dir=/nowhere", "not prepared"),
    ("train", "--lr_decay=0.5", "--lr_schedule=exponential"),
    ("train", "--sampler=weighted", "accepted with participation below 1"),
    ("train", "--adapter=lora", "accepted with --frozen"),
    ("train", "--dp_delta=1e-3", "accepted with --dp_noise_multiplier above 0"),
    ("train", "--noise_seed=1", "accepted with --dp_noise_multiplier above 0"),
    ("compare", "--dp_delta=1e-3 --dp_clip_norm=1", "accepted with --dp_noise_multiplier above 0"),
    ("train", "--optimizer=adam --momentum=0.5", "--optimizer=sgd"),
    ("train", "--resume --out=", "non-empty text"),
    ("train", "--model=/nowhere.py:Net", "no such file"),
    ("train", "--algorithm=/nowhere.py:Net", "--algorithm=/nowhere.py:Net: no such file"),
    ("train", "--algorithm=/nowhere.py", ":NAME"),
]
SAMPLE = 12  # of so many cases one is played by default


def in_sample(case):
    return zlib.crc32(" ".join(case[:2]).encode()) % SAMPLE == 0


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        pytest.param(*case, id=f"{case[0]} {case[1][:60]}", marks=[pytest.mark.campaign] * (not in_sample(case)))
        for case in CASES
    ],
)
def test_each_mistake_is_told(name, words, said, tmp_path):
    line = refused(COMMANDS[name].COMMAND, [f"--out={tmp_path / 'run'}", *words.split(" ")])
    assert line is not None and said in line
    assert not (tmp_path / "run").exists()


def test_the_table_is_large():
    assert len(CASES) >= 250 and 10 <= sum(map(in_sample, CASES)) <= 60
