"""The examples in docstrings run, and every public class and function has one."""

import ast
import doctest
import functools
import importlib
import importlib.util
import inspect
import itertools
import warnings
from pathlib import Path

import pytest

from pfljax.models import losses

PACKAGE = Path(__file__).parents[1] / "pfljax"
PUBLIC_MODULES = [
    "pfljax",
    "pfljax.author",
    "pfljax.contract.tree",
    "pfljax.data",
    "pfljax.data.partitions",
    "pfljax.data.sources",
    "pfljax.methods",
    "pfljax.metrics",
    "pfljax.models",
    "pfljax.models.adapters",
    "pfljax.models.weights",
    "pfljax.trackers",
]
ALIASES = {"pfljax.training.tracking": ["Tracker"]}  # types with a docstring below them
# Packages that are no part of the extra test, by the module whose examples need them.
NEEDS = {"pfljax.models.pytorch": ("torch", "torchax")}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
HEADING = "Examples:\n"


def module_name(file):
    """The name of the module in a file."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def modules_with_examples():
    """The modules whose text has examples. Those of the api train, so only CI plays them."""
    modules = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if ">>> " not in file.read_text():
            continue
        name = module_name(file)
        marks = [pytest.mark.slow] if name.startswith("pfljax.api.") else []
        modules.append(pytest.param(name, id=name, marks=marks))
    return modules


def is_documented(value):
    """Whether a value is a class or a function."""
    return inspect.isclass(value) or inspect.isfunction(value)


def docstrings_of_aliases(module):
    """The strings below a module's assignments, by the name that is assigned to."""
    docstrings = {}
    lines = ast.parse(inspect.getsource(module)).body
    for line, below in itertools.pairwise(lines):
        match line, below:
            case (
                ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docstrings[name] = inspect.cleandoc(text)
    return docstrings


def examples_of_module(module):
    """The examples of a module's docstring, and of the classes, functions and aliases that it defines."""
    # Without a module, the finder also visits methods and functions that a decorator wraps.
    find = functools.partial(doctest.DocTestFinder().find, module=False)
    tests = doctest.DocTestFinder(recurse=False).find(module)
    for name, value in vars(module).items():
        if is_documented(value) and value.__module__ == module.__name__:
            tests += find(value, name, globs={"__name__": "__main__"})
    parser = doctest.DocTestParser()
    for name, text in docstrings_of_aliases(module).items():
        tests.append(parser.get_doctest(text, {"__name__": "__main__"}, name, module.__file__, 0))
    return [test for test in tests if test.examples]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_run(name, tmp_path, monkeypatch):
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    monkeypatch.chdir(tmp_path)
    tests = examples_of_module(importlib.import_module(name))
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    report = []
    for test in tests:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            runner.run(test, out=report.append)
    assert runner.tries, "its examples are not found"
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_public_classes_and_functions_have_examples(name):
    module = importlib.import_module(name)
    without = []
    for public_name in module.__all__:
        value = getattr(module, public_name)
        if is_documented(value) and HEADING not in (value.__doc__ or ""):
            without.append(public_name)
    assert without == []


@pytest.mark.parametrize(("name", "aliases"), ALIASES.items())
def test_types_have_examples(name, aliases):
    docstrings = docstrings_of_aliases(importlib.import_module(name))
    assert [alias for alias in aliases if HEADING not in docstrings.get(alias, "")] == []


def test_losses_have_examples():
    functions = {name: loss for name, (_, loss) in losses.LOSSES.items()}
    without = [name for name, loss in functions.items() if HEADING not in (loss.__doc__ or "")]
    assert without == []


def test_a_wrong_example_is_found(tmp_path):
    """A wrapped function and a method, which `doctest` alone would not find."""
    file = tmp_path / "wrong_examples.py"
    lines = [
        "import functools",
        "def wrap(function):",
        "    return functools.wraps(function)(lambda: function())",
        "@wrap",
        "def two():",
        '    """>>> 1 + 1',
        "    3",
        '    """',
        "class Three:",
        "    def method(self):",
        '        """>>> 1 + 2',
        "        4",
        '        """',
    ]
    file.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("wrong_examples", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    runner = doctest.DocTestRunner(verbose=False)
    for test in examples_of_module(module):
        runner.run(test, out=lines.append)
    assert runner.failures == 2
