"""Method declarations: creating a method checks its knobs, and errors name the method."""

import dataclasses
from typing import Literal

import jax
import numpy as np
import pytest

from pfljax import algorithms as algorithms
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import METHODS, get, knob, method


@pytest.fixture
def Toy():
    @method(keeps="nothing", travels="nothing")
    @dataclasses.dataclass(frozen=True)
    class Toy:
        """Toy (Somebody, 2026): does nothing."""

        count: int = knob(2, at_least=1, at_most=4, help="a number")
        rate: float = knob(0.5, above=0, below=1, help="a rate")
        kind: Literal["one", "other"] = knob("one", help="a choice")
        flag: bool = knob(True, help="a switch")
        limit: float | None = knob(None, above=0, help="a number, or none")

        def build(self, problem):
            raise ArgumentError(problem, "accepted: something else", 7)

    return Toy


def test_a_method_is_registered_with_its_title(Toy):
    assert get("toy") is Toy
    assert (Toy.info.name, Toy.info.title, Toy.info.keeps) == ("toy", "Toy (Somebody, 2026)", "nothing")


def declare(class_name, module=__name__, **options):
    """Declares a class as a file or a notebook does."""

    def build(self, problem): ...

    made = dataclasses.make_dataclass(class_name, [], namespace={"__doc__": "Toy (Me, 2026).", "build": build})
    made.__module__, made.__qualname__ = module, class_name  # which Python 3.12 takes from the caller
    return method(keeps="", travels="", **options)(made)


@pytest.mark.parametrize(
    ("name", "options", "taken"),
    [
        ("FedAvg", {}, "fedavg: is the name of pfljax.algorithms.fedavg.FedAvg"),
        ("Mine", {"name": "fedavg_plus"}, "fedavg_plus: is the name of pfljax.algorithms.fedavg_plus.FedAvgPlus"),
        ("TOY", {}, "toy: is the name of .*Toy"),
    ],
)
def test_a_name_that_another_class_has_is_refused(Toy, name, options, taken):
    before, hint = dict(METHODS), r'accepted: another name, .* @pfl\.method\(name="\.\.\."\)$'
    with pytest.raises(ArgumentError, match=f"^name={taken}; {hint}"):
        declare(name, **options)
    assert before == METHODS


@pytest.mark.parametrize("module", ["__main__", "no_file_of_this_name"])
def test_a_class_can_be_defined_again_where_it_was_defined(module):
    first, again = declare("Again", module), declare("Again", module)
    assert get("again") is again is not first
    with pytest.raises(ArgumentError, match=r"^name=again"):
        declare("Again", "another_module")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"count": 0}, "toy.count=0: accepted: 1 to 4"),
        ({"count": 2.5}, "toy.count=2.5: accepted: whole numbers"),
        ({"count": True}, "toy.count=True: accepted: whole numbers"),
        ({"count": "3"}, "toy.count=3: accepted: whole numbers"),
        ({"rate": 1}, "toy.rate=1: accepted: above 0, below 1"),
        ({"rate": float("nan")}, "toy.rate=nan: accepted: above 0, below 1"),
        ({"kind": "third"}, "toy.kind=third: accepted: one, other"),
        ({"flag": "no"}, "toy.flag=no: accepted: True or False"),
        ({"limit": 0.0}, "toy.limit=0.0: accepted: above 0"),
        ({"limit": "no"}, "toy.limit=no: accepted: numbers"),
        ({"rate": None}, "toy.rate: accepted: numbers"),
    ],
)
def test_knobs_out_of_range_or_of_another_type_are_refused(Toy, knobs, message):
    with pytest.raises(ArgumentError) as error:
        Toy(**knobs)
    assert str(error.value) == message


def test_numbers_of_numpy_are_numbers(Toy):
    assert Toy(count=np.int64(3), rate=np.float32(0.25)).count == 3


def test_a_knob_may_be_left_out_where_its_type_says_so(Toy):
    assert Toy().limit is None and Toy(limit=2).limit == 2


def test_traced_numbers_are_taken_as_they_are(Toy):
    found = jax.jit(lambda rate: dataclasses.replace(Toy(), rate=rate, limit=-rate).limit)(0.25)
    assert found == -0.25  # which as a Python number would be refused


def test_a_mistake_that_building_finds_names_the_method_if_it_is_in_a_knob(Toy):
    with pytest.raises(ArgumentError, match=r"^toy\.count=7: accepted: something else$"):
        Toy().build("count")
    with pytest.raises(ArgumentError, match=r"^participation=7: "):
        Toy().build("participation")


@pytest.mark.parametrize(("name", "hint"), [("tyo", "did you mean"), ("x.py", "x.py:NAME")])
def test_unknown_methods_are_refused_with_a_hint(Toy, name, hint):
    with pytest.raises(ArgumentError, match=hint):
        get(name)


def test_a_class_without_a_docstring_is_no_method():
    with pytest.raises(TypeError, match="docstring"):
        method(keeps="", travels="")(dataclasses.make_dataclass("Silent", [], namespace={"__doc__": None}))


def test_a_knob_that_another_leaves_unread_stays_at_its_default():
    @method(keeps="nothing", travels="nothing", name="unread")
    @dataclasses.dataclass(frozen=True)
    class Unread:
        """Unread (Me, 2026): a test."""

        kind: Literal["a", "b"] = knob("a", help="a or b")
        rate: float = knob(0.5, above=0, read_with=("kind", "b"), help="of b")

        def build(self, problem): ...

    assert (Unread().rate, Unread("a", 0.5).rate, Unread("b", 2.0).rate) == (0.5, 0.5, 2.0)
    with pytest.raises(ArgumentError, match=r"^unread.rate=2.0: applies only with kind=b$"):
        Unread("a", 2.0)
    with pytest.raises(ArgumentError, match=r"^unread.rate=-1.0: accepted: above 0$"):
        Unread("a", -1.0)


def test_a_message_is_a_line_that_can_be_printed():
    message = str(ArgumentError("out", "says\nno\x1b[31m", "x\r" * 1000))
    assert message.isprintable() and len(message) < 700 and message.endswith(r"...: says\nno\x1b[31m")
