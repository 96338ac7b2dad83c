"""Checkpoints that cannot be read."""

import numpy as np
import pytest

from pfljax.contract.types import State
from pfljax.folder import checkpoints


@pytest.mark.parametrize("damage", ["empty", "not there"])
def test_a_checkpoint_that_cannot_be_read_is_skipped_with_one_line(damage, tmp_path, caplog):
    if damage == "empty":
        (tmp_path / "3").mkdir()
    like = State((), np.zeros((2, 3), np.float32), (), (), np.int32(0))
    assert checkpoints.restore(tmp_path, 3, like) is None
    (message,) = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    before, _, reason = message.partition(" is damaged and is skipped: ")
    assert before == f"checkpoint {tmp_path / '3'}"
    assert reason and "\n" not in reason
