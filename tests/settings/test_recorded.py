"""Objects in config.json: made again by name, never unpickled, and refused in one line where that cannot be."""

import dataclasses
import json
import math
import sys
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import optax
import pytest

import pfljax as pfl
from pfljax.contract.errors import ArgumentError
from pfljax.folder import files
from pfljax.settings import recorded


class Pair(NamedTuple):
    a: float
    b: tuple = ()


class Net(nn.Module):
    widths: tuple[int, ...] = (4,)
    activation: object = nn.relu
    dtype: object = jnp.float32

    def __call__(self, x):
        return x


def through_json(value):
    """The object that a later process makes."""
    return recorded.restored(json.loads(json.dumps(files.plain(recorded.recorded(value)))), "model")


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            3,
            0.25,
            math.inf,
            "text",
            (1, (2, "a")),
            len,
            optax.adam,
            nn.relu,
            nn.Dense,
            Pair(-math.inf, (1,)),
        ),
        *(
            pfl.Ditto(mu=0.5),
            pfl.Server("weighted"),
            pfl.Privacy(1.0, 2.0),
            pfl.partitions.LabelGroups(groups=3),
        ),
        *(
            pfl.models.MLP(hidden=(8, 4)),
            Net((2, 3), nn.tanh, jnp.bfloat16),
            nn.Sequential([nn.Dense(2), nn.relu]),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_recorded_is_made_again(value):
    assert through_json(value) == value


def closure(rate):
    return lambda x: rate * x


@pytest.mark.parametrize(
    "value",
    [
        closure(1),
        optax.adam(0.1),
        jnp.ones(2),
        {"a": 1},
        Net(activation=closure(2)),
        type("Local", (), {}),
    ],
)
def test_what_has_no_name_is_not_recorded(value):
    with pytest.raises(recorded.CannotRecord):
        recorded.recorded(value)
    assert recorded.recordable({"a": value, "b": 1}) == {"b": 1}


def test_names_are_the_public_ones_and_files_only_those_of_single_modules():
    assert recorded.recorded(optax.adam) == {"module": "optax", "name": "adam", "file": None}
    assert recorded.recorded(pfl.FedAvg)["module"] == "pfljax"


OWN = """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    rate: float = 1.0
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The record of an object of one's own file, which no module has loaded any more."""
    (tmp_path / "own_hyperparameters_file.py").write_text(OWN)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        import own_hyperparameters_file  # ty: ignore

        record = recorded.recorded(own_hyperparameters_file.Hyperparameters(0.5))
    del sys.modules["own_hyperparameters_file"]
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield record
    sys.modules.pop("own_hyperparameters_file", None)


def test_own_classes_are_imported_from_their_file(own, tmp_path):
    assert own["class"]["file"] == str(tmp_path / "own_hyperparameters_file.py")
    found = recorded.restored(own, "method")
    assert type(found).__name__ == "Hyperparameters" and dataclasses.asdict(found) == {"rate": 0.5}


def test_a_module_of_the_same_name_is_another(own, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own_hyperparameters_file.py").write_text("Hyperparameters = None")
    monkeypatch.syspath_prepend(tmp_path / "other")
    assert recorded.restored(own, "method").rate == 0.5


@pytest.mark.parametrize(
    "content", [None, "Other = 1", "raise ValueError('no')", OWN.replace("rate", "speed")]
)
def test_code_that_is_gone_or_changed_is_one_line(own, tmp_path, content):
    file = tmp_path / "own_hyperparameters_file.py"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ArgumentError, match=r"^method"):
        recorded.restored(own, "method")


def test_a_script_is_not_run_again(tmp_path):
    (tmp_path / "script.py").write_text("raise AssertionError('ran')")
    record = {"module": "__main__", "name": "Mine", "file": str(tmp_path / "script.py")}
    with pytest.raises(
        ArgumentError,
        match=r"^model: Mine is defined in a script.*pfljax\.load\(path, model=\.\.\.\)$",
    ):
        recorded.restored(record, "model")


def test_functions_are_never_called():
    """Only dataclasses and named tuples are made: a record is no program."""
    called = {
        "class": {"module": "os", "name": "system", "file": None},
        "fields": {"command": "true"},
    }
    with pytest.raises(ArgumentError, match="system is no dataclass"):
        recorded.restored(called, "model")


def test_a_record_with_the_former_name_of_a_field_is_restored():
    record = json.loads(json.dumps(recorded.recorded(pfl.Ditto(mu=0.7))))
    record["fields"]["strength"] = record["fields"].pop("mu")
    assert recorded.restored(record, "method") == pfl.Ditto(mu=0.7)
