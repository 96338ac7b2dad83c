"""Arguments that sources refuse."""

import pytest

from pfljax.contract.errors import ArgumentError
from pfljax.data import sources


@pytest.mark.parametrize(
    ("load", "arguments", "message"),
    [
        (sources.npz, {"file": None}, "file: accepted: an npz"),
        (
            sources.npz,
            {"file": "/nowhere/f.npz"},
            "file=/nowhere/f.npz: cannot be read .No such file",
        ),
        (sources.npz, {"file": "/"}, "file=/: cannot be read .Is a directory"),
        (
            sources.synthetic,
            {"alpha": 0.001, "labels": "published"},
            "alpha=0.001: accepted for the published data: 0.01",
        ),
        (sources.text, {"file": ""}, "file=: cannot be read"),
        (
            sources.text,
            {"file": "/nowhere/f.txt"},
            r"file=/nowhere/f\.txt: cannot be read .No such file",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(load, arguments, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        load(**arguments)


def test_the_smallest_alpha_of_the_published_data_is_accepted():
    assert sources.synthetic(4, alpha=0.01, labels="published", test_examples=5).x.shape[1] == 150
