"""The ledger of results: every table of docs/results is made from an entry in docs/results/data.

python -m experiments.ledger add NAME FOLDER [FOLDER ...]    an entry from finished runs
python -m experiments.ledger repeat NAME FOLDER [FOLDER ...] records that some of an entry's runs were repeated
python -m experiments.ledger parity NAME FOLDER [FOLDER ...] an entry's figures from experiments.parity
python -m experiments.ledger write                           the tables of docs/results, from the entries
python -m experiments.ledger check                           whether they are the same, byte for byte
python -m experiments.ledger stale                           tables whose methods compute something else by now
python -m experiments.ledger broken                          tables without commit and runs, or of a missing commit
python -m experiments.ledger scoreboard                      how often our order of methods is a paper's
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.ledger import (
    added,
    commits,
    entries,
    parity,
    repeated,
    scoreboard,
    stale,
    tables,
)
from experiments.ledger.entries import ROOT, Entry


def blocks(found: Mapping[str, Entry], root: Path) -> dict[str, str]:
    """The text of every table by name, the scoreboard's too."""
    made = {name: tables.block(name, entry) for name, entry in found.items()}
    return made | {scoreboard.NAME: scoreboard.block(found, tables.marked(root))}


def parser() -> argparse.ArgumentParser:
    """The command's words."""
    whole = argparse.ArgumentParser(
        prog="python -m experiments.ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(dest="command", required=True)
    for name in ("write", "check", "stale", "broken", "scoreboard"):
        commands.add_parser(name)
    repeat = commands.add_parser("repeat")
    repeat.add_argument("name", help="the entry's name")
    repeat.add_argument("folders", nargs="+", type=Path, help="output folders of repeated runs")
    repeat.add_argument(
        "--row_first", action="store_true", help="run folders are ROW/COLUMN instead of COLUMN/ROW"
    )
    again = commands.add_parser("parity")
    again.add_argument("name", help="the entry's name")
    again.add_argument("folders", nargs="+", type=Path, help="output folders of the peers")
    again.add_argument("--machine", default="", help="where it was measured. Default: this machine")
    add = commands.add_parser("add")
    add.add_argument("name", help="the entry's name, such as federico-table1-digits")
    add.add_argument("folders", nargs="+", type=Path, help="output folders of one table's runs")
    add.add_argument("--title", default="", help="what the table shows")
    add.add_argument(
        "--figures",
        type=lambda words: words.split(","),
        default=["accuracy"],
        help="what it shows of each run",
    )
    add.add_argument("--lead", help="the row whose lead over the others is shown, such as federico")
    add.add_argument(
        "--paper", help="the paper's values, such as federico.TABLE1.cifar10.{row}.{column}"
    )
    add.add_argument(
        "--machine", default="", help="where the runs were made; this machine if not given"
    )
    add.add_argument("--commit", help="the commit that was measured, if the runs do not say it")
    add.add_argument(
        "--command",
        dest="called",
        default="",
        help="what was called, for runs made in Python, which do not say it",
    )
    add.add_argument(
        "--row_first", action="store_true", help="run folders are ROW/COLUMN instead of COLUMN/ROW"
    )
    add.add_argument(
        "--cells", action="store_true", help="take the cells of the experiment's own table.csv"
    )
    return whole


def write(name: str, entry: Entry, root: Path) -> None:
    """Writes a new entry's file, unless its table cannot be made."""
    tables.table(entry)  # find mistakes before writing anything
    print(
        f"{len(entry.runs or [])} runs of commit {entry.commit}: {entries.write(name, entry, root)}"
    )
    if entry.programs is None:
        print(
            f"programs are not recorded: pfljax has changed since {entry.commit}, or git lacks it"
        )


def add(words: argparse.Namespace, root: Path) -> None:
    """Writes an entry from folders of runs."""
    measured = functools.partial(
        added.as_measured, figures=words.figures, lead=words.lead, paper=words.paper
    )
    written = functools.partial(added.as_written, path=words.folders[0] / "table.csv")
    own = {
        name: getattr(words, name) for name in ("title", "machine", "commit", "called", "row_first")
    }
    entry = added.entry_of(words.folders, written if words.cells else measured, **own, root=root)
    write(words.name, entry, root)
    if words.name not in tables.marked(root):
        print(
            f"no page shows it; put <!-- ledger: {words.name} --> and <!-- /ledger --> on lines of one, then write"
        )


def repeat(words: argparse.Namespace, root: Path) -> None:
    """Records the repeated runs of an entry, and what its methods compute now."""
    entry = entries.read(root)[words.name]
    entry = repeated.recorded(entry, words.folders, row_first=words.row_first, root=root)
    entries.write(words.name, entry, root)
    print(f"{words.name}: {entry.repeated}")


def compare(words: argparse.Namespace, root: Path) -> None:
    """Takes an entry's figures from comparisons with other code."""
    entry = entries.read(root)[words.name]
    write(words.name, parity.measured(entry, words.folders, machine=words.machine, root=root), root)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs a command; returns its exit code."""
    words = parser().parse_args(argv)
    try:
        if words.command == "add":
            add(words, root)
            return 0
        if words.command == "repeat":
            repeat(words, root)
            return 0
        if words.command == "parity":
            compare(words, root)
            return 0
        found = entries.read(root)
        if words.command == "check":
            wrong = tables.problems(blocks(found, root), root)
            print("\n".join(wrong) or f"{len(found)} tables as in the ledger")
            return 1 if wrong else 0
        if words.command == "write":
            print(
                "\n".join(map(str, tables.write(blocks(found, root), root))) or "nothing to change"
            )
        elif words.command == "scoreboard":
            print(scoreboard.table(found, tables.marked(root)))
        elif words.command == "broken":
            print("\n".join(commits.broken(found, root)) or "all tables have a commit or runs")
        else:
            print("\n".join(stale.lines(found)) or "all methods compute what they did")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
