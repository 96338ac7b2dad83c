"""Arguments that sources refuse."""

import pytest

from pfljax.contract.errors import ArgumentError
from pfljax.data import sources


@pytest.mark.parametrize(
    ("load", "arguments", "message"),
    [
        (sources.npz, {"file": None}, "file: accepted: an npz"),
        (sources.npz, {"file": "/nowhere/f.npz"}, "file=/nowhere/f.npz: cannot be read .No such file"),
        (sources.npz, {"file": "/"}, "file=/: cannot be read .Is a directory"),
        (sources.digits, {"fraction": 0}, r"fraction=0: accepted: above 0, at most 1"),
        (sources.digits, {"fraction": 1.5}, r"fraction=1\.5: accepted"),
        (sources.digits, {"seed": -1}, "seed=-1: accepted"),
        (sources.sine, {"num_clients": 0}, "num_clients=0: accepted: 1 or more"),
        (sources.synthetic, {"num_clients": 0}, "num_clients=0: accepted: 1 or more"),
        (sources.synthetic, {"components": 0}, "components=0: accepted: 1 or more"),
        (sources.synthetic, {"alpha": 0}, "alpha=0: accepted"),
        (
            sources.synthetic,
            {"alpha": 0.001, "labels": "published"},
            "alpha=0.001: accepted for the published data: 0.01",
        ),
        (
            sources.synthetic,
            {"labels": "publishd"},
            "labels=publishd: accepted: mixture, published; did you mean published?",
        ),
        (sources.synthetic, {"test_examples": -1}, "test_examples=-1: accepted: 0 or more"),
        (sources.text, {"file": ""}, "file=: cannot be read"),
        (sources.text, {"file": "/nowhere/f.txt"}, r"file=/nowhere/f\.txt: cannot be read .No such file"),
        (sources.text, {"file": "f.txt", "stride": 0}, "stride=0: accepted"),
        (sources.get, {"name": "digit"}, "dataset=digit: unknown; did you mean digits?"),
    ],
)
def test_wrong_arguments_are_refused_by_name(load, arguments, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        load(**arguments)
