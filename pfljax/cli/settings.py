"""The values of a command's flags. `Settings` are immutable; changed values make new `Settings`."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from absl import flags

from pfljax.cli import supervision
from pfljax.cli.flags import IMPLIED, METHOD_FLAGS
from pfljax.cli.names import FORMER, flags_of, owners_of, renamed
from pfljax.cli.parsing import Declared
from pfljax.contract import reading
from pfljax.contract.errors import ArgumentError, shown
from pfljax.contract.paths import expanded
from pfljax.data.sources import FORMATS, detect_format, has_tests
from pfljax.folder import files
from pfljax.settings import own_files
from pfljax.settings.fields import (
    Conditions,
    fields_of,
    holds,
    item_type,
    plain,
    value_type,
    with_words,
)
from pfljax.settings.method import METHODS

PRESETS = Path(__file__).parent / "presets"
VALIDATION_FRACTION = 0.2  # for all methods of a run, if one of them needs validation examples
Define = Callable[[flags.FlagValues], None]


class FlagError(ValueError):
    """A mistake on the command line, described in one line."""

    @classmethod
    def of(cls, flag: str, text: str, value: object = None) -> FlagError:
        """Returns the error for a flag: its value, if given, and what is accepted."""
        return cls(f"--{flag}: {text}" if value is None else f"--{flag}={shown(value)}: {text}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The values of a command's flags, as attributes or, if the name has a dot, as items."""

    define: Define  # registers the command's flags
    values: Mapping[str, Any]  # value by flag
    given: frozenset[str]  # the flags on the command line. Presets do not override them.
    headings: Mapping[str, str]  # group by flag
    # by flag, other flags and their values, one of which it needs to be read
    read_with: Mapping[str, Conditions]
    flag_of: Mapping[str, str]  # flag by the library's name of the argument
    defaults: str = ""  # file name of the data set's preset that was applied; "": none
    # the command line that was parsed, with its flag files' words in place of them
    words: tuple[str, ...] = ()

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
        """Returns the settings with other values. Flags with a dot in their name are passed in a mapping."""
        changed = {**(values or {}), **more}
        unknown = changed.keys() - self.values.keys()
        if unknown:
            raise KeyError(f"no such flag: {', '.join(sorted(unknown))}")
        return dataclasses.replace(self, values=MappingProxyType({**self.values, **changed}))

    def pinned(self, **values: Any) -> Settings:
        """Returns the settings with values that count as given on the command line, so no preset overrides them."""
        return dataclasses.replace(self.replace(values), given=self.given | values.keys())

    def with_preset(self, path: Path) -> Settings:
        """Returns the settings with a flag file's values, except for flags on the command line. It may not exist."""
        if not path.exists():
            return self
        registry = read(self.define, [f"--flagfile={path}"])
        values = {name: registry[name].value for name in registry if registry[name].present}
        # a later preset's rate applies to all methods unless it sets learning_rates
        if "learning_rate" in values:
            values.setdefault("learning_rates", [])
        return self.replace(values | self._given())

    def of_method(self, name: str) -> Settings:
        """Returns the settings with the method's own learning rate, if --learning_rates has one."""
        rates = {
            method: float(rate)
            for method, _, rate in (pair.partition(":") for pair in self.learning_rates)
        }
        own = (
            {}
            if self.present("learning_rate")
            else {"learning_rate": rates.get(name, self.learning_rate)}
        )
        return self.replace(own, learning_rates=[])

    def with_defaults(self, methods: Iterable[str]) -> Settings:
        """Returns the settings with the defaults for the data set, its partition and the run's methods.

        Applies the first preset that exists: DATASET-PARTITION.flags, DATASET-validated.flags if a method needs
        validation examples, or DATASET.flags. Clients are tested on a file's official test examples, if it has them,
        unless --test_fraction is given.
        """
        validated = any(METHODS[name].info.validates for name in methods)
        kinds = [
            f"{self.dataset}-{kind}"
            for kind in (self.partition, *(["validated"] if validated else []))
        ]
        there = {path.stem: path for path in PRESETS.glob("*.flags")}
        path = next((there[name] for name in [*kinds, self.dataset] if name in there), None)
        found = dataclasses.replace(self.with_preset(path), defaults=path.name) if path else self
        if validated:
            found = found.replace({"validation_fraction": VALIDATION_FRACTION} | found._given())
        if self.dataset in FORMATS and self.data_file and not self.present("test_fraction"):
            test = self.data_test if self.reads("data_test") else ""
            found = found.replace(
                {"official_test": has_tests(self.dataset, self.data_file, test)} | found._given()
            )
        return found

    def _given(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.given}

    def error(self, flag: str, text: str) -> FlagError:
        """Returns the error for a flag, with its value as written on the command line."""
        value = self[flag]
        return FlagError.of(
            flag, text, ",".join(map(str, value)) if isinstance(value, list | tuple) else value
        )

    def refuse(self, flag: str, why: str) -> None:
        """Raises `FlagError` if the flag is on the command line; used for flags that do not apply."""
        if self.present(flag):
            raise FlagError.of(flag, f"does not apply here: {why}")

    def reads(self, flag: str) -> bool:
        """Whether the flag has an effect with these settings."""
        conditions = self.read_with.get(flag)
        return not conditions or any(
            holds(self[o], values) for o, values in conditions.items() if o in self
        )

    def check_read(self, variants: Sequence[Settings] = ()) -> None:
        """Raises `FlagError` for a flag on the command line that neither these settings nor any `variants` read."""
        for flag, conditions in self.read_with.items():
            if not any(each.reads(flag) for each in variants or [self]):
                known = {other: values for other, values in conditions.items() if other in self}
                self.refuse(
                    flag, f"accepted {with_words(known, '--')}" if known else "it has no effect"
                )

    def values_of(self, declaring: Callable, prefix: str = "") -> dict[str, Any]:
        """Returns the values of the flags of a dataclass's fields or a function's arguments, by name."""
        known = fields_of(declaring)
        values = {}
        for name, flag in flags_of(declaring, prefix).items():
            if flag in self and self.reads(flag):
                kind = plain(item_type(value_type(known[name].hint)))[0]
                values[name] = (
                    [kind(text) for text in self[flag]] if kind in (int, float) else self[flag]
                )
        return values

    def make(self, declaring: Callable, prefix: str = "", **given: Any) -> Any:
        """Calls a dataclass or function with the values of its flags and, as far as it takes them, the `given` ones."""
        known = fields_of(declaring)
        taken = {name: value for name, value in given.items() if name in known}
        try:
            return declaring(**self.values_of(declaring, prefix) | taken)
        except ArgumentError as error:
            owner = owners_of(declaring, prefix).get(error.argument)
            if not owner or error.owner:
                raise
            # other classes have a field of this name, too
            raise error.of(owner) from error.__cause__

    def check_out(self) -> None:
        """Raises `ArgumentError` if --out cannot be written to. The first process checks, as it writes the files."""
        if self.out and not self.process_id:
            files.check_writable(Path(self.out))

    def numbers(self, flag: str, kind: type, sets: str | None = None) -> list:
        """Returns the numbers of a list flag.

        Raises `FlagError` if a flag that it `sets` in turn is on the command line.
        """
        if sets and self[flag]:
            self.refuse(sets, f"--{flag} sets its values")
        return [kind(value) for value in self[flag]]

    def check_knobs(self, methods: Sequence[str]) -> None:
        """Raises `FlagError` for a knob on the command line that none of the methods has."""
        for flag in sorted(self.given):
            if self.headings[flag] in METHODS and self.headings[flag] not in methods:
                raise FlagError.of(flag, f"not a knob of this run's methods ({', '.join(methods)})")
        named = [
            pair.partition(":")[0] for pair in self.learning_rates if self.present("learning_rates")
        ]
        if not {*named} <= {*methods}:
            raise self.error(
                "learning_rates", f"accepted: rates for this run's methods ({', '.join(methods)})"
            )


def parse(define: Define, words: Sequence[str]) -> Settings:
    """Parses a command line, without the command.

    Loads users' own method files first. Former names of flags are accepted, and noted on standard error. Raises
    `FlagError` for a mistake.
    """
    words, notes = _expand(words)
    if supervision.WATCHED not in os.environ:  # otherwise the watcher has printed them
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    own = _own_methods(words)
    registry = read(define, words)
    values: dict[str, Any] = {name: registry[name].value for name in registry}
    if values.get("dataset") == "file":
        values["dataset"] = _kind_of(values["data_file"])

    def registered(name):
        return own.get(name, name)

    if "method" in values:
        values["method"] = registered(values["method"])
    if "methods" in values:
        values["methods"] = list(map(registered, values["methods"]))
    given = frozenset(name for name in registry if registry[name].present)
    headings = {
        flag.name: group
        for group, found in registry.flags_by_module_dict().items()
        for flag in found
    }
    declared = [flag for flag in map(registry.__getitem__, registry) if isinstance(flag, Declared)]
    read_with = {flag.name: flag.read_with for flag in declared if flag.read_with}
    flag_of = {
        name: flag.name
        for flag in declared
        for name in flag.arguments
        if headings[flag.name] not in METHODS
    }
    frozen = MappingProxyType
    tables = frozen(headings), frozen(read_with), frozen(flag_of)
    return Settings(define, frozen(values), given, *tables, words=tuple(words))


def read(define: Define, words: Sequence[str]) -> flags.FlagValues:
    """Returns a command's flags with the values from a command line or a flag file.

    Raises `FlagError` for a mistake.
    """
    registry = flags.FlagValues()
    define(registry)
    try:
        rest = registry(["", *words])
    except flags.UnrecognizedFlagError as error:
        raise FlagError.of(
            shown(error.flagname), f"unknown flag; {_hint(error.flagname, list(registry))}"
        ) from error
    except flags.IllegalFlagValueError as error:
        _stop_at(error, registry)
    except (flags.Error, ValueError) as error:
        raise FlagError(shown(error)) from error
    if len(rest) > 1:
        raise FlagError(f"{shown(rest[1])}: not a flag; flags start with --")
    return registry


def _hint(unknown: str, known: Sequence[str]) -> str:
    """What an unknown flag may have meant: with a dot, a knob of that method."""
    method, dot, _ = unknown.partition(".")
    knobs = [name for name in known if name.startswith(f"{method}.")]
    if dot and method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1, cutoff=0.8)
        way = (
            f"did you mean {near[0]}?"
            if near
            else "--method=FILE.py:NAME loads a method of your own"
        )
        return f"no method {shown(method)} is known; {way}"
    former = [name for name, new in FORMER.items() if new in known]
    if near := difflib.get_close_matches(unknown, knobs if dot else [*known, *former], n=3):
        names = dict.fromkeys(FORMER.get(name, name) for name in near)
        return f"did you mean {' or '.join(f'--{name}' for name in names)}?"
    if dot:
        return f"accepted: {', '.join(f'--{name}' for name in knobs) or f'no knob of {method}'}"
    return "--help lists all flags"


def _own_methods(words: Sequence[str]) -> dict[str, str]:
    """Loads the methods that are named as FILE.py:NAME; returns their registered names."""
    own: dict[str, str] = {}
    for flag in METHOD_FLAGS:
        names = {name for value in _values_of(flag, words) for name in value.split(",")}
        for name in sorted(filter(own_files.is_file_and_name, names)):
            try:
                own[name] = own_files.load_method(name)
            except ArgumentError as error:
                raise FlagError(error.line(f"--{flag}")) from error
    return own


def _kind_of(file: str | None) -> str:
    """Returns the kind of the user's file, which is the data set's name."""
    if not file:
        raise FlagError.of("dataset", "accepted with --data_file", "file")
    try:
        return detect_format(file)
    except ArgumentError as error:
        raise FlagError(error.line("--data_file")) from error


def accepted(flag: flags.Flag) -> str:
    """Describes the values that a flag's type accepts; "" for any text."""
    return getattr(flag.parser, "accepted", "true, false" if flag.boolean else "")


def _stop_at(error: flags.IllegalFlagValueError, registry: flags.FlagValues) -> NoReturn:
    """Raises `FlagError` for a value that is not of its flag's type."""
    found = re.match(r"flag --([^=]+)=(.*?): ", str(error), re.DOTALL)
    if not found or found[1] not in registry:
        raise FlagError(shown(error)) from error
    if isinstance(error.__context__, ArgumentError):
        raise FlagError.of(found[1], error.__context__.text, found[2]) from error
    raise FlagError.of(found[1], f"accepted: {accepted(registry[found[1]])}", found[2]) from error


def _expand(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replaces flag files by their words, and adds the default values of flags given without a value.

    Returns the words with flags under their present names, and a note on each that was given under its former name.
    """
    found = [renamed(word) for word in _with_files(list(words), ())]
    words = [word for word, _ in found]
    notes = dict.fromkeys(note for _, note in found if note)

    def alone(word, after):
        return word.lstrip("-") in IMPLIED and word.startswith("-") and after.startswith("-")

    expanded_words = [
        f"{word}={IMPLIED[word.lstrip('-')]}" if alone(word, after) else word
        for word, after in itertools.pairwise([*words, "-"])
    ]
    return expanded_words, list(notes)


def _with_files(words: list[str], inside: tuple[str, ...]) -> list[str]:
    """Replaces flag files by their words. `inside` lists the files that these words come from."""
    found: list[str] = []
    while words:
        name, equals, file = (word := words.pop(0)).partition("=")
        if name not in ("--flagfile", "-flagfile"):
            found.append(word)
            continue
        if not equals:
            file = words.pop(0) if words else ""
        try:
            file = expanded(file)
            if file in inside:
                raise ArgumentError("flagfile", "the file includes itself")
            lines = [line.strip() for line in reading.read_text(file).splitlines()]
        except ArgumentError as error:
            raise FlagError.of("flagfile", error.text, file) from error
        found += _with_files(
            [line for line in lines if line and not line.startswith(("#", "//"))], (*inside, file)
        )
    return found


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    """Returns a flag's values, given as --flag=VALUE or --flag VALUE."""
    joined = [word.lstrip("-").partition("=") for word in words if word.startswith("-")]
    apart = [
        after for word, after in itertools.pairwise(words) if word in (f"--{flag}", f"-{flag}")
    ]
    return [value for name, equals, value in joined if name == flag and equals] + apart
