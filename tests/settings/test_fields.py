"""Settings that are declared once: what is accepted, what is refused, and in which words."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfljax.contract.errors import ArgumentError
from pfljax.settings.fields import (
    MOST,
    REQUIRED,
    check,
    checked,
    fields_of,
    hyperparameter,
    nearest,
    settings,
)

Rounds = Annotated[int, hyperparameter(at_least=1, help="number of rounds")]


@settings
class Toy:
    """A toy.

    Attributes:
        kind: Its kind, which
            takes two lines: `one`.
        size: B, the size.
    """

    kind: Literal["one", "other"] = hyperparameter("one")
    size: int = hyperparameter(2, at_least=1, read_with={"kind": ("other",), "active": ()})
    active: bool = False
    rate: float | None = hyperparameter(None, above=0, below=1)

    def __post_init__(self):
        if self.size == 7:
            raise ArgumentError("size", "accepted: not 7", self.size)


class Pair(NamedTuple):
    """A pair."""

    first: Rounds = 3
    second: str = "a"


@checked(options=[Toy])
def play(
    rounds: Rounds,
    names: Annotated[Sequence[str], hyperparameter(distinct=True, empty=False)] = ("a",),
    out: str | Path | None = None,
    say: Callable[[str], None] | None = None,
    toy: Toy | None = None,
    *,
    seeds: Sequence[Rounds] = (1,),
    pair: tuple[str, int] = ("a", 1),
    least: Rounds | None = None,
    **options: Any,
):
    """Plays.

    Args:
        rounds: Ignored, since the hyperparameter has help.
        names: Names.
    """
    return rounds, names, options


def refusal(*args, **kwargs):
    with pytest.raises(ArgumentError) as caught:
        play(*args, **kwargs)
    return str(caught.value)


def test_fields_are_those_of_dataclasses_functions_and_named_tuples():
    known = fields_of(Toy)
    assert [*known] == ["kind", "size", "active", "rate"]
    assert (
        known["size"].conditions == {"kind": ("other",), "active": ()}
        and known["rate"].conditions == {}
    )
    known = fields_of(play)
    assert (
        "options" not in known
        and known["rounds"].default is REQUIRED
        and known["names"].default == ("a",)
    )
    assert known["least"].limits["at_least"] == 1 and known["least"].hint == int | None
    assert {name: field.default for name, field in fields_of(Pair).items()} == {
        "first": 3,
        "second": "a",
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"rounds": 1.5}, "rounds=1.5: accepted: whole numbers"),
        ({"rounds": 0}, "rounds=0: accepted: 1 or more"),
        ({"rounds": MOST + 1}, f"rounds={MOST + 1}: accepted: 1 to {MOST}"),
        ({"rounds": None}, "rounds: accepted: whole numbers"),
        ({"rounds": np.bool_(True)}, "rounds=True: accepted: whole numbers"),
        ({"rounds": jnp.float32(2)}, "rounds=2.0: accepted: whole numbers"),
        ({"least": 0}, "least=0: accepted: 1 or more"),
        ({"names": "ab"}, "names=ab: accepted: a list of one or more different text"),
        ({"names": []}, "names=[]: accepted: a list of one or more different text"),
        ({"names": ["a", "a"]}, "names=['a', 'a']: accepted: a list of one or more different text"),
        ({"seeds": [1, 0]}, "seeds=[1, 0]: accepted: a list of whole numbers"),
        ({"seeds": np.ones((1, 2), int)}, "seeds=ndarray: accepted: a list of whole numbers"),
        ({"pair": ["a", 1]}, "pair=['a', 1]: accepted: a tuple"),
        ({"out": 3}, "out=3: accepted: text or a path"),
        ({"say": "no"}, "say=no: accepted: a function"),
        ({"toy": Toy}, f"toy={Toy}: accepted: a Toy"),
        ({"kind": "othr"}, "kind=othr: accepted: one, other; did you mean other?"),
        ({"kind": "x"}, "kind=x: accepted: one, other"),
        ({"size": "x"}, "size=x: accepted: whole numbers"),
        ({"rouns": 3}, "rouns=3: unknown argument; did you mean rounds?"),
        (
            {"zzz": 3},
            "zzz=3: unknown argument; accepted: rounds, names, out, say, toy, seeds, pair, least, kind, size, ",
        ),
    ],
)
def test_what_is_not_accepted_is_told_in_a_line(arguments, line):
    assert refusal(**{"rounds": 1} | arguments).startswith(line)


def test_missing_and_surplus_arguments_are_told():
    assert refusal() == "rounds: required"
    assert refusal(1, ("a",), None, None, None, 3).startswith(
        "arguments: too many positional arguments; accepted: rounds"
    )
    assert refusal(1, rounds=2).startswith("arguments: multiple values for argument 'rounds'")


def test_what_is_accepted_arrives_as_plain_python():
    rounds, names, options = play(
        np.int64(3), np.array(["a", "b"]), size=jnp.int32(2), out=Path("x"), toy=Toy()
    )
    assert type(rounds) is int and list(names) == ["a", "b"] and type(options["size"]) is int
    assert play(1, seeds=np.arange(1, 4), least=None, say=print)[0] == 1
    assert play(MOST)[0] == MOST
    assert jax.jit(lambda rate: Toy(rate=rate).rate)(-1.0) == -1.0  # traced numbers are not checked


def test_fields_are_checked_before_they_are_compared():
    for values, line in (
        ({"rate": "a"}, "rate=a: accepted: numbers"),
        ({"rate": math.inf}, "rate=inf: accepted: finite numbers"),
        ({"size": 7, "active": True}, "size=7: accepted: not 7"),
        ({"size": 3}, "size=3: applies only with kind=other, or with active above 0"),
        ({"siz": 3}, "siz=3: unknown argument; did you mean size?"),
    ):
        with pytest.raises(ArgumentError) as caught:
            Toy(**values)
        assert str(caught.value) == line
    assert Toy(size=2) == Toy() and Toy("other", 3).size == Toy(size=3, active=True).size == 3
    wrong = Toy()
    object.__setattr__(wrong, "rate", 2)
    with pytest.raises(ArgumentError, match=r"^rate=2: accepted: above 0, below 1$"):
        check(wrong)


def test_the_nearest_names_are_told_or_all():
    assert nearest("medain", ["mean", "median"]) == "did you mean median or mean?"
    assert nearest("x", ["mean", "median"]) == "accepted: mean, median"
