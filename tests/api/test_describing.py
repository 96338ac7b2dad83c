"""Descriptions of methods: whole, valid JSON, and equal to what the methods declare."""

import dataclasses
import json

import pytest

import pfljax as pfl
from pfljax.settings.method import METHODS

NAMES = [name for name in METHODS if METHODS[name].__module__.startswith("pfljax.")]


@pytest.fixture(scope="module")
def described():
    return {name: pfl.methods.describe(name) for name in NAMES}


def test_every_method_is_described(described):
    for name, entry in described.items():
        method = METHODS[name]
        assert json.loads(json.dumps(entry, allow_nan=False)) == entry
        assert (entry["name"], entry["class"]) == (name, method.__name__)
        assert entry["file"] == method.__module__.replace(".", "/") + ".py"
        assert entry["title"] and entry["keeps"] and entry["sends"]
        fields = dataclasses.fields(method)
        assert [field["name"] for field in entry["hyperparameters"]] == [f.name for f in fields]
        for field, declared in zip(entry["hyperparameters"], fields, strict=True):
            assert field["help"] == declared.metadata["help"] != ""
            assert field["type"]


def test_the_described_defaults_bounds_and_grids_are_accepted_and_what_is_beyond_is_refused(
    described,
):
    beyond = {"at_least": -1, "above": 0, "at_most": 1, "below": 0}
    refused = 0
    for name, entry in described.items():
        method = METHODS[name]
        for field in entry["hyperparameters"]:
            conditions = field["read_with"]
            if conditions:
                continue  # accepted with others only
            for value in (*field["grid"], *field["choices"]):
                method(**{field["name"]: value})
            for bound, step in beyond.items():
                if field[bound] is None:
                    continue
                with pytest.raises(pfl.ArgumentError):
                    method(**{field["name"]: field[bound] + step})
                refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("name", "topology", "paper"),
    [
        ("local", "own", None),
        ("fedavg", "shared", "McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "),
        ("dfedem", "push", "Marfoq, Neglia, Bellet, Kameni, Vidal, "),
        ("federico", "peers", '"Find your friends: '),
        ("federico_friends", "peers", None),  # ours
        ("fedtp", "shared", "Li, Cai, Wang, Tang, Ding, Lin, Shi, "),  # needs attention
        ("fedit", "shared", "Zhang, Vahidian, "),  # needs adapters
        ("fedadam", "shared", "FedAvgM: Hsu, "),
    ],
)
def test_topologies_and_papers(described, name, topology, paper):
    entry = described[name]
    assert entry["topology"] == topology
    assert (entry["paper"] or "").startswith(paper or "") and bool(entry["paper"]) == bool(paper)


def test_types_are_in_words(described):
    def types(name):
        return {field["name"]: field["type"] for field in described[name]["hyperparameters"]}

    assert types("ditto") == {"mu": "float"}
    assert types("fedadam")["server_optimizer"] == "text"
    assert types("fedadam")["beta1"] == "float or null"
    assert types("fedfomo")["scaled"] == "bool"
    assert types("flexlora")["ranks"] == "list of int"
    assert types("fedrep")["body_epochs"] == "int or null"


def test_names_are_in_any_case_and_unknown_ones_are_refused():
    assert pfl.methods.describe("FedAvg") == pfl.methods.describe("fedavg")
    with pytest.raises(pfl.ArgumentError, match="method=dito: unknown method; did you mean ditto"):
        pfl.methods.describe("dito")
