"""Any text of a flag, and any damage to a file: what is accepted is the same as before, or one line says no."""

import functools
import math
import pathlib
import shutil
import tempfile

import numpy as np
import pytest
from absl import flags
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outcomes import refused
from samples import SHARE
from sklearn.datasets import load_digits

from pfljax.cli import compare, scaling, train
from pfljax.contract import reading
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources
from pfljax.folder import planned
from pfljax.settings.method import METHODS

# How many examples hypothesis draws by default and every night; CI draws 5 % of the latter. Always the same ones.
BUDGETS = {"npz": (30, 5000), "flags": (5, 1500), "words": (5, 1000)}


def budgets(name):
    """The numbers of examples of the default suite, of CI and of the nightly script."""
    few, many = BUDGETS[name]
    some = math.ceil(SHARE * many)
    return [
        few,
        pytest.param(some, marks=pytest.mark.campaign),
        pytest.param(many, marks=pytest.mark.long),
    ]


def drawn(budget):
    """Hypothesis under a budget, derandomized and without a clock."""
    checks = [HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large]
    return settings(
        max_examples=budget,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=checks,
    )


@functools.cache
def digits(compressed):
    """The bytes of an npz of 40 digits with clients, and its arrays."""
    x, y = load_digits(return_X_y=True)
    arrays = {
        "x": x[:40].astype(np.uint8),
        "y": y[:40],
        "client": np.arange(40) % 4,
        "is_test": np.arange(40) % 5 == 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "digits.npz"
        (np.savez_compressed if compressed else np.savez)(path, **arrays)
        return path.read_bytes(), arrays


def damaged(content, kind, place, value):
    """The content with a byte flipped, put in or taken out at a place, or cut there."""
    place = int(place * len(content))
    if kind == "flip":
        return content[:place] + bytes([content[place] ^ value]) + content[place + 1 :]
    if kind == "insert":
        return content[:place] + bytes([value]) + content[place:]
    return content[:place] + (b"" if kind == "cut" else content[place + 1 :])


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("budget", budgets("npz"))
def test_a_damaged_npz_gives_the_same_data_or_none(budget, compressed, tmp_path):
    content, arrays = digits(compressed)
    path = tmp_path / "digits.npz"
    path.write_bytes(content)
    whole = sources.npz(str(path))

    @drawn(budget)
    @given(
        st.sampled_from(["flip", "insert", "remove", "cut"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 255),
    )
    def check(kind, place, value):
        path.write_bytes(damaged(content, kind, place, value))
        try:
            found = reading.read_npz(str(path), ["x", "y"], ["client", "is_test"])
        except ArgumentError as error:
            assert error.argument == "file" and "\n" not in str(error)
            return
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array, strict=True)
        np.testing.assert_array_equal(sources.npz(str(path)).x, whole.x)

    check()


NUMERIC = st.text("0123456789.,-+eEnaif_x² ", max_size=12)
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
NEAR = st.sampled_from(
    ["mlp", "cnn", "text", "npz", "tfds:x", "a.py:b", "all", "ring", "file", "0,1", "1,", "auto"]
)
LEFT_OUT = {"workers", "coordinator", "num_processes", "process_id", "out", "profile"}


@functools.cache
def names(module):
    """The flags of a command; hyperparameters of methods by `train` alone, with their method."""
    registry = flags.FlagValues()
    module.define(registry)
    groups = registry.flags_by_module_dict().items()

    def taken(group):
        return not group.startswith("absl") and (group not in METHODS or module is train)

    return sorted((flag.name, group) for group, found in groups if taken(group) for flag in found)


@pytest.mark.parametrize("budget", budgets("flags"))
@pytest.mark.parametrize(
    "module", [train, compare, scaling], ids=lambda module: module.__name__.split(".")[-1]
)
def test_any_text_of_a_flag_is_accepted_or_refused_in_a_line(budget, module, tmp_path):
    cheap = {
        train: [],
        compare: ["--methods=local", "--seeds=0"],
        scaling: ["--num_clients=4", "--devices=1"],
    }
    known = [(name, group) for name, group in names(module) if name not in LEFT_OUT]

    @drawn(budget)
    @given(st.sampled_from(known), st.one_of(NUMERIC, WORDS, NEAR))
    def check(flag, text):
        name, group = flag
        method = [f"--method={group}"] if group in METHODS else []
        out = tmp_path / "run"
        if (
            refused(module.COMMAND, [*cheap[module], *method, f"--{name}={text}", f"--out={out}"])
            is None
        ):
            assert {path.name for path in out.rglob("*")} <= {planned.NAME}  # what it would train
            shutil.rmtree(out, ignore_errors=True)
        assert not out.exists()

    check()


@pytest.mark.parametrize("budget", budgets("words"))
def test_any_words_are_refused_in_a_line(budget, tmp_path):
    @drawn(budget)
    @given(
        st.lists(
            st.one_of(WORDS, WORDS.map("--{}".format), WORDS.map("--flagfile={}".format)),
            min_size=1,
        )
    )
    def check(words):
        if not {"--help", "-help", "-h", "-?", "--helpfull", "--helpshort"} & {*words}:
            assert refused(train.COMMAND, [*words, f"--out={tmp_path / 'run'}"]) != ""
            assert not (tmp_path / "run").exists()

    check()
