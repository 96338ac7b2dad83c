"""Which edits of a user's functions on the host are noticed, and which are none."""

import ast
import importlib
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pfljax.folder.host_code import difference, identity, syntax

ROOT = Path(__file__).parents[2]


class Edit(NamedTuple):
    """An edit of a file.

    Attributes:
        code: The file "score.py", whose `score` is a metric.
        old: Text in it, or in the helper.
        new: What stands there after the edit.
        helper: The file "helper.py" beside it.
    """

    code: str
    old: str
    new: str
    helper: str = ""


CONSTANT = """
    import numpy as np
    LIMIT = 0.5
    TABLE = {"a": 1.0, "b": [2.0, 3.0]}
    WEIGHTS = np.array([1.0, 2.0])
    NAMES = {"x", "y"}
    def score(outputs, y):
        return LIMIT * TABLE["b"][0] * WEIGHTS.sum() * len(NAMES) + (outputs > 0.25).mean()
"""
LAMBDA = """
    LIMIT = 0.5
    OTHER = 2.0
    def score(outputs, y):
        def inner(value):
            return value > LIMIT
        return sum(map(lambda value: inner(value) * OTHER, outputs))
"""
CLASS = """
    class Base:
        scale = 2.0
        def factor(self):
            return self.scale
    class Score(Base):
        limit = 0.5
        __slots__ = ("own",)
        def __init__(self, own):
            self.own = own
        @property
        def both(self):
            return self.limit + self.own
        @staticmethod
        def fixed():
            return 7.0
        @classmethod
        def of_class(cls):
            return cls.limit * 3.0
        def __call__(self, outputs, y):
            return self.both * self.factor() + self.fixed() + self.of_class()
        def named(self, outputs, y):
            return self.both
    score = Score(0.1)
"""
BOUND = CLASS + "    score = Score(0.1).named\n"
PARTIAL = """
    import functools
    def general(limit, outputs, y, power=2):
        return (outputs > limit).mean() ** power
    score = functools.partial(general, 0.5, power=3)
"""
CLOSURE = """
    def make(limit, table):
        def score(outputs, y):
            return (outputs > limit).mean() + table["t"]
        return score
    score = make(0.5, {"t": 1.0})
"""
WRAPPED = """
    import functools
    def twice(function):
        @functools.wraps(function)
        def call(*args):
            return 2 * function(*args)
        return call
    @twice
    def score(outputs, y):
        return outputs.mean() + 1.0
"""
CACHED = """
    import functools
    @functools.lru_cache
    def factor(power):
        return 3.0 ** power
    def score(outputs, y):
        return factor(2)
"""
JITTED = """
    import jax
    @jax.jit
    def inner(outputs):
        return outputs * 3.0
    def score(outputs, y):
        return float(inner(outputs).sum())
"""
DATACLASS = """
    import dataclasses
    @dataclasses.dataclass(frozen=True)
    class Score:
        limit: float = 0.5
        def __call__(self, outputs, y):
            return (outputs > self.limit).mean()
    score = Score()
"""
DICT = """
    def plain(outputs):
        return outputs.mean()
    def squared(outputs):
        return (outputs ** 2).mean()
    KINDS = {"plain": plain, "squared": squared}
    ORDER = [("one", plain)]
    def score(outputs, y):
        return KINDS["squared"](outputs) + ORDER[0][1](outputs)
"""
HELPED = """
    import helper
    def score(outputs, y):
        return helper.scaled(outputs)
"""
FROM_HELPER = """
    from helper import scaled
    def score(outputs, y):
        return scaled(outputs)
"""
LATE = """
    def score(outputs, y):
        from helper import scaled
        return scaled(outputs)
"""
LATE_MODULE = """
    def score(outputs, y):
        import helper as h
        return h.scaled(outputs)
"""
HELPER = """
    FACTOR = 2.0
    def scaled(outputs):
        return FACTOR * deeper(outputs)
    def deeper(outputs):
        return outputs.mean() + 5.0
"""
COMPUTED = """
    def first(outputs):
        return outputs.mean()
    def score(outputs, y):
        return globals()["fir" + "st"](outputs)
"""
IMPORTED_BY_NAME = """
    import importlib
    def score(outputs, y):
        return importlib.import_module("helper").scaled(outputs)
"""
GETATTR = """
    import helper
    def score(outputs, y):
        return getattr(helper, "sca" + "led")(outputs)
"""
EVALUATED = """
    RULE = "outputs.mean() * 2"
    def score(outputs, y):
        return eval(RULE, {"outputs": outputs})
"""
PATTERN = """
    import re
    RULE = re.compile("a+")
    def score(outputs, y):
        return len(RULE.findall("aabaa"))
"""
ENUM = """
    import enum
    class Kind(enum.Enum):
        LOW = 1
        HIGH = 2
    KIND = Kind.LOW
    def score(outputs, y):
        return KIND.value
"""
NESTED = """
    class Box:
        def __init__(self, inner):
            self.inner = inner
    BOX = Box({"deep": [Box((1.0, 2.0))]})
    def score(outputs, y):
        return BOX.inner["deep"][0].inner[1]
"""
SKLEARN = """
    import numpy as np
    from sklearn.linear_model import LinearRegression
    MODEL = LinearRegression().fit(np.arange(6.0).reshape(3, 2), [1.0, 2.0, 3.0])
    def score(outputs, y):
        return MODEL.predict(outputs).mean()
"""
PANDAS = """
    import pandas
    FRAME = pandas.DataFrame({"a": [1.0, 2.0]})
    def score(outputs, y):
        return FRAME["a"].mean()
"""
METRIC = """
    import pfljax as pfl
    @pfl.metrics.metric(higher_is_better=False)
    def score(outputs, y):
        return outputs.mean()
"""
PATCHED = """
    import math
    def mine(x):
        return x + 1.0
    math.special = mine
    def score(outputs, y):
        return math.special(outputs.mean())
"""
GENERATOR = """
    LIMIT = 3.0
    def score(outputs, y):
        return sum(value * LIMIT for value in outputs if value > 1.0)
"""
TRIED = """
    def score(outputs, y):
        try:
            return outputs.mean() / len(y)
        except ZeroDivisionError:
            return 0.0
"""
DEFAULTS = """
    def score(outputs, y, limit=0.5, *, power=2):
        return (outputs > limit).mean() ** power
"""
ATTRIBUTE = """
    def score(outputs, y):
        return outputs.mean() * score.factor
    score.factor = 2.0
"""
META = """
    class Meta(type):
        def factor(cls):
            return 2.0
    class Score(metaclass=Meta):
        def __call__(self, outputs, y):
            return type(self).factor()
    score = Score()
"""
CACHED_PROPERTY = """
    import functools
    class Score:
        @functools.cached_property
        def factor(self):
            return 2.0
        def __call__(self, outputs, y):
            return self.factor
    score = Score()
"""

CHANGES = {
    "a number": Edit(CONSTANT, "0.25", "0.26"),
    "a comparison": Edit(CONSTANT, "outputs > 0.25", "outputs >= 0.25"),
    "a global number": Edit(CONSTANT, "LIMIT = 0.5", "LIMIT = 0.6"),
    "its type": Edit(CONSTANT, "LIMIT = 0.5", "LIMIT = np.float32(0.5)"),
    "an entry of a dict": Edit(CONSTANT, "[2.0, 3.0]", "[2.5, 3.0]"),
    "a value of an array": Edit(CONSTANT, "[1.0, 2.0])", "[1.0, 2.5])"),
    "the dtype of an array": Edit(CONSTANT, "[1.0, 2.0])", "[1.0, 2.0], np.float32)"),
    "an element of a set": Edit(CONSTANT, '{"x", "y"}', '{"x", "z"}'),
    "an argument": Edit(CONSTANT, ".mean()", ".mean(axis=0)"),
    "another method": Edit(CONSTANT, ".mean()", ".sum()"),
    "a global of an inner function": Edit(LAMBDA, "LIMIT = 0.5", "LIMIT = 0.6"),
    "a global of a lambda": Edit(LAMBDA, "OTHER = 2.0", "OTHER = 3.0"),
    "an inner function": Edit(LAMBDA, "value > LIMIT", "value < LIMIT"),
    "an attribute of an object": Edit(CLASS, "Score(0.1)", "Score(0.2)"),
    "an attribute of its class": Edit(CLASS, "limit = 0.5", "limit = 0.6"),
    "an attribute of a base": Edit(CLASS, "scale = 2.0", "scale = 3.0"),
    "a method of a base": Edit(CLASS, "return self.scale", "return -self.scale"),
    "a property": Edit(CLASS, "self.limit + self.own", "self.limit - self.own"),
    "a static method": Edit(CLASS, "7.0", "8.0"),
    "a class method": Edit(CLASS, "cls.limit * 3.0", "cls.limit * 4.0"),
    "the call of an object": Edit(CLASS, "* self.factor()", "/ self.factor()"),
    "the object of a bound method": Edit(BOUND, "Score(0.1).named", "Score(0.2).named"),
    "the class of a bound method": Edit(BOUND, "limit = 0.5", "limit = 0.6"),
    "a bound method": Edit(BOUND, "return self.both\n", "return 2 * self.both\n"),
    "an argument of a partial": Edit(PARTIAL, "general, 0.5", "general, 0.6"),
    "a keyword of a partial": Edit(PARTIAL, "power=3)", "power=4)"),
    "the function of a partial": Edit(PARTIAL, "outputs > limit", "outputs < limit"),
    "a closure": Edit(CLOSURE, "make(0.5", "make(0.6"),
    "a dict in a closure": Edit(CLOSURE, '{"t": 1.0}', '{"t": 2.0}'),
    "a decorator": Edit(WRAPPED, "2 * function", "3 * function"),
    "a decorated function": Edit(WRAPPED, "+ 1.0", "+ 2.0"),
    "a cached function": Edit(CACHED, "3.0 ** power", "4.0 ** power"),
    "a jitted function": Edit(JITTED, "outputs * 3.0", "outputs * 4.0"),
    "a field of a dataclass": Edit(DATACLASS, "limit: float = 0.5", "limit: float = 0.6"),
    "a value of a dataclass": Edit(DATACLASS, "Score()", "Score(0.7)"),
    "a function in a dict": Edit(DICT, "outputs ** 2", "outputs ** 3"),
    "a function in a list": Edit(DICT, "return outputs.mean()", "return outputs.min()"),
    "which function a dict has": Edit(DICT, '"squared": squared', '"squared": plain'),
    "a helper": Edit(HELPED, "+ 5.0", "+ 6.0", HELPER),
    "a global of a helper": Edit(HELPED, "FACTOR = 2.0", "FACTOR = 3.0", HELPER),
    "what is imported of a helper": Edit(FROM_HELPER, "+ 5.0", "+ 6.0", HELPER),
    "a global of what is imported": Edit(FROM_HELPER, "FACTOR = 2.0", "FACTOR = 3.0", HELPER),
    "what is imported late": Edit(LATE, "+ 5.0", "+ 6.0", HELPER),
    "a module imported late": Edit(LATE_MODULE, "FACTOR = 2.0", "FACTOR = 3.0", HELPER),
    "a module by its name": Edit(IMPORTED_BY_NAME, "+ 5.0", "+ 6.0", HELPER),
    "a computed name": Edit(COMPUTED, "return outputs.mean()", "return outputs.min()"),
    "a computed attribute": Edit(GETATTR, "+ 5.0", "+ 6.0", HELPER),
    "code as text": Edit(EVALUATED, "mean() * 2", "mean() * 3"),
    "a pattern": Edit(PATTERN, '"a+"', '"b+"'),
    "a flag of a pattern": Edit(PATTERN, '"a+")', '"a+", re.I)'),
    "a member of an enumeration": Edit(ENUM, "KIND = Kind.LOW", "KIND = Kind.HIGH"),
    "the value of a member": Edit(ENUM, "LOW = 1", "LOW = 3"),
    "an object inside others": Edit(NESTED, "(1.0, 2.0)", "(1.0, 3.0)"),
    "an estimator": Edit(SKLEARN, "[1.0, 2.0, 3.0]", "[1.0, 2.0, 4.0]"),
    "a frame": Edit(PANDAS, "[1.0, 2.0]", "[1.0, 2.5]"),
    "the direction of a metric": Edit(METRIC, "higher_is_better=False", "higher_is_better=True"),
    "the function of a metric": Edit(METRIC, "outputs.mean()", "outputs.min()"),
    "a function put into a library": Edit(PATCHED, "x + 1.0", "x + 2.0"),
    "a global of a generator": Edit(GENERATOR, "LIMIT = 3.0", "LIMIT = 4.0"),
    "a condition of a generator": Edit(GENERATOR, "value > 1.0", "value > 2.0"),
    "what is caught": Edit(TRIED, "ZeroDivisionError", "ValueError"),
    "what is returned then": Edit(TRIED, "return 0.0", "return 1.0"),
    "a default": Edit(DEFAULTS, "limit=0.5", "limit=0.6"),
    "a default by keyword": Edit(DEFAULTS, "power=2", "power=3"),
    "an attribute of a function": Edit(ATTRIBUTE, "score.factor = 2.0", "score.factor = 3.0"),
    "a metaclass": Edit(META, "return 2.0", "return 3.0"),
    "a cached property": Edit(CACHED_PROPERTY, "return 2.0", "return 3.0"),
}

SAME = {
    "a comment": Edit(CONSTANT, "LIMIT = 0.5", "LIMIT = 0.5  # of all"),
    "an empty line": Edit(CONSTANT, "    def score", "\n\n    def score"),
    "parentheses": Edit(CONSTANT, "(outputs > 0.25).mean()", "((outputs > 0.25).mean())"),
    "a line break": Edit(CONSTANT, "return LIMIT *", "return LIMIT \\\n            *"),
    "a docstring": Edit(
        CONSTANT, "def score(outputs, y):", 'def score(outputs, y):\n        """Of all."""'
    ),
    "a docstring of an inner function": Edit(
        LAMBDA, "inner(value):", 'inner(value):\n            """Inner."""'
    ),
    "a docstring of a class": Edit(CLASS, "class Base:", 'class Base:\n        """A base."""'),
    "the order of a set": Edit(CONSTANT, '{"x", "y"}', '{"y", "x"}'),
    "another name for a local variable": Edit(
        LAMBDA, "inner(value):\n            return value", "inner(v):\n            return v"
    ),
    "a function that it does not use": Edit(
        CONSTANT, "    def score", "    def other():\n        return 1\n    def score"
    ),
    "a global that it does not use": Edit(CONSTANT, "    LIMIT", "    UNUSED = 3\n    LIMIT"),
    "annotations": Edit(
        CONSTANT, "def score(outputs, y):", "def score(outputs: float, y: int) -> float:"
    ),
    "the order of methods": Edit(
        CLASS,
        '        limit = 0.5\n        __slots__ = ("own",)\n',
        '        __slots__ = ("own",)\n        limit = 0.5\n',
    ),
    "another way to write a number": Edit(CONSTANT, "LIMIT = 0.5", "LIMIT = 5e-1"),
    "quotes": Edit(CONSTANT, '{"x", "y"}', "{'x', 'y'}"),
    "a comment in a helper": Edit(HELPED, "+ 5.0", "+ 5.0  # more", HELPER),
    "a docstring in a helper": Edit(
        HELPED, "def deeper(outputs):", 'def deeper(outputs):\n        """Mean."""', HELPER
    ),
    "an import that it does not use": Edit(
        CONSTANT, "import numpy as np", "import numpy as np\n    import math"
    ),
}


def identity_of(folder, code: str, helper: str, name: str = "score") -> dict[str, Any]:
    """The identity of `score` in files of a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "score.py").write_text(textwrap.dedent(code))
    if helper:
        (folder / "helper.py").write_text(textwrap.dedent(helper))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "score", raising=False)
        patch.delitem(sys.modules, "helper", raising=False)
        try:
            return identity(getattr(importlib.import_module("score"), name))
        finally:
            sys.modules.pop("score", None)
            sys.modules.pop("helper", None)


def told(tmp_path, edit: Edit) -> str:
    """What is said of an edit."""
    code = textwrap.dedent(edit.code)
    old = edit.old
    new = edit.new
    in_code = edit.code.replace(old, new)
    in_helper = edit.helper.replace(old, new)
    assert (in_code, in_helper) != (edit.code, edit.helper), code
    before = identity_of(tmp_path / "before", edit.code, edit.helper)
    after = identity_of(tmp_path / "after", in_code, in_helper)
    return difference(before, after)


@pytest.mark.parametrize("edit", CHANGES.values(), ids=CHANGES)
def test_an_edit_is_noticed_with_its_file(edit, tmp_path):
    file = "helper.py" if edit.helper and edit.old in edit.helper else "score.py"
    assert told(tmp_path, edit) == f"{file} changed"


@pytest.mark.parametrize("edit", SAME.values(), ids=SAME)
def test_what_changes_nothing_is_not_noticed(edit, tmp_path):
    assert told(tmp_path, edit) == ""


def test_files_of_packages_are_known_by_their_paths(tmp_path):
    """Also if a helper imports them only when it is called, by their full names."""
    texts = {
        "pack/__init__.py": "",
        "pack/score.py": "from pack.sub.helper import scaled\ndef score(outputs, y): return scaled(outputs)",
        "pack/sub/__init__.py": "",
        "pack/sub/helper.py": "def scaled(x):\n    from pack.other.helper import FACTOR\n    return FACTOR * x",
        "pack/other/__init__.py": "",
        "pack/other/helper.py": "FACTOR = 2.0",
    }

    def known(folder, changed=None):
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text if name != changed else text.replace("2.0", "3.0"))
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)
            try:
                return identity(importlib.import_module("pack.score").score)
            finally:
                for name in [name for name in sys.modules if name.partition(".")[0] == "pack"]:
                    del sys.modules[name]

    before = known(tmp_path / "before")
    # The package of a helper is reached only by the import of its module.
    assert set(before["files"]) == set(texts) - {"pack/sub/__init__.py"}
    after = known(tmp_path / "after", changed="pack/other/helper.py")
    assert difference(before, after) == "pack/other/helper.py changed"
    assert difference(before | {"python": "3.0"}, after) == "pack/other/helper.py changed"


DISPATCHED = """
    import functools
    @functools.singledispatch
    def size(value):
        return 0.0
    def score(outputs, y):
        return size(outputs)
"""


@pytest.mark.parametrize("code", [DISPATCHED, CACHED_PROPERTY, CACHED, JITTED])
def test_a_function_that_was_called_is_the_same(code, tmp_path):
    """Although caches have values then."""
    module = types.ModuleType("score")
    exec(textwrap.dedent(code), vars(module))
    before = identity(vars(module)["score"])
    vars(module)["score"](np.ones(3), np.ones(3))
    assert difference(before, identity(vars(module)["score"])) == ""


REBOUND = """
    LOW = 0.0
    HIGH = 0.0
    def learn(value):
        global LOW
        LOW = value
    def score(outputs, y):
        learn(outputs.max())
        return LOW
"""
IN_HELPER = """
    LIMIT = 0.5
    OTHER = 0.25
    def outer(value, limit=LIMIT):
        LIMIT = value
        def inner(value):
            LIMIT = 2.0 * value
            def deepest(value):
                found = 3.0
                return found + LIMIT
            return deepest(value)
        return inner(LIMIT) + limit
"""


def test_which_of_two_equal_globals_is_read_is_noticed_if_one_is_assigned_to(tmp_path):
    assert told(tmp_path, Edit(REBOUND, "return LOW", "return HIGH")) == "score.py changed"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("found + LIMIT", "found + found"),
        ("limit=LIMIT", "limit=OTHER"),
        ("inner(LIMIT)", "inner(OTHER)"),
    ],
)
def test_which_variable_a_helper_reads_is_noticed(old, new):
    assert syntax_of(IN_HELPER) != syntax_of(IN_HELPER.replace(old, new))


def test_a_default_is_not_a_local_variable():
    """Although both have the same name."""
    other = IN_HELPER.replace("limit=LIMIT", "limit=OTHER").replace(
        "        LIMIT = value", "        OTHER = value"
    )
    other = other.replace("inner(LIMIT)", "inner(OTHER)")
    assert syntax_of(IN_HELPER) != syntax_of(other)


def test_another_name_for_a_local_variable_of_a_helper_is_none():
    assert syntax_of(IN_HELPER) == syntax_of(IN_HELPER.replace("found", "constant"))


def syntax_of(code: str) -> str:
    return syntax(ast.parse(textwrap.dedent(code)))


def test_values_that_no_file_shows_are_noticed():
    def make(limit):
        return lambda outputs, y: (outputs > limit).mean()

    assert difference(identity(make(0.5)), identity(make(0.5))) == ""
    assert difference(identity(make(0.5)), identity(make(0.6))) == "a value that it uses changed"


@pytest.mark.slow
def test_an_identity_is_the_same_in_every_process(tmp_path):
    """Hashes of strings differ between processes."""
    for name, code in {"constant": CONSTANT, "classes": CLASS, "estimator": SKLEARN}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    program = "from pfljax.folder.host_code import identity\n"
    program += "import constant, classes, estimator\n"
    program += "print([identity(each.score)['code'] for each in (constant, classes, estimator)])"
    found = set()
    for seed in ("1", "2"):
        environment = {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "PATH": "/usr/bin:/bin",
        }
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
