"""The text of --help: a command's flags by group, and the knobs of the given methods."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

from pfljax.cli.flags import DATA, HOW, RUNS, WHAT
from pfljax.cli.settings import Settings, accepted, read
from pfljax.settings.fields import with_words
from pfljax.settings.method import METHODS

WORDS = ("--help", "-help", "-h", "-?", "--helpfull", "--helpshort")
WIDTH = 100


def text(doc: str, settings: Settings, methods: Sequence[str]) -> str:
    """Returns the help of a command: what it says of itself, and its flags with their values in `settings` as defaults.

    Of the methods' knobs, those of `methods` are shown.
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
    if any(name in groups for name in METHODS):
        name = "method" if "method" in settings else "methods"
        others = [name for name in METHODS if name not in methods]
        lines += textwrap.wrap(
            f"--{name}=NAME --help shows the knobs of another method: {', '.join(others)}.", WIDTH
        )
    if settings.defaults:
        named = f"{settings.defaults} has the defaults for --dataset={settings.dataset}; flags override them."
        lines += ["", *textwrap.wrap(named, WIDTH)]
    lines += ["", "--flagfile=FILE reads flags from a file, one per line."]
    return "\n".join(lines)


def _entry(flag: flags.Flag, settings: Settings) -> list[str]:
    """Returns a flag's lines: name, default and its origin, description, accepted values."""
    value = settings[flag.name]
    preset = settings.defaults if value != flag.default and not settings.present(flag.name) else ""
    first = f"  --{flag.name}={shown(value)}" + (
        f"  ({preset or 'as given'})" if value != flag.default else ""
    )
    body = str(flag.help)
    values = accepted(flag)
    conditions = getattr(flag, "read_with", {})
    further = [f"accepted: {values}"] if values not in ("", "numbers", "non-empty text") else []
    further += [f"read {with_words(conditions, '--')}"] if conditions else []

    def wrap(text):
        return textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)

    return [first, *wrap(body), *wrap("; ".join(further))]


def shown(value: Any) -> str:
    """Returns a flag's value as written on the command line; "" if it has none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
