"""No example that chooses a learning rate or hyperparameter is a test example of any cell of the table."""

import numpy as np
import optax
import pytest
from commands import call

import pfljax as pfl
from pfljax.api import comparison, tuning
from pfljax.api.study import Study
from pfljax.cli import compare

MODEL = pfl.models.MLP(hidden=())
SGD = pfl.LocalTraining(optax.sgd, 0.1)
METHODS = [pfl.Local(), pfl.FedProx()]


@pytest.fixture
def runs(monkeypatch):
    """The runs that choose, and those of the table's cells; none of them is trained."""
    choosing = []
    cells = []

    def scores_of(found, trials, rounds):
        choosing.extend(found)
        points = len(found) // trials
        return [0.0] * points, [float(number) for number in range(points)]

    def train(study, found, *_, **options):
        cells.extend(found)
        return [None] * len(found)

    monkeypatch.setattr(tuning, "scores_of", scores_of)
    monkeypatch.setattr(Study, "train", train)
    monkeypatch.setattr(Study, "read", lambda *_: (None, ""))
    return choosing, cells


def contents(found, part):
    """The x of all examples of a part of the clients of runs, those held out of training among them."""
    federations = [run.clients for run in found]
    federations += [run.experiment.unseen for run in found if run.experiment.unseen is not None]
    return {
        np.asarray(row).tobytes()
        for federation in federations
        for client in range(federation.num_clients)
        for row in federation.examples(client, part)[0]
    }


def digits(split, **options):
    given = {"num_clients": 4, "validation_fraction": 0.25, "seed": split} | options
    return pfl.data.digits(**given)


def twice(split):
    """Each example is there twice, in two clients or in two parts of one."""
    rng = np.random.default_rng(0)
    x = np.tile(rng.normal(size=(60, 3)).astype(np.float32), (2, 1))
    y = np.tile(np.arange(60) % 3, 2)
    return pfl.Federation.from_arrays(x, y, num_clients=4, seed=split, validation_fraction=0.4)


def official(split):
    """The data set says which examples are for testing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3)).astype(np.float32)
    is_test = np.arange(80) % 4 == 0
    client = np.arange(80) // 20
    return pfl.Federation.from_arrays(
        x, np.arange(80) % 3, client=client, is_test=is_test, seed=split, validation_fraction=0.4
    )


def with_others(split):
    """Clients and others who do not train."""
    return pfl.data.split_unseen(digits(split), 0.25, split)


COMPARED = {
    "a split per seed": (digits, {"seeds": [0, 1, 2]}),
    "splits and seeds": (digits, {"seeds": [5], "splits": [0, 1, 2, 3]}),
    "many splits": (digits, {"seeds": [0], "splits": range(6)}),
    "clients": (digits(0), {"seeds": [0, 1]}),
    "unseen clients": (digits, {"seeds": [0, 1], "unseen": 0.25}),
    "given unseen clients": (with_others, {"seeds": [0, 1]}),
    "examples that occur twice": (twice, {"seeds": [0, 1]}),
    "an official test part": (official, {"splits": [0, 1], "seeds": [3]}),
    "hyperparameters": (digits, {"seeds": [0, 1], "tune_hyperparameters": True}),
    "seeds of tuning": (digits, {"seeds": [0, 1], "tune_seeds": [7, 8, 9]}),
    "validation examples that stay out": (digits, {"seeds": [0, 1], "keep_validation": True}),
}


QUICK = ("splits and seeds", "clients", "unseen clients", "examples that occur twice")
PARAMS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in COMPARED]


@pytest.mark.parametrize("name", PARAMS)
def test_comparisons(name, runs):
    clients, options = COMPARED[name]
    with pytest.raises(comparison.Unfinished):
        pfl.compare(
            METHODS, clients, MODEL, SGD, rounds=1, tune=[0.1, 1.0], tune_widen=1, **options
        )
    check(*runs)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--seeds=0,1,2 --tune=0.1,1", marks=pytest.mark.slow),
        "--splits=0,1,2 --seeds=3 --tune=0.1,1",
        pytest.param(
            "--seeds=0,1 --tune_hyperparameters --validation_fraction=0.4", marks=pytest.mark.slow
        ),
        pytest.param("--seeds=0,1 --tune=0.1,1 --unseen=0.25", marks=pytest.mark.slow),
        pytest.param(
            "--seeds=0,1 --tune=0.1,1 --partition=dirichlet --replacement --train_examples=12",
            marks=pytest.mark.slow,
        ),
        pytest.param("--seeds=0,1 --tune=0.1,1 --dataset=sine", marks=pytest.mark.slow),
    ],
)
def test_the_command(flags, runs, tmp_path):
    also = "--methods=local,fedprox --num_clients=8 --rounds=1 --hidden=4 --tune_widen=1"
    also = also.replace(" --hidden=4", "") if "sine" in flags else also
    call(compare.COMMAND, *also.split(), *flags.split(), f"--out={tmp_path}")
    check(*runs)


def test_a_tuning_on_other_splits_or_with_the_tables_seeds_is_refused(runs):
    tuned = pfl.tune(
        pfl.Local(),
        digits,
        MODEL,
        SGD,
        rounds=1,
        learning_rates=[0.1, 1.0],
        splits=[0],
        seeds=[7],
        widen=0,
    )
    with pytest.raises(
        pfl.ArgumentError,
        match=r"^methods: local was tuned on \d+ examples on which this table tests",
    ):
        pfl.compare([tuned], digits, MODEL, rounds=1, seeds=[0], splits=[0, 1, 2])
    # all of its examples are tested on
    with pytest.raises(pfl.ArgumentError, match=r"^methods: local was tuned on"):
        pfl.compare([tuned], digits, MODEL, rounds=1, seeds=[0], splits=range(40))
    with pytest.raises(
        pfl.ArgumentError, match=r"^seeds=5,7: local was tuned with seeds 7; accepted: other seeds"
    ):
        pfl.compare([tuned], digits, MODEL, rounds=1, seeds=[5, 7], splits=[0])


@pytest.mark.parametrize("clients", [digits, twice, official])
def test_a_tuning_whose_table_has_the_same_splits(clients, runs):
    splits = [0, 1, 2]
    tuned = pfl.tune(
        pfl.FedProx(),
        clients,
        MODEL,
        SGD,
        rounds=1,
        learning_rates=[0.1, 1.0],
        splits=splits,
        widen=0,
    )
    with pytest.raises(comparison.Unfinished):
        pfl.compare([tuned], clients, MODEL, rounds=1, seeds=[0], splits=splits)
    check(*runs)


def check(choosing, cells):
    """The validation examples of runs that choose, and the test examples of cells, have no x in common."""
    chosen_by = contents(choosing, "validation")
    tested = contents(cells, "test")
    assert chosen_by and tested and not chosen_by & tested


def test_examples_of_few_kinds_cannot_be_told_apart_and_a_warning_says_so(runs):
    """Two different rows: every validation example is also a test example."""
    x = np.repeat([[0.0], [1.0]], 40, axis=0)
    clients = pfl.Federation.from_arrays(
        x, np.arange(80) % 2, num_clients=4, partition=pfl.partitions.IID(), validation_fraction=0.4
    )
    with (
        pytest.warns(
            UserWarning, match="all validation examples also occur among the test examples"
        ),
        pytest.raises(comparison.Unfinished),
    ):
        pfl.compare(
            [pfl.Local()], clients, MODEL, SGD, rounds=1, seeds=[0], tune=[0.1, 1.0], tune_widen=0
        )
    with pytest.warns(
        UserWarning, match="all validation examples also occur among the test examples"
    ):
        tuned = pfl.tune(
            pfl.Local(),
            clients,
            MODEL,
            SGD,
            rounds=1,
            learning_rates=[0.1, 1.0],
            seeds=[7],
            widen=0,
        )
    with pytest.raises(comparison.Unfinished):  # it is not refused
        pfl.compare([tuned], clients, MODEL, SGD, rounds=1, seeds=[0])
    choosing, _ = runs
    assert choosing[0].clients.validation.size.sum() == clients.validation.size.sum()
