"""Registers flags. Each flag's parser refuses what the command does not accept, and says what it does."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from pfljax.cli.flag_help import HELP
from pfljax.cli.names import flags_of, owners_of
from pfljax.contract.errors import ArgumentError
from pfljax.contract.paths import expanded
from pfljax.settings.fields import (
    REQUIRED,
    Conditions,
    Field,
    choices_of,
    fields_of,
    fits,
    hyperparameter,
    in_their_case,
    is_union,
    item_type,
    out_of_range,
    plain,
    value_type,
)
from pfljax.settings.method import METHODS, registered_name


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
        has_words_of_its_own = self.kind is int or self.limits.get("pattern")
        if has_words_of_its_own and self.limits.get("accepted"):
            return self.limits["accepted"]
        if self.kind not in (int, float):
            return "" if self.empty else "non-empty text"
        within = str(out_of_range(math.nan, self.limits))
        if within == "a number":
            return "whole numbers" if self.kind is int else "numbers"
        return f"whole numbers of {within}" if self.kind is int else within

    def parse(self, argument: Any) -> Any:
        """Returns the value; raises ValueError if it is not accepted."""
        if self.kind in (int, float):
            value = self.kind(argument)
        else:
            value = in_their_case(str(argument), map(str, self.words))
        is_text = self.kind is str and not self.words
        is_blank = is_text and not self.empty and not str(value).strip()
        if value in self.limits.get("refused", ()):
            raise ArgumentError(str(value), self.limits["refused"][value])
        if is_blank or not fits(value, self.kind, self.limits or NO_LIMITS):
            raise ValueError(f"accepted: {self.accepted}")
        return expanded(str(value)) if self.is_path else value

    def flag_type(self) -> str:
        return (
            "string enum" if self.words else {int: "int", float: "float"}.get(self.kind, "string")
        )


NO_LIMITS = hyperparameter().metadata  # refuses NaN, infinity and integers beyond 32 bits


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
        self.item = Value(kind, limits)
        self.distinct = limits["distinct"]
        self.empty = limits["empty"]
        self.kind = str if self.item.words else kind
        self.words = self.item.words

    @property
    def accepted(self) -> str:
        """What is accepted, in words."""
        items = self.item.accepted
        if self.words:
            items = f"{items}, each once"
        else:
            if self.kind is str:
                items = self.item.limits.get("accepted") or "values"
            elif self.kind is float and items != "numbers":
                items = f"numbers {items}" if "above" in items else f"numbers of {items}"
            items = f"different {items}" if self.distinct else items
        return f"{items}, separated by commas{', or none' if self.empty else ''}"

    def parse(self, argument: Any) -> list[str]:
        """Returns the values as text; raises ValueError if one is not accepted."""
        values = [self.item.parse(text) for text in super().parse(argument)]
        is_missing = not values and not self.empty
        is_repeated = self.distinct and len(set(values)) < len(values)
        if is_missing or is_repeated:
            raise ValueError(f"accepted: {self.accepted}")
        return [str(value) for value in values]


class Rates(flags.ListParser):
    """Parses comma-separated learning rates of methods, METHOD:RATE."""

    accepted = "pairs such as fedavg:0.1, with distinct methods and learning rates above 0"

    def parse(self, argument: Any) -> list[str]:
        """Returns the pairs as text; raises ValueError if one is not accepted."""
        rates: dict[str, str] = {}
        for pair in super().parse(argument):
            text, _, rate = pair.partition(":")
            name = registered_name(text)
            is_known = name in METHODS and name not in rates
            if not is_known or out_of_range(float(rate), {"above": 0}):
                raise ValueError(f"accepted: {self.accepted}")
            rates[name] = rate
        return [f"{name}:{rate}" for name, rate in rates.items()]


class Declared(flags.Flag):
    """A flag, the library's names of the `arguments` that it sets, and under which other flags it is read."""

    def __init__(self, parser: Any, name: str, default: Any, help: str):
        boolean = isinstance(parser, flags.BooleanParser)
        super().__init__(parser, flags.ArgumentSerializer(), name, default, help, boolean=boolean)
        self.arguments: set[str] = set()
        self.read_with: dict[str, tuple] = {}


def _merged(conditions: Conditions, further: Conditions) -> dict[str, Any]:
    """Conditions one of which is enough; {} if a flag is always read under one of both."""
    if not conditions or not further:
        return {}
    merged = {**conditions}
    for other, values in further.items():
        merged[other] = (*conditions.get(other, ()), *values)
    return merged


class Group(NamedTuple):
    """Registers flags under a heading of --help; a method's hyperparameters have its name as their heading."""

    heading: str
    registry: flags.FlagValues

    def declare(
        self,
        declaring: Callable,
        *only: str,
        prefix: str = "",
        lists: Sequence[str] = (),
        where: Conditions = types.MappingProxyType({}),
        texts: Mapping[str, str] = types.MappingProxyType({}),
        **defaults: Any,
    ) -> None:
        """Registers the flags of a dataclass's fields or a function's arguments, all or `only` some.

        See `names`. If another declaration has registered a flag, it also applies under this one's conditions.

        Args:
            declaring: The dataclass or function.
            only: Names of fields; none: all.
            prefix: Prefix of a method's flags, METHOD.
            lists: Fields whose flags take several values.
            where: Conditions under which the fields are read, besides their own.
            texts: Help by flag, in place of that in `flag_help`. A method's fields declare theirs.
            defaults: Defaults by field, in place of the declaration's.
        """
        known = fields_of(declaring)
        owners = owners_of(declaring, prefix)
        names = flags_of(declaring, prefix)
        for field in known.values():
            if field.name not in names or (only and field.name not in only):
                continue
            name = names[field.name]
            if name in self.registry:
                flag: Any = self.registry[name]
                flag.read_with = _merged(flag.read_with, where)
            else:
                help = field.limits["help"] if prefix else texts.get(name) or HELP[name]
                default = defaults.get(field.name, field.default)
                renamed = field._replace(name=name, default=default)
                flag = self._define(renamed, help, field.name in lists)
                conditions = {}
                for other, values in field.conditions.items():
                    conditions[names.get(other, other)] = values
                flag.read_with = {**where} if prefix else {**conditions, **where}
            flag.arguments.add(field.name)
            if owners[field.name]:
                flag.arguments.add(f"{owners[field.name]}.{field.name}")

    def _define(self, field: Field, help: str, listed: bool = False) -> Declared:
        """Registers a flag for a field; with `listed`, it takes several of the field's values."""
        hint = value_type(field.hint)
        limits = {**NO_LIMITS, **field.limits}
        types = typing.get_args(hint) if is_union(hint) else (hint,)
        default = None if field.default is REQUIRED else field.default
        if listed:
            parser: Any = Several(hint, limits | {"distinct": True})
            default = [str(default)]
        elif item_type(hint) is not None:
            item, item_limits = plain(item_type(hint))
            list_limits = {"distinct": limits["distinct"], "empty": limits["empty"]}
            parser = Several(item, limits | {**item_limits} | list_limits)
            default = [str(value) for value in default or []]
        elif bool in types:
            words = [word for kind in types for word in typing.get_args(kind)]
            parser = SwitchOr(words[0]) if words else flags.BooleanParser()
        else:
            kind = Path if Path in types else str if str in types else hint
            parser = Value(kind, limits, empty=default == "")
        return self._register(Declared(parser, field.name, default, help))

    def _register(self, flag: Declared) -> Declared:
        flags.DEFINE_flag(flag, self.registry, self.heading)
        return flag

    def add(self, name: str, hint: Any, default: Any, help: str, **limits: Any) -> None:
        """A flag that no declaration has; `limits` are those of a `hyperparameter`."""
        self._define(Field(name, hint, default, hyperparameter(**limits).metadata), help)

    def several(
        self,
        name: str,
        default: Sequence[Any],
        help: str,
        items: type | Sequence[str] = str,
        *,
        distinct: bool = True,
        empty: bool = False,
        **limits: Any,
    ) -> None:
        """Comma-separated values: int, float, any text, or accepted words; `limits` as in `hyperparameter`."""
        kind: Any = items if isinstance(items, type) else str
        words = () if isinstance(items, type) else tuple(items)
        limits = {"at_least": 1, **limits} if kind is int else limits
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
