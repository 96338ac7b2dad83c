"""The examples in docstrings of data sets, sources, partitions and federations."""

import doctest
import importlib
import inspect
import pkgutil
import warnings

import pytest

import pfljax as pfl
from pfljax import data

MODULES = [data.__name__]
MODULES += [
    module.name for module in pkgutil.walk_packages(data.__path__, prefix=f"{data.__name__}.")
]
PUBLIC = (data, data.sources, pfl.partitions)


def examples(name):
    """The examples of a module's own classes and functions."""
    module = importlib.import_module(name)
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize("name", [name for name in MODULES if examples(name)])
def test_the_examples_of_a_module_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(verbose=False)
    report = []
    for test in examples(name):
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_a_public_module_lists_its_names_and_each_has_examples(module):
    assert dir(module) == sorted(module.__all__)
    without = []
    for name in module.__all__:
        value = getattr(module, name)
        is_documented = inspect.isclass(value) or inspect.isfunction(value)
        if is_documented and "Examples:\n" not in (value.__doc__ or ""):
            without.append(name)
    assert without == []


def test_former_names_work_with_a_warning():
    clients = data.digits(num_clients=4)
    with pytest.warns(DeprecationWarning, match=r"^Federation\.own is now local_clients$"):
        assert clients.own is None
    with pytest.warns(DeprecationWarning, match=r"^examples\(part=\) is now split=$"):
        x, _ = clients.examples(0, part="train")
    assert len(x) == clients.train.size[0]
    with pytest.warns(DeprecationWarning, match=r"^pfljax\.data\.codes_of is now distinct_codes$"):
        assert data.codes_of is data.distinct_codes
    with pytest.raises(AttributeError, match="has no attribute 'owned'"):
        _ = clients.owned
