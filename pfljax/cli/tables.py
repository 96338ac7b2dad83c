"""Tables in the terminal, and in the folder of a command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pfljax.api import table
from pfljax.report import terms


def show(
    title: str,
    heads: Sequence[str],
    body: Sequence[Sequence[str]],
    text: int = 1,
    notes: Sequence[str] = (),
) -> None:
    """Prints a table whose first `text` columns are words; the others are aligned as numbers."""
    printed = Table(title=title, caption="\n".join(notes), caption_justify="left")
    for number, head in enumerate(heads):
        printed.add_column(head, justify="left" if number < text else "right")
    for line in body:
        printed.add_row(*line)
    width = None if sys.stdout.isatty() else 200
    Console(width=width, markup=False, emoji=False).print(printed)


def print_paths(out: Path, figure: str = "") -> None:
    """Prints where the files of a table are."""
    shown_figure = f"; figure: {out / figure}" if figure else ""
    print(f"table: {out / 'table.md'}, .csv, .json, .tex{shown_figure}")
    if (out / "report.html").exists():
        print(f"report: {out / 'report.html'}")


def write(
    title: str,
    heads: Sequence[str],
    body: Sequence[Sequence[str]],
    rows: Sequence[dict],
    out: Path,
    figure: str = "",
) -> None:
    """Writes a table and a page of all runs, see `table.write_table`, and prints it with the paths."""
    table.write_table(title, heads, body, rows, out)
    show(title, heads, body, notes=terms.notes(rows))
    print_paths(out, figure)
