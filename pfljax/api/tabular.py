"""Headings and cells as text, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence

from pfljax.report import escaping


def aligned(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table for a terminal, its numbers aligned on the right."""
    first_width, *widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths, strict=True)]
        return "  ".join([cells[0].ljust(first_width), *numbers])

    return [line(heads), *map(line, body)]


def markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown, its numbers aligned on the right."""
    head, *lines = [[escaping.markdown(cell) for cell in cells] for cells in (heads, *body)]
    lines = [head, ["---", *["---:"] * (len(heads) - 1)], *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def latex(title: str, heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a table in LaTeX, for the package booktabs."""
    lines = []
    for cells in (heads, *body):
        escaped = map(escaping.latex, cells)
        lines.append(" & ".join(escaped) + r" \\")
    head, *rest = lines
    return "\n".join(
        [
            f"% {escaping.one_line(title)}",
            rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *rest,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )
