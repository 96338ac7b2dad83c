"""One damaged file of a run's folder: the resumed run has the figures of a whole one, or ends in one line."""

import dataclasses
import random
import shutil

import optax
import pytest
import runs
import toys
from samples import check, params, sample

from pfljax.contract.errors import ArgumentError, RunError
from pfljax.exchange.plan import make_plan
from pfljax.training.loop import Schedule, Trainer

pytestmark = pytest.mark.usefixtures("compile_once")
EVERY = Schedule(eval_every=1, checkpoint_every=2)
PLAYED = 4
ROUNDS = 6
# A mode -> the method, where the clients live, seeds, and the number of cases.
MODES = {
    "device": ("federico", "device", [1], 40),
    "disk": ("ditto", "disk", [1], 40),
    "replicates": ("fedavg", "device", [1, 2], 20),
}


def train(mode, out, rounds, resume=False, say=None):
    name, store, seeds, _ = MODES[mode]
    hyperparameters = {"neighbors": 2} if name == "federico" else {}
    federation = toys.make_federation((4, 3, 5, 2, 4, 3))
    problem = toys.make_problem(federation, optax.adam(0.05), batch_size=2, cohort=3)
    config = {"settings": {"method": name}, "data": {"digest": "5e"}}
    first = toys.make_experiment(
        name,
        problem,
        federation,
        hyperparameters=hyperparameters,
        plan=make_plan("map", devices=2),
        config=config,
        client_store=store,
    )
    experiments = [dataclasses.replace(first, seed=seed) for seed in seeds]
    outs = [out / f"seed-{seed}" for seed in seeds]
    Trainer(experiments, outs=outs, resume=resume, say=say).train(rounds, EVERY)


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """A mode -> a run of 4 rounds, and one of 6."""
    found = {}

    def get(mode):
        if mode not in found:
            folder = tmp_path_factory.mktemp(mode)
            train(mode, folder / "played", PLAYED)
            train(mode, folder / "whole", ROUNDS)
            found[mode] = folder / "played", folder / "whole"
        return found[mode]

    return get


def truncated(draw, path, content):
    return content[: draw.randrange(len(content))]


def flipped(draw, path, content):
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


def zeroed(draw, path, content):
    at = draw.randrange(len(content))
    return content[:at] + bytes(len(content[at : at + 64])) + content[at + 64 :]


def extended(draw, path, content):
    return content + draw.randbytes(draw.randint(1, 64))


def replaced(draw, path, content):
    """By another file of the run that is as long, or longer."""
    others = [other for other in path.parents[1].rglob("*") if other.is_file() and other != path]
    return draw.choice(sorted(others)).read_bytes()


def gone(draw, path, content):
    return None


KINDS = (truncated, flipped, zeroed, extended, replaced, gone)


def damage(draw, out, how):
    """Damages one file, most often a checkpoint's; what was done."""
    parts = [path for path in sorted(out.rglob("*")) if path.is_file() and path.stat().st_size]
    path = draw.choice(parts)
    content = how(draw, path, path.read_bytes())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    return f"{path.relative_to(out)} {how.__name__}"


def kind_of(case):
    """How a case damages a file."""
    _, number = case
    return KINDS[number % len(KINDS)]


def mode_of(case):
    return case[0]


CASES = [(mode, number) for mode in MODES for number in range(MODES[mode][3])]
SOME = sample(CASES, kind_of, mode_of, share=0)


def test_the_sample_has_every_mode_and_every_kind():
    check(CASES, SOME, kind_of, mode_of)


@pytest.mark.parametrize(("mode", "number"), params(CASES, [], SOME))
def test_a_damaged_run_is_mended_or_told(mode, number, runs_of, tmp_path):
    played, whole = runs_of(mode)
    out = tmp_path / "run"
    said = []
    shutil.copytree(played, out)
    what = damage(random.Random(f"{mode} {number}"), out, kind_of((mode, number)))
    try:
        train(mode, out, ROUNDS, resume=True, say=said.append)
    except (ArgumentError, RunError) as error:
        assert len(str(error).splitlines()) == 1, what
        assert "from scratch" in str(error) or "choose a new folder" in str(error), what
        train(mode, out, ROUNDS, resume="from_scratch")  # the way on
    else:
        assert any("resumed after round" in line for line in said), (what, said)
    for one in whole.iterdir():
        runs.assert_same_runs(one, out / one.name)
