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

from pfljax.api import METRICS, models
from pfljax.cli import supervision
from pfljax.cli.flags import IMPLIED, METHOD_FLAGS
from pfljax.cli.names import FORMER, flags_of, owners_of, renamed
from pfljax.cli.parsing import Declared
from pfljax.contract import reading
from pfljax.contract.errors import ArgumentError, shown
from pfljax.contract.paths import expanded
from pfljax.data.sources import FORMATS, SOURCES, detect_format, has_tests
from pfljax.folder import files
from pfljax.settings import own_files
from pfljax.settings.fields import (
    GONE,
    Conditions,
    fields_of,
    holds,
    in_their_case,
    item_type,
    listed,
    plain,
    value_type,
    with_words,
)
from pfljax.settings.method import METHODS, registered_name

PRESETS = Path(__file__).parent / "presets"
VALIDATION_FRACTION = 0.2  # for all methods of a run, if one of them needs validation examples
# What users of other tools call some flags.
ABBREVIATIONS = {
    "lr": "learning_rate",
    "lrs": "learning_rates",
    "bs": "batch_size",
    "wd": "weight_decay",
    "clients": "num_clients",
    "data": "dataset",
    "net": "model",
}
Define = Callable[[flags.FlagValues], None]


class FlagError(ValueError):
    """A mistake on the command line, described in one line."""

    @classmethod
    def at(cls, flag: str, text: str, value: object = None) -> FlagError:
        """Returns the error for a flag: its value, if given, and what is accepted."""
        return cls(f"--{flag}: {text}" if value is None else f"--{flag}={shown(value)}: {text}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The values of a command's flags, as attributes or, if the name has a dot, as items."""

    define: Define  # registers the command's flags
    values: Mapping[str, Any]  # value by flag
    on_command_line: frozenset[str]  # names of flags, which presets do not override
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
        return flag in self.on_command_line

    def replace(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> Settings:
        """Returns the settings with other values. Flags with a dot in their name are passed in a mapping."""
        changed = {**(values or {}), **more}
        unknown = changed.keys() - self.values.keys()
        if unknown:
            raise KeyError(f"no such flag: {', '.join(sorted(unknown))}")
        return dataclasses.replace(self, values=MappingProxyType({**self.values, **changed}))

    def pinned(self, **values: Any) -> Settings:
        """Returns the settings with values that count as given on the command line, so no preset overrides them."""
        names = self.on_command_line | values.keys()
        return dataclasses.replace(self.replace(values), on_command_line=names)

    def with_preset(self, path: Path) -> Settings:
        """Returns the settings with a flag file's values, except for flags on the command line. It may not exist."""
        if not path.exists():
            return self
        registry = read(self.define, [f"--flagfile={path}"])
        values = {name: registry[name].value for name in registry if registry[name].present}
        # a later preset's rate applies to all methods unless it sets learning_rates
        if "learning_rate" in values:
            values.setdefault("learning_rates", [])
        return self.replace(values | self._on_command_line())

    def for_method(self, name: str) -> Settings:
        """Returns the settings with the method's own learning rate, if --learning_rates has one."""
        rates = {}
        for pair in self.learning_rates:
            method, _, rate = pair.partition(":")
            rates[method] = float(rate)
        rate = self.learning_rate
        if not self.present("learning_rate"):
            rate = rates.get(name, rate)
        return self.replace(learning_rate=rate, learning_rates=[])

    def with_defaults(self, methods: Iterable[str]) -> Settings:
        """Returns the settings with the defaults for the data set, its partition and the run's methods.

        Applies the first preset that exists: DATASET-PARTITION.flags, DATASET-validated.flags if a method needs
        validation examples, or DATASET.flags. Clients are tested on a file's official test examples, if it has them,
        unless --test_fraction is given.
        """
        # The preset.
        is_validated = any(METHODS[name].info.validates for name in methods)
        stems = [f"{self.dataset}-{self.partition}"]
        if is_validated:
            stems.append(f"{self.dataset}-validated")
        stems.append(self.dataset)
        presets = {path.stem: path for path in PRESETS.glob("*.flags")}
        path = next((presets[stem] for stem in stems if stem in presets), None)
        settings = self
        if path:
            settings = dataclasses.replace(self.with_preset(path), defaults=path.name)

        # Validation and test examples.
        if is_validated:
            settings = settings._with_default("validation_fraction", VALIDATION_FRACTION)
        if self.dataset in FORMATS and self.data_file and not self.present("test_fraction"):
            column = self.data_test if self.reads("data_test") else ""
            is_tested = has_tests(self.dataset, self.data_file, column)
            settings = settings._with_default("official_test", is_tested)
        return settings

    def _with_default(self, flag: str, value: Any) -> Settings:
        """Returns the settings with a value, unless the flag is on the command line."""
        return self if self.present(flag) else self.replace({flag: value})

    def _on_command_line(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.on_command_line}

    def error(self, flag: str, text: str) -> FlagError:
        """Returns the error for a flag, with its value as written on the command line."""
        value = self[flag]
        if isinstance(value, list | tuple):
            value = ",".join(map(str, value))
        return FlagError.at(flag, text, value)

    def refuse(self, flag: str, why: str) -> None:
        """Raises `FlagError` if the flag is on the command line; used for flags that do not apply."""
        if self.present(flag):
            raise FlagError.at(flag, f"does not apply here: {why}")

    def reads(self, flag: str) -> bool:
        """Whether the flag has an effect with these settings."""
        conditions = self.read_with.get(flag)
        if not conditions:
            return True
        return any(holds(self[flag], values) for flag, values in conditions.items() if flag in self)

    def check_read(self, variants: Sequence[Settings] = ()) -> None:
        """Raises `FlagError` for a flag on the command line that neither these settings nor any `variants` read."""
        for flag, conditions in self.read_with.items():
            if any(settings.reads(flag) for settings in variants or [self]):
                continue
            known = {other: values for other, values in conditions.items() if other in self}
            why = f"accepted {with_words(known, '--')}" if known else "it has no effect"
            self.refuse(flag, why)

    def values_of(self, declaring: Callable, prefix: str = "") -> dict[str, Any]:
        """Returns the values of the flags of a dataclass's fields or a function's arguments, by name."""
        known = fields_of(declaring)
        values = {}
        for name, flag in flags_of(declaring, prefix).items():
            if flag not in self or not self.reads(flag):
                continue
            kind = plain(item_type(value_type(known[name].hint)))[0]
            is_numbers = kind in (int, float)
            values[name] = [kind(text) for text in self[flag]] if is_numbers else self[flag]
        return values

    def make(self, declaring: Callable, prefix: str = "", **further: Any) -> Any:
        """Calls a dataclass or function with the values of its flags and the `further` ones that it accepts."""
        known = fields_of(declaring)
        values = self.values_of(declaring, prefix)
        values |= {name: value for name, value in further.items() if name in known}
        try:
            return declaring(**values)
        except ArgumentError as error:
            owner = owners_of(declaring, prefix).get(error.argument)
            if not owner or error.owner:
                raise
            # other classes have a field of this name, too
            raise error.with_owner(owner) from error.__cause__

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

    def check_hyperparameters(self, methods: Sequence[str]) -> None:
        """Raises `FlagError` for a hyperparameter on the command line that none of the methods has."""
        names = ", ".join(methods)
        for flag in sorted(self.on_command_line):
            if self.headings[flag] in METHODS and self.headings[flag] not in methods:
                raise FlagError.at(flag, f"not a hyperparameter of this run's methods ({names})")
        if not self.present("learning_rates"):
            return
        for pair in self.learning_rates:
            if pair.partition(":")[0] not in methods:
                text = f"accepted: learning rates for this run's methods ({names})"
                raise self.error("learning_rates", text)


def parse(define: Define, words: Sequence[str]) -> Settings:
    """Parses a command line, without the command.

    Loads users' own method files first. Former names of flags are accepted, and noted on standard error. Raises
    `FlagError` for a mistake.
    """
    words, notes = expand(words)
    if supervision.WATCHED not in os.environ:  # otherwise the watcher has printed them
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    loaded = _loaded_methods(words)
    registry = read(define, words)
    values: dict[str, Any] = {name: registry[name].value for name in registry}

    # Names, in any case.
    if "dataset" in values:
        values["dataset"] = _dataset(values["dataset"], values.get("data_file"))
    if "model" in values and not own_files.is_file_and_name(values["model"]):
        values["model"] = _in_their_case(values["model"], [*models.NAMES, *models.FAMILIES])
    if "metrics" in values:
        values["metrics"] = [in_their_case(name, METRICS) for name in values["metrics"]]
    if values.get("reference"):
        values["reference"] = registered_name(values["reference"])
    if "method" in values:
        name = values["method"]
        values["method"] = loaded.get(name, registered_name(name))
    if "methods" in values:
        names = [loaded.get(name, registered_name(name)) for name in values["methods"]]
        values["methods"] = [in_their_case(name, ["all"]) for name in names]

    # What the flags are for.
    headings = {}
    for heading, group in registry.flags_by_module_dict().items():
        for flag in group:
            headings[flag.name] = heading
    read_with = {}
    flag_of = {}
    for flag in (registry[name] for name in registry):
        if not isinstance(flag, Declared):
            continue
        if flag.read_with:
            read_with[flag.name] = flag.read_with
        if headings[flag.name] not in METHODS:
            flag_of |= dict.fromkeys(flag.arguments, flag.name)
    return Settings(
        define,
        MappingProxyType(values),
        frozenset(name for name in registry if registry[name].present),
        MappingProxyType(headings),
        MappingProxyType(read_with),
        MappingProxyType(flag_of),
        words=tuple(words),
    )


def _in_their_case(names: str, accepted: Iterable[str]) -> str:
    """Names with commas between them, those in other cases than the accepted ones replaced by these."""
    accepted = list(accepted)
    return ",".join(in_their_case(name, accepted) for name in names.split(","))


def _dataset(name: str, file: str | None) -> str:
    """Returns the name of a data set in its case; for "file", the format of the user's file."""
    name, colon, member = name.partition(":")
    name = in_their_case(name, [*SOURCES, "file"])
    if name != "file":
        return f"{name}{colon}{member}"
    if not file:
        raise FlagError.at("dataset", "accepted with --data_file", "file")
    try:
        return detect_format(file)
    except ArgumentError as error:
        raise FlagError(error.line("--data_file")) from error


def read(define: Define, words: Sequence[str]) -> flags.FlagValues:
    """Returns a command's flags with the values from a command line or a flag file.

    Raises `FlagError` for a mistake.
    """
    registry = flags.FlagValues()
    define(registry)
    try:
        rest = registry(["", *words])
    except flags.UnrecognizedFlagError as error:
        raise FlagError.at(
            shown(error.flagname), f"unknown flag; {_hint(error.flagname, list(registry), words)}"
        ) from error
    except flags.IllegalFlagValueError as error:
        _stop_at(error, registry)
    except (flags.Error, ValueError) as error:
        raise FlagError(shown(error)) from error
    if len(rest) > 1:
        raise FlagError(f"{shown(rest[1])}: not a flag; flags start with --")
    return registry


def _hint(unknown: str, known: Sequence[str], words: Sequence[str]) -> str:
    """What an unknown flag may have meant: with a dot, a hyperparameter of that method."""
    method, dot, _ = unknown.partition(".")
    if dot:
        return _hint_at_hyperparameter(unknown, method, known)
    if unknown in ABBREVIATIONS and ABBREVIATIONS[unknown] in known:
        return f"did you mean --{ABBREVIATIONS[unknown]}?"

    # A hyperparameter without its method: those of the methods on the command line, if these have it.
    hyperparameters = [name for name in known if name.partition(".")[2] == unknown]
    if hyperparameters:
        named = [registered_name(name) for flag in METHOD_FLAGS for name in values_of(flag, words)]
        asked = {name for names in named for name in names.split(",")}
        named_hyperparameters = [
            name for name in hyperparameters if name.partition(".")[0] in asked
        ]
        return _did_you_mean((named_hyperparameters or hyperparameters)[:3])

    former = [name for name, new in FORMER.items() if new in known]
    near = difflib.get_close_matches(unknown, [*known, *former], n=3)
    if not near:
        return "--help lists all flags"
    names = dict.fromkeys(FORMER.get(name, name) for name in near)
    return _did_you_mean(names)


def _did_you_mean(names: Iterable[str]) -> str:
    return f"did you mean {listed([f'--{name}' for name in names])}?"


def _hint_at_hyperparameter(unknown: str, method: str, known: Sequence[str]) -> str:
    """What an unknown flag METHOD.HYPERPARAMETER may have meant."""
    if method not in METHODS:
        near = difflib.get_close_matches(method.lower(), METHODS, n=1, cutoff=0.8)
        way = "--method=FILE.py:NAME loads a method of your own"
        hint = f"did you mean {near[0]}?" if near else way
        return f"no method {shown(method)} is known; {hint}"
    if unknown in GONE:
        return GONE[unknown]
    hyperparameters = [name for name in known if name.startswith(f"{method}.")]
    near = difflib.get_close_matches(unknown, hyperparameters, n=3)
    if near:
        return _did_you_mean(near)
    return f"accepted: {', '.join(f'--{name}' for name in hyperparameters) or f'no hyperparameter of {method}'}"


def _loaded_methods(words: Sequence[str]) -> dict[str, str]:
    """Loads the methods that are named as FILE.py:NAME; returns their registered names."""
    loaded: dict[str, str] = {}
    for flag in METHOD_FLAGS:
        names = {name for value in values_of(flag, words) for name in value.split(",")}
        for name in sorted(filter(own_files.is_file_and_name, names)):
            try:
                loaded[name] = own_files.load_method(name)
            except ArgumentError as error:
                raise FlagError(error.line(f"--{flag}")) from error
    return loaded


def accepted(flag: flags.Flag) -> str:
    """Describes the values that a flag's type accepts; "" for any text."""
    return getattr(flag.parser, "accepted", "true, false" if flag.boolean else "")


def _stop_at(error: flags.IllegalFlagValueError, registry: flags.FlagValues) -> NoReturn:
    """Raises `FlagError` for a value that is not of its flag's type."""
    match = re.match(r"flag --([^=]+)=(.*?): ", str(error), re.DOTALL)
    if not match or match[1] not in registry:
        raise FlagError(shown(error)) from error
    name, value = match.groups()
    if isinstance(error.__context__, ArgumentError):
        raise FlagError.at(name, error.__context__.text, value) from error
    text = f"accepted: {accepted(registry[name])}"
    words = getattr(registry[name].parser, "words", ())
    near = difflib.get_close_matches(value.lower(), map(str, words), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise FlagError.at(name, f"{text}{hint}", value) from error


def expand(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replaces flag files by their words, and adds the default values of flags given without a value.

    Returns the words with flags under their present names, and a note on each that was given under its former name.
    Raises `FlagError` for a flag that is given under both names.
    """
    _check_names(words)
    expanded_words = []
    notes = []
    for word in _with_files(list(words), ()):
        present, note = renamed(word)
        expanded_words.append(present)
        if note and note not in notes:
            notes.append(note)
    for number, word in enumerate(expanded_words):
        following = expanded_words[number + 1 :]
        has_no_value = not following or following[0].startswith("-")
        flag = word.lstrip("-")
        if word.startswith("-") and flag in IMPLIED and has_no_value:
            expanded_words[number] = f"{word}={IMPLIED[flag]}"
    return expanded_words, notes


def _check_names(words: Sequence[str]) -> None:
    """Raises `FlagError` for a flag that is given under its former name and its present one; flag files may differ."""
    names_of: dict[str, str] = {}
    for word in words:
        if not word.startswith("-"):
            continue
        name = word.lstrip("-").partition("=")[0]
        present = renamed(f"--{name}")[0].removeprefix("--")
        before = names_of.setdefault(present, name)
        if before != name:
            text = f"is now --{present}; accepted: only one of --{before} and --{name}"
            raise FlagError.at(before if name == present else name, text)


def _with_files(words: list[str], inside: tuple[str, ...]) -> list[str]:
    """Replaces flag files by their words. `inside` lists the files that these words come from."""
    expanded_words: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, file = word.partition("=")
        if name not in ("--flagfile", "-flagfile"):
            expanded_words.append(word)
            continue
        if not equals:
            file = remaining.pop(0) if remaining else ""
        try:
            file = expanded(file)
            if file in inside:
                raise ArgumentError("flagfile", "the file includes itself")
            lines = [line.strip() for line in reading.read_text(file).splitlines()]
        except ArgumentError as error:
            raise FlagError.at("flagfile", error.text, file) from error
        in_file = [line for line in lines if line and not line.startswith(("#", "//"))]
        expanded_words += _with_files(in_file, (*inside, file))
    return expanded_words


def values_of(flag: str, words: Sequence[str]) -> list[str]:
    """Returns a flag's values, given as --flag=VALUE or --flag VALUE."""
    values = []
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name == flag:
            values.append(value if equals else following)
    return values
