"""The values of a command's flags: read once, never changed; other values are other `Settings`."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from absl import flags

from pfljax.cli import own_files
from pfljax.cli.flags import IMPLIED, METHOD_FLAGS, MOST, READ_WITH
from pfljax.core.errors import ArgumentError, shown
from pfljax.core.method import METHODS
from pfljax.data.sources import reading
from pfljax.training import files

PRESETS = Path(__file__).parent / "presets"
VALIDATION_FRACTION = 0.2  # where a method of the run needs validation examples; all methods then have the same split
Define = Callable[[flags.FlagValues], None]


class FlagError(ValueError):
    """A mistake on the command line, in one line."""

    @classmethod
    def of(cls, flag: str, text: str, value: object = None) -> FlagError:
        """A mistake in a flag: its value, if that says something, and what is accepted."""
        return cls(f"--{flag}: {text}" if value is None else f"--{flag}={shown(value)}: {text}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The values of all flags of a command, as attributes or, with a dot in the name, as items.

    Attributes:
        define: Registers the command's flags.
        values: Value by flag.
        given: The flags on the command line, which no preset overrides.
        headings: Group by flag.
        defaults: File name of the data set's preset that was applied; "" for none.
    """

    define: Define
    values: Mapping[str, Any]
    given: frozenset[str]
    headings: Mapping[str, str]
    defaults: str = ""

    def __getitem__(self, flag: str) -> Any:
        return self.values[flag]

    def __getattr__(self, flag: str) -> Any:
        values = self.__dict__.get("values", {})
        if flag not in values:
            raise AttributeError(f"no such flag: {flag}")
        return values[flag]

    def __contains__(self, flag: str) -> bool:
        return flag in self.values

    def present(self, flag: str) -> bool:
        """Whether the flag is on the command line."""
        return flag in self.given

    def replace(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> Settings:
        """The settings with other values; those of flags with a dot in their name come as a mapping."""
        changed = {**(values or {}), **more}
        unknown = changed.keys() - self.values.keys()
        if unknown:
            raise KeyError(f"no such flag: {', '.join(sorted(unknown))}")
        return dataclasses.replace(self, values=MappingProxyType({**self.values, **changed}))

    def pinned(self, **values: Any) -> Settings:
        """The settings with values as if they were on the command line, so that no preset overrides them."""
        return dataclasses.replace(self.replace(values), given=self.given | values.keys())

    def with_preset(self, path: Path) -> Settings:
        """The settings with a flag file's values, except for flags on the command line; unchanged without the file."""
        if not path.exists():
            return self
        registry = read(self.define, [f"--flagfile={path}"])
        values = {name: registry[name].value for name in registry if registry[name].present}
        if "learning_rate" in values:  # a later preset's rate is for all methods, unless it says otherwise
            values.setdefault("learning_rates", [])
        return self.replace(values | self._given())

    def of_method(self, name: str) -> Settings:
        """The settings with the method's own learning rate, if --learning_rates names it."""
        rates = {method: float(rate) for method, _, rate in (pair.partition(":") for pair in self.learning_rates)}
        own = {} if self.present("learning_rate") else {"learning_rate": rates.get(name, self.learning_rate)}
        return self.replace(own, learning_rates=[])

    def with_defaults(self, methods: Iterable[str]) -> Settings:
        """The settings with the defaults of the data set, its partition and the run's methods.

        The preset DATASET-PARTITION.flags comes first, then DATASET-validated.flags where a method needs validation
        examples, then DATASET.flags. An npz file with is_test is tested on these examples, unless --test_fraction asks
        for others.
        """
        validated = any(METHODS[name].info.validates for name in methods)
        kinds = [f"{self.dataset}-{kind}" for kind in (self.partition, *(["validated"] if validated else []))]
        there = {path.stem: path for path in PRESETS.glob("*.flags")}
        path = next((there[name] for name in [*kinds, self.dataset] if name in there), None)
        found = dataclasses.replace(self.with_preset(path), defaults=path.name) if path else self
        if validated:
            found = found.replace({"validation_fraction": VALIDATION_FRACTION} | found._given())
        if self.dataset == "npz" and self.data_file and not self.present("test_fraction"):
            found = found.replace({"official_test": "is_test" in reading.names_of(self.data_file)} | found._given())
        return found

    def _given(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.given}

    def error(self, flag: str, text: str) -> FlagError:
        """A mistake in a flag, with its value as it is written on the command line."""
        value = self[flag]
        return FlagError.of(flag, text, ",".join(map(str, value)) if isinstance(value, list | tuple) else value)

    def refuse(self, flag: str, why: str) -> None:
        """Raises `FlagError` for a flag that is on the command line and would not be read."""
        if self.present(flag):
            raise FlagError.of(flag, f"not read here: {why}")

    def has_one_of(self, conditions: Mapping[str, Sequence[str]]) -> bool:
        """Whether a flag has one of the values that `conditions` has for it; of tfds:NAME the first word counts."""
        values = {flag: self[flag] for flag in conditions if flag in self}
        listed = {flag: value if isinstance(value, list) else [value] for flag, value in values.items()}
        return any(str(each).partition(":")[0] in conditions[flag] for flag in listed for each in listed[flag])

    def check_read(self, variants: Sequence[Settings] = ()) -> None:
        """Raises `FlagError` for a flag on the command line that nothing reads with these settings.

        Args:
            variants: The settings of the command's runs, where they differ from these.
        """
        for flag, conditions in READ_WITH.items():
            if flag in self and not any(each.has_one_of(conditions) for each in variants or [self]):
                told = [f"--{other}={' or '.join(values)}" for other, values in conditions.items() if other in self]
                self.refuse(flag, f"accepted with {', or with '.join(told)}" if told else "nothing reads it")

    def check_out(self) -> None:
        """Raises `ArgumentError` for an --out that cannot be written to; the first of several processes writes."""
        if self.out and not self.process_id:
            files.check_writable(Path(self.out))

    def numbers(self, flag: str, kind: type, sets: str | None = None) -> list:
        """A list flag's numbers.

        Args:
            flag: Its name.
            kind: int or float.
            sets: Flag that takes these numbers in turn, and so cannot be on the command line itself.

        Raises:
            FlagError: if `sets` is.
        """
        if sets and self[flag]:
            self.refuse(sets, f"--{flag} gives it its values")
        return [kind(value) for value in self[flag]]

    def check_knobs(self, methods: Sequence[str]) -> None:
        """Raises `FlagError` for a knob on the command line that belongs to none of the methods."""
        for flag in sorted(self.given):
            if self.headings[flag] in METHODS and self.headings[flag] not in methods:
                raise FlagError.of(flag, f"no method of this run reads it ({', '.join(methods)})")
        named = [pair.partition(":")[0] for pair in self.learning_rates if self.present("learning_rates")]
        if not {*named} <= {*methods}:
            raise self.error("learning_rates", f"accepted: rates of the methods of this run ({', '.join(methods)})")


def parse(define: Define, words: Sequence[str]) -> Settings:
    """The settings that a command line asks for; a user's own files of methods are loaded first.

    Args:
        define: Registers the command's flags.
        words: The command line, without the command.

    Raises:
        FlagError: for a mistake in it.
    """
    words = _expand(words)
    named = {name for flag in METHOD_FLAGS for value in _values_of(flag, words) for name in value.split(",")}
    own = {name: own_files.load_method(name) for name in sorted(named) if own_files.is_file_and_name(name)}
    registry = read(define, words)
    values: dict[str, Any] = {name: registry[name].value for name in registry}
    registered = lambda name: own.get(name, name)
    if "algorithm" in values:
        values["algorithm"] = registered(values["algorithm"])
    if "algorithms" in values:
        values["algorithms"] = list(map(registered, values["algorithms"]))
    given = frozenset(name for name in registry if registry[name].present)
    headings = {flag.name: group for group, found in registry.flags_by_module_dict().items() for flag in found}
    return Settings(define, MappingProxyType(values), given, MappingProxyType(headings))


def read(define: Define, words: Sequence[str]) -> flags.FlagValues:
    """A command's flags with the values of a command line or of a flag file.

    Raises:
        FlagError: for a mistake in it.
    """
    registry = flags.FlagValues()
    define(registry)
    try:
        rest = registry(["", *words])
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(registry), n=3)
        hint = f"did you mean {' or '.join(f'--{name}' for name in near)}?" if near else "--help shows all"
        raise FlagError.of(shown(error.flagname), f"unknown flag; {hint}") from error
    except flags.IllegalFlagValueError as error:
        _stop_at(error, registry)
    except (flags.Error, ValueError) as error:
        raise FlagError(shown(error)) from error
    if len(rest) > 1:
        raise FlagError(f"{shown(rest[1])}: not a flag; flags start with --")
    return registry


def accepted(flag: flags.Flag) -> str:
    """What a flag accepts, in words, as far as its type says; "" for any text."""
    if flag.flag_type() == "bool":
        return "true, false"
    parser = flag.parser
    if isinstance(parser, flags.EnumParser):
        return ", ".join(parser.enum_values)
    if flag.flag_type() == "int":
        least, most = (getattr(parser, name, None) for name in ("lower_bound", "upper_bound"))
        limits = "" if least is None else f" of {least} or more" if most == MOST else f" from {least} to {most}"
        return f"whole numbers{limits}"
    return getattr(parser, "accepted", "numbers" if flag.flag_type() == "float" else "")


def _stop_at(error: flags.IllegalFlagValueError, registry: flags.FlagValues) -> NoReturn:
    """Raises the `FlagError` for a value that is not of its flag's type."""
    found = re.match(r"flag --([^=]+)=(.*?): ", str(error), re.DOTALL)
    if not found or found[1] not in registry:
        raise FlagError(shown(error)) from error
    raise FlagError.of(found[1], f"accepted: {accepted(registry[found[1]])}", found[2]) from error


def _expand(words: Sequence[str]) -> list[str]:
    """The words with those of flag files in their place, and with the values of flags that need not have one."""
    words = _with_files(list(words), ())
    alone = lambda word, after: word.lstrip("-") in IMPLIED and word.startswith("-") and after.startswith("-")
    return [
        f"{word}={IMPLIED[word.lstrip('-')]}" if alone(word, after) else word
        for word, after in itertools.pairwise([*words, "-"])
    ]


def _with_files(words: list[str], inside: tuple[str, ...]) -> list[str]:
    """The words with those of flag files in their place; `inside`: the files that these words are from."""
    found: list[str] = []
    while words:
        name, equals, file = (word := words.pop(0)).partition("=")
        if name not in ("--flagfile", "-flagfile"):
            found.append(word)
            continue
        file = os.path.expanduser(file if equals else words.pop(0) if words else "")
        if file in inside:
            raise FlagError.of("flagfile", "it names itself", file)
        try:
            lines = [line.strip() for line in reading.read_text(file).splitlines()]
        except ArgumentError as error:
            raise FlagError.of("flagfile", error.text, file) from error
        found += _with_files([line for line in lines if line and not line.startswith(("#", "//"))], (*inside, file))
    return found


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    """The values that words give to a flag, as --flag=VALUE or --flag VALUE."""
    joined = [word.lstrip("-").partition("=") for word in words if word.startswith("-")]
    apart = [after for word, after in itertools.pairwise(words) if word in (f"--{flag}", f"-{flag}")]
    return [value for name, equals, value in joined if name == flag and equals] + apart
