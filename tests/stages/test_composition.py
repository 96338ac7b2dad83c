"""All stages at once: the same under every plan and after a resumption, and off they are nothing."""

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax.exchange.plan import make_plan
from pfljax.local.clock import Clock
from pfljax.stages.attacks import Attack
from pfljax.stages.compression import Compression
from pfljax.stages.faults import Faults
from pfljax.stages.server import Server

SIZES = (4, 3, 5, 2, 4, 6, 3, 5)
STAGES = {
    "server": Server("weighted", aggregator="trimmed_mean", trim=0.2),
    "attack": Attack("min_max", attackers=0.25),
    "compression": Compression("topk:0.5", "quantize:6"),
    "faults": Faults(dropout=0.2, lost=0.1, broken=0.1),
}
TRUSTED = STAGES | {"server": Server(aggregator="fltrust", root_examples=6), "attack": Attack("replacement", 0.25)}
STAGES["clock"] = Clock(deadline=0.3)
TRUSTED["clock"] = Clock(deadline=0.3, over_selection=0.2, availability="daily:0.9")


def experiment(name, plan=("map", 0, 1), clock=None, **stages):
    federation = toys.make_federation(SIZES).with_attackers(0.25)
    problem = toys.make_problem(federation, optax.sgd(0.1), cohort=6)._replace(clock=clock)
    return toys.make_experiment(name, problem, federation, plan=make_plan(*plan), **stages)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [STAGES, TRUSTED], ids=["trimmed", "trusted"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto"])
def test_all_stages_give_the_same_under_every_plan_and_after_resuming(name, stages, tmp_path):
    whole = toys.run(experiment(name, **stages), 4).whole_state()
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(whole) if leaf.dtype == np.float32)
    spread = toys.run(experiment(name, ("vmap", 0, 2), **stages), 4).whole_state()
    toys.assert_trees_close(spread.models, whole.models, rtol=1e-4, atol=1e-5)
    toys.run(experiment(name, **stages), 2, out=tmp_path / "run")
    resumed = toys.run(experiment(name, **stages), 4, out=tmp_path / "run", resume=True).whole_state()
    assert toys.same_trees(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize("stage", list(STAGES))
def test_each_stage_changes_the_run(stage):
    plain = toys.run(experiment("fedavg"), 3).whole_state().models
    assert not toys.same_trees(toys.run(experiment("fedavg", **{stage: STAGES[stage]}), 3).whole_state().models, plain)


def test_stages_that_are_off_leave_the_method_alone():
    problem = experiment("fedavg").problem
    method = toys.make_algorithm("fedavg", problem)
    assert Server().of(problem, method, Attack()) is method
    assert all(stage.on(problem, method) is method for stage in (Attack(), Compression(), Faults()))
