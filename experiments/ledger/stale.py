"""Which tables were measured before their methods, or the partitions of their data, computed what they compute now.

What counts is the digest of the program that was recorded with the table (see `experiments.ledger.programs`), and not
which files have changed. Tables of times are those of their commit, and none of them is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from experiments.ledger import programs
from experiments.ledger.entries import PARTITION, Entry
from pfljax.algorithms import METHODS


def lines(entries: Mapping[str, Entry]) -> list[str]:
    """A line for each stale table, oldest first, and one for all tables of which nothing is known."""
    in_order = sorted(entries.items(), key=lambda pair: pair[1].date)
    version = programs.jax_version()
    found = []
    unrecorded = 0
    versions: dict[
        str, int
    ] = {}  # number of tables that cannot be compared, by their version of jax
    for name, entry in in_order:
        reasons = reasons_of_absence(entry)
        if entry.timing:
            pass  # its commit says which engine was timed
        elif entry.programs is None:
            unrecorded += 1
        elif entry.programs_jax != version:
            versions[entry.programs_jax or ""] = versions.get(entry.programs_jax or "", 0) + 1
        else:
            reasons += reasons_of_change(entry.programs)
        if reasons:
            found.append(f"{entry.date}  {name}: {'; '.join(reasons)}")

    for other, number in versions.items():
        text = (
            f"measured with jax {other}, whose programs cannot be compared with those of {version}"
        )
        found.append(f"{tables(number)} {text}")
    if unrecorded:
        found.append(f"{tables(unrecorded)} measured before programs were recorded")
    return found


def reasons_of_absence(entry: Entry) -> list[str]:
    """Says which methods of a table are gone."""
    gone = [name for name in entry.methods if name not in METHODS]
    if not gone:
        return []
    return [f"{listed(gone)} {'are' if len(gone) > 1 else 'is'} gone"]


def reasons_of_change(recorded: Mapping[str, str]) -> list[str]:
    """Says which methods and partitions have another digest than the recorded one; those that are gone do not count."""
    changed = []
    for name, digest in recorded.items():
        is_gone = not name.startswith(PARTITION) and name not in METHODS
        if not is_gone and programs.digest(name) != digest:
            changed.append(name)

    methods = [name for name in changed if not name.startswith(PARTITION)]
    reasons = []
    if methods:
        verb = "compute" if len(methods) > 1 else "computes"
        reasons.append(f"{listed(methods)} {verb} something else than when this was measured")
    for name in changed:
        if name not in methods:
            partition = name.removeprefix(PARTITION)
            reasons.append(
                f"partition {partition} deals other examples than when this was measured"
            )
    return reasons


def listed(names: Iterable[str]) -> str:
    """Names with commas."""
    return ", ".join(names)


def tables(number: int) -> str:
    """The number of tables, with its verb."""
    return "1 table was" if number == 1 else f"{number} tables were"
