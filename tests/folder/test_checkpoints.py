"""Checkpoints that cannot be read."""

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from pfljax.contract.errors import ArgumentError, RunError
from pfljax.contract.types import First, Start, State
from pfljax.folder import checkpoints


@pytest.mark.parametrize("damage", ["empty", "not there"])
def test_a_checkpoint_that_cannot_be_read_is_skipped_with_one_line(damage, tmp_path, caplog):
    if damage == "empty":
        (tmp_path / "3").mkdir()
    like = State(Start(models=np.zeros((2, 3), np.float32)), round=np.int32(0))
    assert checkpoints.restore(tmp_path, 3, like) is None
    (message,) = [
        record.getMessage() for record in caplog.records if "damaged" in record.getMessage()
    ]
    before, _, reason = message.partition(" is damaged and is skipped: ")
    assert before == f"checkpoint {tmp_path / '3'}"
    assert reason and "\n" not in reason


SERVER = {"rate": np.float32([0.5])}
MODELS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
STATES = {
    "a server's models": State(
        Start(SERVER, MODELS, opt_state=(np.ones(2),)),
        First(np.arange(4)),
        np.full((), 3, np.int32),
    ),
    "clients' models": State(
        Start(), First({"seen": np.arange(2)}, MODELS), np.full((), 3, np.int32)
    ),
    "rows in files": State(
        Start(SERVER),
        {"slots": np.ones(4, np.uint8), "sums": np.zeros(4, np.uint32)},
        np.full((), 3, np.int32),
    ),
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_is_restored_as_it_was_saved(what, tmp_path):
    state = STATES[what]
    checkpoints.save(tmp_path, 3, state)
    assert not checkpoints.is_former(tmp_path, 3)
    for restored in (checkpoints.restore(tmp_path, 3, state), checkpoints.read(tmp_path, 3, state)):
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, restored, state)


FORMER = {  # what earlier versions saved
    "models beside the server": {
        "models": MODELS,
        "clients": np.arange(4),
        "round": np.full((), 3, np.int32),
    },
    "rows in files": {
        "slots": np.ones(4, np.uint8),
        "sums": np.zeros(4, np.uint32),
        "rest": {"round": np.full((), 3, np.int32)},
    },
}


@pytest.mark.parametrize("what", FORMER)
def test_an_earlier_version_s_checkpoint_is_refused_in_one_line(what, tmp_path):
    folder = tmp_path / "checkpoints"
    ocp.save(str(folder / "3"), FORMER[what])
    assert checkpoints.is_former(folder, 3)
    for error, call in ((ArgumentError, checkpoints.restore), (RunError, checkpoints.read)):
        with pytest.raises(error, match="scores, history and figures can still be read") as raised:
            call(folder, 3, STATES["clients' models"])
        assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)
