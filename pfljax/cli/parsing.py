"""Registers flags of each type. Each flag's parser refuses what the command does not accept, and says what it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from pfljax.core.method import METHODS, out_of_range

MOST = 2**31 - 1  # integers become 32-bit on the devices


class Text(flags.ArgumentParser):
    """Parses non-empty text."""

    accepted = "non-empty text"

    def parse(self, argument: Any) -> str:
        """Returns the text; raises ValueError if it is empty."""
        if not str(argument).strip():
            raise ValueError(f"accepted: {self.accepted}")
        return str(argument)


class SwitchOr(flags.BooleanParser):
    """Parses true, false, or a given word."""

    def __init__(self, word: str):
        super().__init__()
        self.word, self.accepted = word, f"true, false or {word}"

    def parse(self, argument: Any) -> Any:
        """Returns the value; raises ValueError if it is not accepted."""
        if argument == self.word:
            return argument
        try:
            return super().parse(argument)
        except ValueError:
            raise ValueError(f"accepted: {self.accepted}") from None


class Real(flags.FloatParser):
    """Parses a number within limits."""

    def __init__(self, limits: dict[str, Any]):
        super().__init__()
        self.limits = limits

    @property
    def accepted(self) -> str:
        """What is accepted, in words."""
        return str(out_of_range(math.nan, self.limits))

    def parse(self, argument: Any) -> float:
        """Returns the number; raises ValueError if it is not accepted."""
        value = super().parse(argument)
        if out_of_range(value, self.limits):
            raise ValueError(f"accepted: {self.accepted}")
        return value


class Several(flags.ListParser):
    """Parses comma-separated values: text, numbers within limits, or words from a list."""

    def __init__(self, of: Any, distinct: bool, empty: bool, limits: dict[str, Any]):
        """As `Group.several`."""
        super().__init__()
        self.kind, self.words = (of, ()) if of in (str, int, float) else (str, tuple(of))
        self.distinct, self.empty, self.limits = distinct, empty, limits

    @property
    def accepted(self) -> str:
        """What is accepted, in words."""
        limits = {name: limit for name, limit in self.limits.items() if limit != MOST}  # too large to mention
        within = f" {out_of_range(math.nan, limits)}" if limits else ""
        within = within if not within or "above" in within else f" of{within}"
        what = {str: "values", int: "whole numbers", float: "numbers"}[self.kind] + within
        what = ", ".join(self.words) or f"{'different ' * self.distinct}{what}"
        return f"{what}{', each once' * bool(self.words)}, separated by commas{', or none' * self.empty}"

    def parse(self, argument: Any) -> list[str]:
        """Returns the values as text; raises ValueError if one is not accepted."""
        texts = super().parse(argument)
        values: list[Any] = [self.kind(text) for text in texts]
        wrong = any(text not in self.words if self.words else not text for text in texts)
        wrong |= self.kind is not str and any(out_of_range(value, self.limits) for value in values)
        if wrong or not (values or self.empty) or (self.distinct and len(set(values)) < len(values)):
            raise ValueError(f"accepted: {self.accepted}")
        return texts


class Rates(flags.ListParser):
    """Parses comma-separated learning rates of methods, METHOD:RATE."""

    accepted = "pairs such as fedavg:0.1, with distinct methods and rates above 0"

    def parse(self, argument: Any) -> list[str]:
        """Returns the pairs as text; raises ValueError if one is not accepted."""
        pairs = super().parse(argument)
        methods, _, rates = zip(*(pair.partition(":") for pair in pairs), strict=True) if pairs else ((), (), ())
        if not set(methods) <= set(METHODS) or len(set(methods)) < len(methods):
            raise ValueError(f"accepted: {self.accepted}")
        if any(out_of_range(float(rate), {"above": 0}) for rate in rates):
            raise ValueError(f"accepted: {self.accepted}")
        return pairs


class Group(NamedTuple):
    """Registers flags under a heading of --help; a method's knobs have its name as their heading."""

    heading: str
    registry: flags.FlagValues

    @property
    def _where(self) -> dict[str, Any]:
        return {"flag_values": self.registry, "module_name": self.heading}

    def text(self, name: str, default: str | None, help: str) -> None:
        """A string; None if not given."""
        parser = flags.ArgumentParser() if default == "" else Text()
        flags.DEFINE(parser, name, default, help, serializer=flags.ArgumentSerializer(), **self._where)

    def whole(self, name: str, default: int | None, help: str, least: int | None = None, most: int = MOST) -> None:
        """A whole number."""
        flags.DEFINE_integer(name, default, help, lower_bound=least, upper_bound=most, **self._where)

    def real(self, name: str, default: float | None, help: str, **limits: Any) -> None:
        """A number; None if not given. `limits` are those of a knob."""
        parser = Real(limits)
        help += f"; accepted: {parser.accepted}" if limits else ""
        flags.DEFINE(parser, name, default, help, serializer=flags.ArgumentSerializer(), **self._where)

    def switch(self, name: str, default: bool | None, help: str) -> None:
        """true or false; None if not given."""
        flags.DEFINE_bool(name, default, help, **self._where)

    def switch_or(self, name: str, default: bool, word: str, help: str) -> None:
        """true, false, or a word."""
        parser, serializer = SwitchOr(word), flags.ArgumentSerializer()
        flag = flags.Flag(parser, serializer, name, default, f"{help}; accepted: {parser.accepted}", boolean=True)
        flags.DEFINE_flag(flag, **self._where)

    def choice(self, name: str, default: Any, accepted: Sequence[str], help: str) -> None:
        """One of several words."""
        flags.DEFINE_enum(name, default, list(accepted), help, **self._where)

    def several(
        self,
        name: str,
        default: Sequence[str],
        help: str,
        of: type | Sequence[str] = str,
        *,
        distinct: bool = True,
        empty: bool = False,
        **limits: Any,
    ) -> None:
        """Comma-separated values.

        Args:
            name: The flag's name.
            default: Its default.
            help: One line.
            of: int, float, or the accepted words; str: any text.
            distinct: Whether all values must differ.
            empty: Whether an empty list is accepted.
            limits: Limits of the numbers, those of a knob.
        """
        limits = {"at_least": 1, "at_most": MOST, **limits} if of is int else limits
        self.listed(name, default, help, Several(of, distinct, empty, limits))

    def listed(self, name: str, default: Sequence[str], help: str, parser: flags.ListParser) -> None:
        """Comma-separated values with a custom parser."""
        flags.DEFINE(parser, name, list(default), help, serializer=flags.CsvListSerializer(","), **self._where)

    def repeated(self, name: str, help: str) -> None:
        """A flag that may be given several times."""
        flags.DEFINE_multi_string(name, [], help, **self._where)
        self.registry[name].help = help  # without what absl adds
