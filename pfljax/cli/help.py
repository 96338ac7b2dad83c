"""The text of --help: a command's flags by group, and the hyperparameters of the given methods."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

from pfljax.cli import exit_code_lines
from pfljax.cli.flags import DATA, HOW, RUNS, WHAT
from pfljax.cli.settings import Settings, accepted, read
from pfljax.settings.fields import with_words
from pfljax.settings.method import METHODS

WORDS = ("--help", "-help", "-h", "-?", "--helpfull", "--helpshort")
WIDTH = 100


def text(doc: str, settings: Settings, methods: Sequence[str]) -> str:
    """Returns the help of a command: what it says of itself, and its flags with their values in `settings` as defaults.

    Of the methods' hyperparameters, those of `methods` are shown.
    """
    registry = read(settings.define, [])
    groups = registry.flags_by_module_dict()
    heads = [head for head in (WHAT, DATA, HOW, RUNS) if head in groups]
    heads += [name for name in methods if name in groups]
    lines = [doc.strip(), ""]
    for head in heads:
        method = METHODS.get(head)
        lines += [f"{head}: {method.info.title}" if method else head, ""]
        for flag in groups[head]:
            lines += _entry(flag, settings)
        lines.append("")

    # Closing paragraphs.
    if any(name in groups for name in METHODS):
        flag = "method" if "method" in settings else "methods"
        others = [name for name in METHODS if name not in methods]
        listed = f"--{flag}=NAME --help shows the hyperparameters of another method: {', '.join(others)}."
        lines += wrapped(listed)
    if settings.defaults:
        preset = f"{settings.defaults} has the defaults for --dataset={settings.dataset}; flags override them."
        lines += ["", *wrapped(preset)]
    lines += ["", "--flagfile=FILE reads flags from a file, one per line."]
    lines += ["", *exit_code_lines()]
    return "\n".join(lines)


def _entry(flag: flags.Flag, settings: Settings) -> list[str]:
    """Returns a flag's lines: its name, what it sets, what it accepts and when it applies, and its default."""
    text = str(flag.help).removesuffix(".")
    first_word = text.partition(" ")[0]
    if text[1:2].islower() and not first_word.endswith(":"):  # not a choice
        text = text[0].upper() + text[1:]
    text, _, default = text.partition(" Default: ")
    sentences = [f"{text.removesuffix('.')}."]

    values = accepted(flag)
    if values not in ("", "numbers", "non-empty text"):
        label = "Choices" if getattr(flag.parser, "words", ()) or flag.boolean else "Accepted"
        sentences.append(f"{label}: {values}.")
    conditions = getattr(flag, "read_with", {})
    if conditions:
        sentences.append(f"Applies only {with_words(conditions, '--')}.")
    if not isinstance(flag, flags.MultiFlag):
        sentences.append(_default(flag, settings, default))

    return [f"  --{flag.name}", *wrapped(" ".join(sentences), " " * 6)]


class _Wrapper(textwrap.TextWrapper):
    """Breaks lines at spaces and hyphens, and lists of values that take several lines at their commas."""

    def _split(self, text: str) -> list[str]:
        chunks = []
        for chunk in super()._split(text):
            is_long = len(self.subsequent_indent) + len(chunk) > self.width
            chunks += re.split(r"(?<=,)(?=.)", chunk) if is_long else [chunk]
        return chunks


def wrapped(paragraph: str, indent: str = "") -> list[str]:
    """The lines of a paragraph."""
    wrapper = _Wrapper(
        WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    )
    return wrapper.wrap(paragraph)


def _default(flag: flags.Flag, settings: Settings, text: str) -> str:
    """Returns the sentence on a flag's value: as given, of a preset, what the help says, or the flag's."""
    value = settings[flag.name]
    if settings.present(flag.name):
        return f"Here: {_before_stop(value)}."
    if value != flag.default:
        return f"Default: {shown(value)} ({settings.defaults})."
    return f"Default: {text or _before_stop(value) or 'empty'}."


def _before_stop(value: Any) -> str:
    """Returns a flag's value at the end of a sentence: in quotes if it ends in a mark itself, such as a point."""
    text = shown(value)
    return f"'{text}'" if text.endswith((".", ",", ";", ":")) else text


def shown(value: Any) -> str:
    """Returns a flag's value as written on the command line; "" if it has none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
