"""The public names of models: modules list them, and former ones say the present ones."""

import pytest

from pfljax import models

MODULES = {"models": models, "adapters": models.adapters, "weights": models.weights}


@pytest.mark.parametrize("name", MODULES)
def test_modules_list_their_public_names_only(name):
    module = MODULES[name]
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("predictions_of", "predict_from_outputs"),
        ("losses_of", "loss_from_outputs"),
        ("over_places", "mean_over_positions"),
        ("behind", "tail"),
        ("own_statistics", "module_statistics"),
    ],
)
def test_former_names_say_the_present_ones(former, present):
    model = models.Model(models.MLP((), outputs=2))
    with pytest.warns(FutureWarning, match=f"Model.{former} is now Model.{present}$"):
        value = getattr(model, former)
    assert value == getattr(model, present)
