"""The public names of models: their examples run, and each has one."""

import doctest
import inspect

import pytest

from pfljax import models
from pfljax.models import losses

MODULES = {"models": models, "adapters": models.adapters, "weights": models.weights}


def public_objects():
    """Public classes and functions by name."""
    objects = {f"losses.{name}": loss for name, (_, loss) in losses.LOSSES.items()}
    for module_name, module in MODULES.items():
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                objects[f"{module_name}.{name}"] = value
    return objects


OBJECTS = public_objects()


@pytest.mark.parametrize("name", OBJECTS)
def test_examples_run(name):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    tests = doctest.DocTestFinder().find(OBJECTS[name], name, globs={})
    report = []
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.tries > 0, "has no example"
    assert runner.failures == 0, "".join(report)


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
    with pytest.warns(DeprecationWarning, match=f"Model.{former} is now Model.{present};"):
        value = getattr(model, former)
    assert value == getattr(model, present)
