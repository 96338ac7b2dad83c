"""Method declarations: creating a method checks its hyperparameters, and errors name the method."""

import dataclasses
from typing import Literal

import pytest

import pfljax as pfl
from pfljax import algorithms as algorithms
from pfljax.contract.errors import ArgumentError
from pfljax.settings.fields import fields_of, present_names
from pfljax.settings.method import METHODS, get, hyperparameter, method, numbers_of_groups, tell


@pytest.fixture
def Toy():
    @method(keeps="nothing", travels="nothing")
    @dataclasses.dataclass(frozen=True)
    class Toy:
        """Toy (Somebody, 2026): does nothing."""

        count: int = hyperparameter(2, at_least=1, at_most=4, help="a number")
        rate: float = hyperparameter(0.5, above=0, read_with=("kind", "other"), help="a rate")
        kind: Literal["one", "other"] = hyperparameter("one", help="a choice")

        def build(self, problem):
            raise ArgumentError(problem, "accepted: something else", 7)

    return Toy


def test_a_method_is_registered_with_its_title(Toy):
    assert get("toy") is Toy
    assert (Toy.info.name, Toy.info.title, Toy.info.keeps) == (
        "toy",
        "Toy (Somebody, 2026)",
        "nothing",
    )


def test_the_decorator_needs_no_arguments():
    for decorate in (method, method()):
        made = dataclasses.make_dataclass(
            "Bare", [], namespace={"__doc__": "Bare.", "build": lambda self, _: 3}
        )
        assert decorate(made) is made is get("bare") and made().build(None) == 3
    del METHODS["bare"]


def declare(class_name, module=__name__, **options):
    """Declares a class as a file or a notebook does."""

    def build(self, problem): ...

    made = dataclasses.make_dataclass(
        class_name, [], namespace={"__doc__": "Toy (Me, 2026).", "build": build}
    )
    # which Python 3.12 takes from the caller
    made.__module__ = module
    made.__qualname__ = class_name
    return method(keeps="", travels="", **options)(made)


@pytest.mark.parametrize(
    ("name", "options", "taken"),
    [
        ("FedAvg", {}, "fedavg: is the name of pfljax.algorithms.fedavg.FedAvg"),
        (
            "Mine",
            {"name": "fedavg_plus"},
            "fedavg_plus: is the name of pfljax.algorithms.fedavg_plus.FedAvgPlus",
        ),
        ("TOY", {}, "toy: is the name of .*Toy"),
    ],
)
def test_a_name_that_another_class_has_is_refused(Toy, name, options, taken):
    before = dict(METHODS)
    hint = r'accepted: another name, .* @pfl\.author\.method\(name="\.\.\."\)$'
    with pytest.raises(ArgumentError, match=f"^name={taken}; {hint}"):
        declare(name, **options)
    assert before == METHODS


@pytest.mark.parametrize("module", ["__main__", "no_file_of_this_name"])
def test_a_class_can_be_defined_again_where_it_was_defined(module):
    first = declare("Again", module)
    again = declare("Again", module)
    assert get("again") is again is not first
    with pytest.raises(ArgumentError, match=r"^name=again"):
        declare("Again", "another_module")


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"count": 0}, "toy.count=0: accepted: 1 to 4"),
        ({"kind": "third"}, "toy.kind=third: accepted: one, other"),
        ({"rate": 2.0}, "toy.rate=2.0: applies only with kind=other"),
    ],
)
def test_hyperparameters_out_of_range_or_of_another_type_are_refused(Toy, hyperparameters, message):
    with pytest.raises(ArgumentError) as error:
        Toy(**hyperparameters)
    assert str(error.value) == message


def test_a_mistake_that_building_finds_names_the_method_if_it_is_in_a_hyperparameter(Toy):
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
        method(keeps="", travels="")(
            dataclasses.make_dataclass("Silent", [], namespace={"__doc__": None})
        )


def test_a_message_is_a_line_that_can_be_printed():
    message = str(ArgumentError("out", "says\nno\x1b[31m", "x\r" * 1000))
    assert (
        message.isprintable() and len(message) < 700 and message.endswith(r"...: says\nno\x1b[31m")
    )


def test_a_method_is_told_the_number_of_groups_where_it_leaves_it_open():
    groups = [7, 7, 3, 3, 5, 5, 5]
    assert numbers_of_groups(algorithms.IFCA) == ["clusters"] and numbers_of_groups(
        algorithms.FedEM()
    ) == ["components"]
    found, knows = tell(algorithms.IFCA(draws=2), True, groups)
    assert found == algorithms.IFCA(draws=2, clusters=3) and knows == "the number of groups (3)"
    given = algorithms.IFCA(clusters=4)
    assert tell(given, True, groups) == (given, "") == tell(given, False, groups)
    assert tell(algorithms.IFCA(), False, groups) == (algorithms.IFCA(), "")
    shared = algorithms.FedAvgData()
    assert (
        tell(shared, True, groups)
        == (shared, "examples of other clients")
        == tell(shared, False, None)
    )


@pytest.mark.parametrize("groups", [None, [0, 1, 2], [4]])
def test_groups_that_are_unknown_or_that_clients_do_not_share_cannot_be_told(groups):
    with pytest.raises(
        ArgumentError,
        match=r"^tell_groups=True: accepted for clients in known groups of two or more",
    ):
        tell(algorithms.Local(), True, groups)


def test_a_former_name_of_a_hyperparameter_is_accepted_with_a_warning():
    with pytest.warns(FutureWarning, match=r"^ditto\.strength is now ditto\.mu$"):
        assert algorithms.Ditto(strength=0.5) == algorithms.Ditto(mu=0.5)
    with pytest.raises(
        ArgumentError, match=r"^ditto\.strength=1: is now ditto\.mu; accepted: only"
    ):
        algorithms.Ditto(strength=1, mu=2)
    with pytest.raises(ArgumentError, match=r"^ditto\.pull=1: unknown argument"):
        algorithms.Ditto(pull=1)


def test_no_hyperparameter_has_a_former_name_of_another_or_a_bare_rate():
    for name, cls in METHODS.items():
        fields = fields_of(cls)
        former = present_names(fields)
        assert not former.keys() & fields.keys()
        assert len({*former.values()}) == len(former)
        if not cls.__module__.startswith("pfljax."):
            continue
        assert not {"rate", "strength", "lr"} & fields.keys(), name


def test_a_name_may_be_in_any_case():
    assert get("FedAvg") is get("fedavg") is algorithms.FedAvg
    with pytest.raises(ArgumentError, match=r"did you mean fedprox"):
        get("FedPrx")


def test_the_former_name_of_hyperparameter_still_works():
    name = r"^pfljax\.knob is now pfljax\.author\.hyperparameter$"  # former name
    with pytest.warns(FutureWarning, match=name):
        field = pfl.knob(0.5, at_least=0)  # former name
    assert (field.default, field.metadata["at_least"]) == (0.5, 0)
