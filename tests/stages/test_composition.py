"""All stages at once: the same under every plan and after a resumption; at work on nothing they change nothing."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
import quadratics
import toys
from staged import bare, staged

from pfljax.contract.errors import ArgumentError
from pfljax.exchange.plan import make_plan
from pfljax.stages.attacks import Attack
from pfljax.stages.compression import Compression
from pfljax.stages.devices import Clock
from pfljax.stages.faults import Faults
from pfljax.stages.server import Server

SIZES = (4, 3, 5, 2, 4, 6, 3, 5)
STAGES = {
    "server": Server("weighted", aggregator="trimmed_mean", trim=0.2),
    "attack": Attack("min_max", attackers=0.25),
    "compression": Compression("topk:0.5", "quantize:6"),
    "faults": Faults(dropout=0.2, lost=0.1, broken=0.1),
}
TRUSTED = STAGES | {
    "server": Server(aggregator="fltrust", root_examples=6),
    "attack": Attack("replacement", 0.25),
}
STAGES["clock"] = Clock(deadline=0.3)
TRUSTED["clock"] = Clock(deadline=0.3, over_selection=0.2, availability="daily:0.9")
UNENDING = STAGES | {"server": Server(aggregator="median"), "clock": Clock(compute="lognormal:1:1")}


def experiment(name, plan=("map", 0, 1), clock=None, **stages):
    federation = toys.make_federation(SIZES).with_attackers(0.25)
    problem = toys.make_problem(federation, optax.sgd(0.1), cohort=6)._replace(clock=clock)
    return toys.make_experiment(name, problem, federation, plan=make_plan(*plan), **stages)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param("fedavg", TRUSTED, marks=pytest.mark.long, id="fedavg-trusted"),
        pytest.param("scaffold", STAGES, marks=pytest.mark.slow, id="scaffold-trimmed"),
        pytest.param("scaffold", TRUSTED, marks=pytest.mark.long, id="scaffold-trusted"),
        pytest.param("ditto", STAGES, marks=pytest.mark.long, id="ditto-trimmed"),
        pytest.param("fedbuff", UNENDING, marks=pytest.mark.slow, id="fedbuff-of-any-age"),
    ],
)
def test_all_stages_give_the_same_under_every_plan_and_after_resuming(name, stages, tmp_path):
    whole = toys.run(experiment(name, **stages), 4).whole_state()
    assert not any(
        np.isnan(leaf).any() for leaf in jax.tree.leaves(whole) if leaf.dtype == np.float32
    )
    spread = toys.run(experiment(name, ("vmap", 0, 2), **stages), 4).whole_state()
    toys.assert_trees_close(spread.models, whole.models, rtol=1e-4, atol=1e-5)
    toys.run(experiment(name, **stages), 2, out=tmp_path / "run")
    resumed = toys.run(
        experiment(name, **stages), 4, out=tmp_path / "run", resume=True
    ).whole_state()
    assert toys.same_trees(resumed, whole)


@pytest.mark.long
def test_all_stages_give_the_same_under_every_store():
    stages = STAGES | {
        "server": Server(aggregator="trimmed_mean", trim=0.2)
    }  # whose sampler draws uniformly

    def run(store):
        return toys.run(experiment("ditto", client_store=store, **stages), 4)

    expected = run("device")
    assert expected.history.last["failed_clients"] > 0 and expected.history.simulated > 0
    for store in ("host", "disk"):
        found = run(store)
        toys.assert_trees_close(
            found.whole_state().models, expected.whole_state().models, rtol=1e-5, atol=1e-6
        )
        toys.assert_trees_close(
            found.whole_state().clients, expected.whole_state().clients, rtol=1e-5, atol=1e-6
        )
        assert found.history.simulated == pytest.approx(expected.history.simulated, rel=1e-6)


@pytest.mark.long
def test_each_stage_changes_the_run():
    def models(**stages):
        return toys.run(experiment("fedavg", **stages), 3).whole_state().models

    plain = models()
    for stage, made in STAGES.items():
        assert not toys.same_trees(models(**{stage: made}), plain), stage


def regression(**stages):
    """An experiment with FedAvg of four clients in full batches, one of whom attacks."""
    federation = toys.make_federation(SIZES[:4], "regression").with_attackers(0.25)
    problem = toys.make_problem(federation, quadratics.OPTIMIZER)._replace(
        clock=stages.pop("clock", None)
    )
    return toys.make_experiment("fedavg", problem, federation, plan=problem.plan, **stages)


def test_what_attackers_send_is_compressed():
    """Of four entries of its noise, an attacker sends two."""
    made = regression(attack=Attack("noise", 0.25), compression=Compression("topk:0.5"))
    clients = made.federation.client_data
    only = np.where(np.arange(4) == 2, SIZES[:4], 0).astype(np.int32)
    clients = clients._replace(attacker=np.ones(4, bool), train=clients.train._replace(size=only))
    before, after = toys.train(made.algorithm(made.problem.plan), made.problem, clients, 1)[0]
    assert (quadratics.vectors(before.models) != quadratics.vectors(after.models)).sum() == 2


def test_who_fails_before_training_takes_no_longer_than_its_download():
    """At a byte a second: a model of four numbers."""
    clock = Clock(compute="constant:2", bandwidth="constant:8e-6")
    made = regression(faults=Faults(dropout=0.9999), clock=clock)
    _, records = toys.train(
        made.algorithm(made.problem.plan), made.problem, made.federation.client_data, 1
    )
    assert records[0].seconds == pytest.approx(4 * 4, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", pytest.param("ditto", marks=pytest.mark.slow)]
)
def test_with_all_stages_off_a_round_is_the_plain_one_to_the_bit(name):
    made = experiment(name)
    clients = made.federation.client_data
    method = toys.make_algorithm(name, made.problem)
    plain, plain_records = toys.train(method, made.problem, clients, 3)
    found, records = toys.train(
        staged(made.problem, method, made.federation), made.problem, clients, 3
    )
    assert toys.same_trees(bare(found[-1]), plain[-1])
    assert toys.same_trees(records, plain_records)


# Stages at work that change no figure of a round. Trimming nothing is the uniform mean.
NEUTRAL = {
    "clock": Clock(),
    "compression": Compression("topk:1"),
    "sent as it is": Compression("topk:1", error_feedback=False),
    "checked": True,
    "server": Server(aggregator="trimmed_mean", trim=0.0),
}
# Two learn or compute how much clients count; two average by class, for which clients do not count alike.
WEIGHED = ("afl", "fedas", "fedpac", "ccvr")
WHOLE = {"sums", "models", "products"}  # of which compression may leave out nothing
SPOILED = 3  # the client whose examples are NaN


def refused_by(method, problem):
    """The stages that a method refuses, by what it sends and how its server combines that."""
    whole = (
        method.topology == "own" or method.sends in WHOLE or problem.solver.statistics is not None
    )
    found = {"sent as it is", "compression"} if whole else set()
    found |= {"checked"} if method.topology == "push" else set()
    return found | (set() if method.averages else {"server"})


def taken(made, stage):
    """The experiment with a stage, or None where the method refuses it, in one line, when its state is begun."""
    name = "compression" if stage == "sent as it is" else stage
    clock = {"problem": made.problem._replace(clock=NEUTRAL["clock"])}
    made = dataclasses.replace(made, **(clock if stage == "clock" else {name: NEUTRAL[stage]}))
    try:
        algorithm = made.algorithm(made.problem.plan)
        begin = functools.partial(toys.init, algorithm, made.problem)
        jax.eval_shape(begin, jax.random.key(0), made.federation.client_data)
    except ArgumentError as error:
        assert "accepted for " in str(error) and "\n" not in str(error)
        return None
    return made


@toys.each_method(fast=("ditto",), slow=("fedem", "dfedem", "federico", "fedpac"))
def test_every_method_takes_or_refuses_each_stage_and_at_work_on_nothing_they_change_nothing(name):
    """With a client whose examples are NaN, which is as if it had none. All are alike, so that means are uniform."""
    federation = toys.make_federation((3,) * 5)
    problem = toys.make_problem(federation, optax.sgd(0.1), **{"hidden": (4,)} | toys.network(name))
    hyperparameters = {"neighbors": 2} if name in ("federico", "fedfomo", "fedfomo_average") else {}
    plain = toys.make_algorithm(name, problem, **hyperparameters)
    made = toys.make_experiment(
        name, problem, federation, hyperparameters=hyperparameters, plan=problem.plan
    )
    stages = [
        stage for stage in NEUTRAL if not (stage == "clock" and plain.stale)
    ]  # whose models would be stale
    refused = set()
    left_out = {"server"} if name in WEIGHED else set()
    for stage in stages:
        found = taken(made, stage)
        if found is None:
            refused.add(stage)
        elif stage not in left_out:
            made = found
            left_out |= {"sent as it is"} if stage == "compression" else set()
    assert refused ^ refused_by(plain, problem) <= {"compression"}
    # With ledger.gradients=0 clients send examples, so that those of the client would spoil everybody's.
    clients = federation.client_data
    checked = "checked" not in refused and plain.ledger.gradients > 0
    x = np.array(clients.train.x)
    x[SPOILED] = np.nan if checked else x[SPOILED]
    given = clients._replace(train=clients.train._replace(x=x))
    states, records = toys.train(made.algorithm(problem.plan), made.problem, given, 2)
    if checked:

        def empty(split):
            return split._replace(size=np.where(np.arange(5) == SPOILED, 0, split.size))

        clients = clients._replace(train=empty(clients.train), validation=empty(clients.validation))
        assert [record.dropped.tolist() for record in records] == [[-1, -1, -1, SPOILED, -1]] * 2
    found = bare(states[-1])
    begun = bare(states[0])
    assert not any(
        np.isnan(leaf).any() for leaf in jax.tree.leaves(found) if leaf.dtype == np.float32
    )
    assert all(np.isfinite(record.train_loss) and record.diverged == -1 for record in records)
    if "clock" in stages:
        assert all(np.isfinite(record.seconds) and record.seconds > 0 for record in records)
    expected, exact = toys.train(plain, problem, clients, 2, state=begun)
    toys.assert_trees_close(found.models, expected[-1].models, rtol=1e-4, atol=1e-5)
    kept = [
        jax.tree.map(lambda leaf: np.delete(leaf, SPOILED, 0), each.clients)
        for each in (found, expected[-1])
    ]
    toys.assert_trees_close(*kept, rtol=1e-4, atol=1e-5)
    assert records[-1].down == exact[-1].down
    # A value is sent with its place. What a rule of the server reads is counted with reports, which are not compressed.
    ruled = "server" not in refused | left_out
    assert ruled or {"compression", "sent as it is"} <= refused or records[-1].up > exact[-1].up
