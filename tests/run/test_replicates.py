"""Several seeds in one kernel: what each leaves is what it leaves alone."""

import dataclasses
import shutil

import numpy as np
import optax
import pytest
import toys

import pfljax as pfl
from pfljax import data
from pfljax.algorithms import METHODS
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.exchange.plan import make_plan
from pfljax.folder import checkpoints, files
from pfljax.stages.faults import Faults
from pfljax.training.loop import Schedule, Trainer

ROUNDS = 4
# Of each seed its own sizes, so that the padding differs.
SIZES = ((4, 3, 5, 2), (7, 2, 0, 3), (3, 3, 3, 3))


def federation_of(number):
    return toys.make_federation(SIZES[number], seed=number, validation_size=3)


def experiment_of(name, federation, seed, *, devices=1, n_max=7, store="device"):
    training = {"batch_size": 2, "epochs": 2} | toys.network(name)
    problem = toys.make_problem(federation, optax.adam(0.05), cohort=3, **training)._replace(
        n_max=n_max
    )
    hyperparameters = {"neighbors": 2} if "neighbors" in METHODS[name].__dataclass_fields__ else {}
    plan = make_plan("vmap", devices=devices)
    config = {"settings": {"method": name, "seed": seed}}
    fields = {"seed": seed, "config": config, "client_store": store}
    return toys.make_experiment(
        name, problem, federation, hyperparameters=hyperparameters, plan=plan, **fields
    )


def experiments_of(name, **options):
    padded = data.pad_alike([federation_of(number) for number in range(3)])
    return [
        experiment_of(name, federation, 10 + number, **options)
        for number, federation in enumerate(padded)
    ]


def train(experiments, outs, rounds=ROUNDS, **options):
    return Trainer(experiments, outs=outs, **options).train(rounds, Schedule(eval_every=2))


def check_same(found, wanted):
    """The files of two runs, but for how long they took."""
    for name in ("results.npz", "collaboration.npz"):
        one = files.read_npz(found / name)
        other = files.read_npz(wanted / name)
        assert one.keys() == other.keys()
        for key, values in one.items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(values, other[key], rtol=2e-4, atol=2e-5, err_msg=key)
            else:
                np.testing.assert_array_equal(values, other[key], err_msg=key)
    rows = zip(
        files.read_jsonl(found / "metrics.jsonl"),
        files.read_jsonl(wanted / "metrics.jsonl"),
        strict=True,
    )
    for one, other in rows:
        one, other = ({k: v for k, v in row.items() if k != "seconds"} for row in (one, other))
        assert one == pytest.approx(other, rel=2e-4, abs=2e-5)
    assert files.read_json(found / "config.json") == files.read_json(wanted / "config.json")


# Where draws are made for all clients' padded data at once (fedavg_data, perada), other padding is another draw.
EQUAL = [name for name in METHODS if name not in ("fedavg_data", "perada")]


@pytest.mark.slow
@toys.each_method(EQUAL, fast=["local"], slow=toys.KINDS)
def test_seeds_at_once_are_as_one_by_one(name, tmp_path):
    outs = [tmp_path / f"seed-{number}" for number in range(3)]
    together = train(experiments_of(name), outs)
    number = 1  # the one without padding, whose clients are the most uneven
    alone = train([experiment_of(name, federation_of(number), 10 + number)], [tmp_path / "alone"])[
        0
    ]
    check_same(outs[number], tmp_path / "alone")
    assert together[number].summary["last"]["loss"] == pytest.approx(
        alone.summary["last"]["loss"], rel=2e-4
    )
    scores = [result.summary["last"]["loss"] for result in together]
    assert len(set(scores)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hyperparameter", "store", "devices"),
    [
        ("ditto", "mu", "disk", 1),
        ("fedfomo", "epsilon", "host", 1),
        pytest.param("federico", "beta", "device", 2, marks=pytest.mark.long),
    ],
)
def test_seeds_and_hyperparameters_share_what_is_compiled_under_every_store(
    name, hyperparameter, store, devices, tmp_path
):
    outs = [tmp_path / f"seed-{number}" for number in range(3)]

    def with_hyperparameter(experiment, number):
        method = dataclasses.replace(experiment.method, **{hyperparameter: (0.1, 0.6, 0.9)[number]})
        return dataclasses.replace(experiment, method=method)

    options = {"store": store, "devices": devices}
    train(
        [
            with_hyperparameter(each, number)
            for number, each in enumerate(experiments_of(name, **options))
        ],
        outs,
    )
    number = 1
    alone = with_hyperparameter(experiment_of(name, federation_of(number), 10 + number), number)
    train([alone], [tmp_path / "alone"])
    check_same(outs[number], tmp_path / "alone")


@pytest.mark.parametrize("store", ["device", "disk"])
@pytest.mark.slow
@pytest.mark.usefixtures("compile_once")
def test_runs_killed_while_they_save_go_on_from_the_newest_that_all_have(store, tmp_path, said):
    outs, whole = (
        [tmp_path / kind / f"{number}" for number in range(3)] for kind in ("parts", "whole")
    )
    every = Schedule(1, 1)
    Trainer(experiments_of("scaffold", store=store), outs=whole).train(ROUNDS, every)
    trainer = Trainer(experiments_of("scaffold", store=store), outs=outs)
    trainer.play(2, every)
    save = checkpoints.save
    saved = []

    def killed(directory, *args, **options):
        if len(saved) == 1:
            raise KeyboardInterrupt
        saved.append(directory)
        save(directory, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.play(3, every)
    del trainer
    assert (outs[0] / "checkpoints" / "3").exists() and not (outs[1] / "checkpoints" / "3").exists()
    # Killed once more, before anything is saved: nobody may go on from what one run alone has saved.
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints, "save", killed)
        Trainer(experiments_of("scaffold", store=store), outs=outs, resume=True).play(3, every)
    assert not (outs[0] / "checkpoints" / "3").exists()
    Trainer(experiments_of("scaffold", store=store), outs=outs, resume=True).train(ROUNDS, every)
    assert any("resumed after round 2" in line for line in said)
    for one, other in zip(outs, whole, strict=True):
        check_same(one, other)


@pytest.mark.slow
@pytest.mark.usefixtures("compile_once")
def test_stopped_and_resumed_is_as_never_stopped(tmp_path, said):
    outs, whole = (
        [tmp_path / kind / f"{number}" for number in range(3)] for kind in ("parts", "whole")
    )
    train(experiments_of("federico"), whole)
    train(experiments_of("federico"), outs, rounds=2)
    train(experiments_of("federico"), outs, resume=True)
    assert any("resumed after round 2" in line for line in said)
    for one, other in zip(outs, whole, strict=True):
        check_same(one, other)
    # Where one has lost its checkpoints, all start anew if they may.
    shutil.rmtree(outs[1] / "checkpoints")
    with pytest.raises(
        ArgumentError, match=r"parts/1 has no intact checkpoint left; resume from scratch"
    ):
        train(experiments_of("federico"), outs, resume=True)
    train(experiments_of("federico"), outs, resume="if_possible")
    assert any("starting over at round 0" in line for line in said)
    for one, other in zip(outs, whole, strict=True):
        check_same(one, other)


@pytest.mark.slow
def test_one_that_diverges_is_named(tmp_path):
    stops = {"faults": Faults(on_divergence="stop")}
    experiments = [dataclasses.replace(each, **stops) for each in experiments_of("local")]
    experiments[1].federation.train.x[3, 0] = np.nan
    outs = [tmp_path / str(number) for number in range(3)]
    with pytest.raises(RunError, match=f"the loss of client 3 is not finite.*{outs[1]}"):
        train(experiments, outs)


def test_runs_of_which_some_standardize_are_not_trained_at_once():
    x = np.random.default_rng(0).normal(size=(24, 3))
    runs = []
    for standardize in (True, False):
        clients = pfl.Federation.from_arrays(
            x, np.arange(24) % 2, client=np.arange(24) // 8, standardize=standardize
        )
        runs.append(
            pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP((4,)), pfl.LocalTraining(optax.sgd, 0.1))
        )
    with pytest.raises(
        ArgumentError, match=r"^federations: have x in different forms, such as standardized"
    ):
        pfl.train_replicates(runs, rounds=1)


def test_padding_alike_keeps_the_examples_and_the_digest():
    federations = [federation_of(number) for number in range(3)]
    padded = data.pad_alike(federations)
    assert {f.train.y.shape for f in padded} == {(4, 7)}
    for before, after in zip(federations, padded, strict=True):
        assert data.digest(before) == data.digest(after) and data.describe(before) == data.describe(
            after
        )
        np.testing.assert_array_equal(after.train.x[:, : before.train.x.shape[1]], before.train.x)
        assert not after.train.x[:, before.train.x.shape[1] :].any()
    with pytest.raises(ArgumentError, match=r"\(4, 5\)"):
        data.pad_alike([federations[0], toys.make_federation((2, 2, 2, 2, 2))])
