"""The examples run, and reach what a user would expect of them."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "least"),
    [("own_data", 0.85), ("own_linen_model", 0.75), ("own_nnx_model", 0.75)],  # chance is 0.5, 0.1, 0.1
)
def test_examples_learn(name, least):
    assert load(name).main().accuracy > least
