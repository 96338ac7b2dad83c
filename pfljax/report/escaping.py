"""Text of users in tables: one function for each format that is written; pages escape theirs in templates."""

from __future__ import annotations

import re

MINUS = re.compile(r"(?<![\w.)-])-[\d.]+(?![\w.])")  # a negative number, not the hyphen of a name
LATEX = {character: f"\\{character}" for character in "%&#_$"} | {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
}
# HTML and the end of a cell.
MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|"}


def one_line(text: str) -> str:
    """Text in one line: every run of white space and unprintable characters is one space."""
    return " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )


def latex(text: str) -> str:
    """Text in LaTeX, with a minus before negative numbers."""
    escaped = one_line(text).translate(str.maketrans(LATEX))
    # After \\ of the row above, LaTeX would take them for an argument.
    if escaped.startswith(("[", "*")):
        escaped = f"{{{escaped[0]}}}{escaped[1:]}"
    return MINUS.sub(r"$\g<0>$", escaped)


def markdown(text: str) -> str:
    """Text in a paragraph or a table's cell in Markdown."""
    return one_line(text).translate(str.maketrans(MARKDOWN))
