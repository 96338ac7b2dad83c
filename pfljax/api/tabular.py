"""Headings and cells as text, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table for a terminal, its numbers aligned on the right."""
    first_width, *widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths, strict=True)]
        return "  ".join([cells[0].ljust(first_width), *numbers])

    return [line(heads), *map(line, body)]


def markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown, its numbers aligned on the right."""
    from pfljax.report import rendering  # imports jinja2

    return rendering.markdown_table(heads, body)


def latex(title: str, heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a table in LaTeX, for the package booktabs."""
    from pfljax.report import rendering  # imports jinja2

    return rendering.latex_table(title, heads, body)
