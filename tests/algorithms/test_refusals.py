"""What methods refuse of a problem, in one line that names the hyperparameter."""

import dataclasses
import itertools

import flax.linen as nn
import pytest
import toys

from pfljax.contract.errors import ArgumentError


class OfPlaces(nn.Module):
    """Logits for each of a sequence's two positions."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(6)(x).reshape(-1, 2, 3)


# Method, hyperparameters, and what is said for clients of (5, 3, 4) examples and a linear model.
HYPERPARAMETERS = [
    ("fedper", {"personal_layers": 2}, "personal_layers=2: accepted: 0 to 1, the number of layers"),
    ("fedrep", {"personal_layers": 2}, "personal_layers=2: accepted: 0 to 1, the number of layers"),
    ("fedala", {"layers": 2}, "layers=2: accepted: 0 to 1, the number of layers"),
    ("lg_fedavg", {"shared_layers": 9}, "shared_layers=9: accepted: "),
    ("ifca", {"shared_layers": 2}, "shared_layers=2: accepted: 0 to 1"),
    (
        "ifca",
        {"averaging": "gradients", "shared_layers": 1},
        "shared_layers=1: must be 0 with averaging=gradients",
    ),
    ("fednova", {"min_epochs": 6, "max_epochs": 5}, "min_epochs=6: accepted: "),
    (
        "fedadam",
        {"server_optimizer": "adagrad", "beta2": 0.9},
        "beta2: accepted only with adam and yogi",
    ),
    ("fedfomo", {"clusters": 4}, "clusters=4: accepted: 0 to 3, the number of clients"),
    ("fedtp", {"personal": "("}, r"personal=\(: is no regular expression: "),
]


@pytest.mark.parametrize(("name", "hyperparameters", "said"), HYPERPARAMETERS)
def test_hyperparameters_that_do_not_fit_the_problem(name, hyperparameters, said):
    problem = toys.make_problem(toys.make_federation((5, 3, 4), "regression"))
    with pytest.raises(ArgumentError, match=rf"^{name}\.{said}"):
        toys.make_algorithm(name, problem, **hyperparameters)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        *itertools.product(["fedrod", "fml", "fedkd", "fedntd", "fedlc"], ["regression"]),
        *itertools.product(
            [
                "fedpac",
                "fedproto",
                "feddbe",
                "fedgh",
                "ccvr",
                "gpfl",
                "knn_per",
                "fedas",
                "pfedfda",
                "flute",
                "fedcp",
                "perada",
                "pefll",
            ],
            ["regression", "sequences"],
        ),
    ],
)
def test_tasks_without_one_class_to_an_example(name, task):
    problem = toys.make_problem(
        toys.make_federation((3, 4), task.replace("sequences", "classification"))
    )
    if task == "sequences":
        problem = problem._replace(model=dataclasses.replace(problem.model, module=OfPlaces()))
    needs = "needs classes" if task == "regression" else "needs one class per example"
    with pytest.raises(ArgumentError, match=f"^method={name}: {needs}; choose another method for"):
        toys.make_algorithm(name, problem)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("fedtp", r"attention, whose parameters' paths contain \(\^\|/\)\(query\|key\|value\)/"),
        *((name, "LoRA; accepted: .*lora") for name in toys.ADAPTERS),
    ],
)
def test_networks_without_what_a_method_trains(name, needs):
    problem = toys.make_problem(toys.make_federation((2, 3)), hidden=(4,))
    with pytest.raises(ArgumentError, match=rf"^method={name}: needs {needs}"):
        toys.make_algorithm(name, problem)
