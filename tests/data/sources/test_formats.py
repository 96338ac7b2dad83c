"""Files of any kind: which kind a path is, and which arguments it takes."""

import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources
from pfljax.settings.fields import fields_of


def test_the_kind_of_a_file_is_what_its_path_looks_like(tmp_path):
    assert [sources.detect_format(f"a/b.{end}") for end in ("npz", "txt", "CSV", "pq")] == [
        "npz",
        "text",
        "csv",
        "parquet",
    ]
    with pytest.raises(
        ArgumentError, match=r"^file=a/b\.xyz: unsupported format; expected a \.npz file, a \.txt"
    ):
        data.read("a/b.xyz")


def test_every_kind_is_a_data_set_with_a_file():
    for name, kind in sources.FORMATS.items():
        assert sources.SOURCES[name] is kind.read
        assert {"file", "seed", "fraction"} <= fields_of(kind.read).keys()


def test_an_npz_file_is_read_as_by_its_own_function(tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "own.npz"
    x = rng.normal(size=(40, 3))
    y = np.arange(40) % 2
    np.savez(file, x=x, y=y, client=np.arange(40) % 4, is_test=np.arange(40) >= 30)
    found = data.read(file)
    own = data.npz(file)
    assert data.digest(found) == data.digest(own) and found.official_test is True
    assert (
        sources.has_tests("npz", file)
        and not sources.has_tests("csv", file)
        and sources.has_tests("csv", file, "t")
    )
    with pytest.raises(
        ArgumentError,
        match=r"^label=y: not accepted for npz; accepted: file, seed, fraction, standar",
    ):
        data.read(file, label="y")
    with pytest.raises(ArgumentError, match=r"^lable=y: unknown argument; did you mean label"):
        data.read(file, lable="y")
    with pytest.raises(ArgumentError, match=r"^format=nzp: accepted: file, npz"):
        data.read(file, format="nzp")
