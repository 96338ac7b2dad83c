"""Registers flags. Each flag's parser refuses what the command does not accept, and says what it does."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from pfljax.cli.names import flags_of, owners_of
from pfljax.contract.paths import expanded
from pfljax.settings.fields import (
    REQUIRED,
    Conditions,
    Field,
    choices_of,
    fields_of,
    fits,
    is_union,
    item_type,
    knob,
    out_of_range,
    plain,
    value_type,
)
from pfljax.settings.method import METHODS


class Value(flags.ArgumentParser):
    """Parses a number within limits, a word from a list, a path, or non-empty text."""

    def __init__(self, kind: Any, limits: Mapping[str, Any], empty: bool = False):
        self.kind = str if kind is Path else kind
        self.is_path = kind is Path
        self.limits = limits
        self.empty = empty
        self.words = choices_of(kind, limits)

    @property
    def accepted(self) -> str:
        """What is accepted, in words."""
        if self.words:
            return ", ".join(map(str, self.words))
        within = str(out_of_range(math.nan, self.limits)) if self.kind in (int, float) else ""
        within = "" if within == "a number" else within
        if self.kind is int:
            return f"whole numbers{' of ' * bool(within)}{within}"
        return within or (
            "numbers" if self.kind is float else "" if self.empty else "non-empty text"
        )

    def parse(self, argument: Any) -> Any:
        """Returns the value; raises ValueError if it is not accepted."""
        value = self.kind(argument) if self.kind in (int, float) else str(argument)
        blank = self.kind is str and not self.words and not self.empty and not str(value).strip()
        if blank or not fits(value, self.kind, self.limits or NO_LIMITS):
            raise ValueError(f"accepted: {self.accepted}")
        return expanded(str(value)) if self.is_path else value

    def flag_type(self) -> str:
        return (
            "string enum" if self.words else {int: "int", float: "float"}.get(self.kind, "string")
        )


NO_LIMITS = knob().metadata  # refuses NaN, infinity and integers beyond 32 bits


class SwitchOr(flags.BooleanParser):
    """Parses true, false, or a given word."""

    def __init__(self, word: str):
        super().__init__()
        self.word = word
        self.accepted = f"true, false or {word}"

    def parse(self, argument: Any) -> Any:
        """Returns the value; raises ValueError if it is not accepted."""
        return argument if argument == self.word else super().parse(argument)


class Several(flags.ListParser):
    """Parses comma-separated values of one kind."""

    def __init__(self, kind: Any, limits: Mapping[str, Any]):
        super().__init__()
        self.each = Value(kind, limits)
        self.distinct = limits["distinct"]
        self.empty = limits["empty"]
        self.kind = str if self.each.words else kind
        self.words = self.each.words

    @property
    def accepted(self) -> str:
        """What is accepted, in words."""
        what = self.each.accepted
        if self.kind is float:
            what = (
                f"numbers{' ' if 'above' in what else ' of '}{what}" if what != "numbers" else what
            )
        what = "values" if self.kind is str and not self.words else what
        what = f"{what}, each once" if self.words else "different " * self.distinct + what
        return f"{what}, separated by commas{', or none' * self.empty}"

    def parse(self, argument: Any) -> list[str]:
        """Returns the values as text; raises ValueError if one is not accepted."""
        texts = super().parse(argument)
        values = [self.each.parse(text) for text in texts]
        if not (values or self.empty) or (self.distinct and len(set(values)) < len(values)):
            raise ValueError(f"accepted: {self.accepted}")
        return [str(text) for text in texts]


class Rates(flags.ListParser):
    """Parses comma-separated learning rates of methods, METHOD:RATE."""

    accepted = "pairs such as fedavg:0.1, with distinct methods and rates above 0"

    def parse(self, argument: Any) -> list[str]:
        """Returns the pairs as text; raises ValueError if one is not accepted."""
        pairs = super().parse(argument)
        methods, _, rates = (
            zip(*(pair.partition(":") for pair in pairs), strict=True) if pairs else ((), (), ())
        )
        known = set(methods) <= set(METHODS) and len(set(methods)) == len(methods)
        if not known or any(out_of_range(float(rate), {"above": 0}) for rate in rates):
            raise ValueError(f"accepted: {self.accepted}")
        return pairs


class Declared(flags.Flag):
    """A flag, the library's names of the `arguments` that it sets, and under which other flags it is read."""

    def __init__(self, parser: Any, name: str, default: Any, help: str):
        boolean = isinstance(parser, flags.BooleanParser)
        super().__init__(parser, flags.ArgumentSerializer(), name, default, help, boolean=boolean)
        self.arguments: set[str] = set()
        self.read_with: dict[str, tuple] = {}


class Group(NamedTuple):
    """Registers flags under a heading of --help; a method's knobs have its name as their heading."""

    heading: str
    registry: flags.FlagValues

    def declare(
        self,
        declaring: Callable,
        *only: str,
        prefix: str = "",
        lists: Sequence[str] = (),
        where: Conditions = types.MappingProxyType({}),
        **defaults: Any,
    ) -> None:
        """Registers the flags of a dataclass's fields or a function's arguments, all or `only` some.

        See `names`; `prefix` is that of a method. A flag that another declaration has registered gets this one's help
        and conditions, too. The flags of fields in `lists` take several values. `where` has conditions under which the
        fields are read, besides their own; `defaults` replace the declaration's.
        """
        known = fields_of(declaring)
        owners = owners_of(declaring, prefix)
        names = flags_of(declaring, prefix)
        for field in known.values():
            if field.name not in names or (only and field.name not in only):
                continue
            own = (
                {}
                if prefix
                else {names.get(other, other): values for other, values in field.conditions.items()}
            )
            name = names[field.name]
            default = defaults.get(field.name, field.default)
            made: Any = self.registry[name] if name in self.registry else None  # noqa: SIM401
            if made is None:
                made = self._define(field._replace(name=name, default=default), field.name in lists)
                made.read_with = {**own, **where}
            else:
                help = field.limits.get("help", "")
                made.help += f"; {help}" if help not in made.help else ""
                merged = {
                    other: (*made.read_with.get(other, ()), *values)
                    for other, values in where.items()
                }
                made.read_with = {**made.read_with, **merged} if where and made.read_with else {}
            made.arguments.add(field.name)
            if owners[field.name]:
                made.arguments.add(f"{owners[field.name]}.{field.name}")

    def _define(self, field: Field, listed: bool = False) -> Declared:
        hint = value_type(field.hint)
        limits = {**NO_LIMITS, **field.limits}
        kinds = typing.get_args(hint) if is_union(hint) else (hint,)
        default = None if field.default is REQUIRED else field.default
        if listed or item_type(hint) is not None:
            kind, own = (hint, limits) if listed else plain(item_type(hint))
            limits = {
                **limits,
                **own,
                "distinct": listed or limits["distinct"],
                "empty": limits["empty"],
            }
            default = [str(each) for each in ([default] if listed else default or [])]
            parser: Any = Several(kind, limits)
        elif bool in kinds:
            words = [word for kind in kinds for word in typing.get_args(kind)]
            parser = SwitchOr(words[0]) if words else flags.BooleanParser()
        else:
            kind = Path if Path in kinds else str if str in kinds else hint
            parser = Value(kind, limits, empty=default == "")
        return self._register(Declared(parser, field.name, default, field.text))

    def _register(self, flag: Declared) -> Declared:
        flags.DEFINE_flag(flag, self.registry, self.heading)
        return flag

    def add(self, name: str, hint: Any, default: Any, help: str, **limits: Any) -> None:
        """A flag that no declaration has; `limits` are those of a `knob`."""
        self._define(Field(name, hint, default, knob(**limits).metadata, help))

    def several(
        self,
        name: str,
        default: Sequence[Any],
        help: str,
        of: type | Sequence[str] = str,
        *,
        distinct: bool = True,
        empty: bool = False,
        **limits: Any,
    ) -> None:
        """Comma-separated values: int, float, any text, or some of the accepted words; `limits` as in `knob`."""
        kind, words = (of, ()) if isinstance(of, type) else (str, tuple(of))
        limits = {"at_least": 1, **limits} if of is int else limits
        self.add(
            name,
            Sequence[kind],
            default,
            help,
            choices=words,
            distinct=distinct,
            empty=empty,
            **limits,
        )

    def listed(
        self, name: str, default: Sequence[str], help: str, parser: flags.ListParser
    ) -> None:
        """Comma-separated values with a custom parser."""
        self._register(Declared(parser, name, list(default), help))

    def repeated(self, name: str, help: str) -> None:
        """A flag that may be given several times."""
        flags.DEFINE_multi_string(
            name, [], help, flag_values=self.registry, module_name=self.heading
        )
        self.registry[name].help = help  # without what absl adds
