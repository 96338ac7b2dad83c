"""The columns of a comparison that say on which terms: what a method was told, and its budget."""

import json

import html_pages
import numpy as np
import optax
import pytest
import toys

import pfljax as pfl
from pfljax.report import terms

MODEL = pfl.models.MLP(hidden=())
LOCAL = pfl.LocalTraining(optax.sgd(0.1), batch_size=4, epochs=2)


def clients(groups=2):
    return pfl.data.digits(
        num_clients=6, partition=pfl.partitions.LabelGroups(groups=groups), train_examples=8
    )


@pytest.mark.parametrize(
    ("name", "hyperparameters", "expected"),
    [
        ("fedavg", {}, 1),
        ("fedem", {"components": 3}, 3),
        ("fedrep", {"head_epochs": 4, "body_epochs": 2}, 3),
    ],
)
def test_a_client_s_gradients_in_a_round_are_counted(name, hyperparameters, expected):
    """Two epochs in batches of two are 6, 2, 4 and 0 steps, in half of the rounds; FedRep has 4 + 2 epochs."""
    federation = toys.make_federation((5, 1, 3, 0))
    problem = toys.make_problem(federation, batch_size=2, epochs=2, cohort=2, hidden=(3,))
    experiment = toys.make_experiment(name, problem, federation, hyperparameters=hyperparameters)
    assert (
        experiment.gradients(experiment.algorithm(problem.plan))
        == expected * (6 + 2 + 4 + 0) / 4 / 2
    )


@pytest.mark.slow
@pytest.mark.pages
def test_a_table_tells_what_methods_knew_and_their_budgets(tmp_path):
    federation = clients()
    methods = [pfl.IFCA(), pfl.Local(), ("own", pfl.IFCA(clusters=1))]
    table = pfl.compare(methods, federation, MODEL, LOCAL, rounds=1, tell_groups=True, out=tmp_path)
    heads, body = table.columns()

    def column(head):
        return [line[heads.index(head)] for line in body]

    assert column("knows") == ["the number of groups (2)", "-", "-"]
    steps = float(np.mean(2 * np.ceil(federation.train.size / 4)))
    assert column("budget: gradients") == [f"{steps:.4g}"] * 3
    # MB of a model: two down and one up, with its weight; none; one down and up
    size = (64 + 1) * 10 * 4 / 1e6
    sent = [float(text) for text in column("budget: MB")]
    assert sent == pytest.approx([3 * size, 0, 2 * size], rel=0.01)
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["knows"] for row in rows] == ["the number of groups (2)", "", ""]
    assert [row["gradients_per_round"] for row in rows] == [steps] * 3
    assert terms.BUDGET in (tmp_path / "table.md").read_text()
    cells = {cell for row in html_pages.read(tmp_path / "report.html").rows for cell in row}
    assert {"the number of groups (2)", "budget: gradients"} <= cells
    config = json.loads((tmp_path / "ifca" / "seed-0" / "config.json").read_text())
    assert config["settings"]["ifca.clusters"] == 2


def test_without_tell_groups_nothing_is_told_and_groups_of_one_client_cannot_be():
    assert pfl.Run(pfl.IFCA(), clients(), MODEL, LOCAL).experiment.method.clusters == 3
    with pytest.raises(
        pfl.ArgumentError, match=r"^tell_groups=True: accepted for clients in known groups"
    ):
        pfl.Run(pfl.IFCA(), clients(groups=5), MODEL, LOCAL, tell_groups=True)


def test_a_value_at_an_edge_is_marked_and_explained():
    chosen = {"learning_rate": 3.0, "mu": 1, "linkage": "single"}
    assert terms.values(chosen, ["learning_rate"]) == "learning rate 3 (edge), mu 1, linkage single"
    assert terms.notes([{"at_edge": []}, {}]) == [] and terms.notes([{"at_edge": ["mu"]}]) == [
        terms.AT_EDGE
    ]
