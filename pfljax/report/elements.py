"""The elements of pages: text, tables, plots and controls. Each has a template in templates/elements/.

An element describes content alone. `rendering` turns it into HTML and escapes its text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

TALL = 30  # rows; longer tables with headings scroll in a frame of their own


class Element:
    """Content of a page."""

    @property
    def template(self) -> str:
        """The template that draws the element."""
        return f"elements/{type(self).__name__}.html.j2"


# Text


@dataclasses.dataclass(frozen=True)
class Link(Element):
    """A link, and its address relative to the page."""

    text: str
    address: str


@dataclasses.dataclass(frozen=True)
class Paragraph(Element):
    """A paragraph.

    Attributes:
        text: The text.
        links: Links after the text.
        name: Its id, by which scripts fill it in.
        style: CSS classes.
        live: Whether screen readers announce changes.
    """

    text: str = ""
    links: Sequence[Link] = ()
    name: str = ""
    style: str = ""
    live: bool = False


@dataclasses.dataclass(frozen=True)
class Heading(Element):
    """A heading within a section."""

    text: str


@dataclasses.dataclass(frozen=True)
class Code(Element):
    """Preformatted text, such as a command."""

    text: str


@dataclasses.dataclass(frozen=True)
class Links(Element):
    """Links in a narrow cell of a table."""

    links: Sequence[Link]


@dataclasses.dataclass(frozen=True)
class Wrapped(Element):
    """Text of a cell that breaks into lines at its commas."""

    text: str

    @property
    def clauses(self) -> list[str]:
        """The text between commas."""
        return self.text.split(", ")


@dataclasses.dataclass(frozen=True)
class Marked(Element):
    """Text of a cell with a mark that readers should notice, and the reason for it."""

    text: str
    reason: str


# Tables


@dataclasses.dataclass(frozen=True)
class Table(Element):
    """A table; without headings, of names and values.

    Attributes:
        heads: Headings of the columns.
        rows: Cells: numbers, text or elements. None and NaN are shown as "-".
        caption: Text above the table.
        sortable: Whether clicking a heading sorts the rows.
        style: CSS classes, such as "text" for columns of text.
        name: Its id.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    sortable: bool = False
    style: str = ""
    name: str = ""

    @property
    def classes(self) -> str:
        """The CSS classes of the table."""
        return f"{self.style} sortable".strip() if self.sortable else self.style

    @property
    def is_tall(self) -> bool:
        """Whether the table scrolls in a frame of its own."""
        return bool(self.heads) and len(self.rows) > TALL


@dataclasses.dataclass(frozen=True)
class ClientButton(Element):
    """The number of a client, which selects it when it is clicked."""

    client: int


# Plots and controls


@dataclasses.dataclass(frozen=True)
class Plot(Element):
    """The place of an interactive plot, which a script fills.

    Attributes:
        name: Its id, by which the page's data name its panels.
        label: Description for screen readers.
        caption: Text below the plot.
        height: Height in CSS.
    """

    name: str
    label: str
    caption: str = ""
    height: str = "22rem"


@dataclasses.dataclass(frozen=True)
class Image(Element):
    """An image that is embedded in the page.

    Attributes:
        data: PNG in base64.
        width: Width in pixels.
        label: Description for screen readers.
        caption: Text below the image.
    """

    data: str
    width: int
    label: str
    caption: str


@dataclasses.dataclass(frozen=True)
class SideBySide(Element):
    """Elements side by side if the window is wide enough."""

    elements: Sequence[Element]


@dataclasses.dataclass(frozen=True)
class Controls(Element):
    """Buttons and choices in a line."""

    elements: Sequence[Element]


@dataclasses.dataclass(frozen=True)
class Button(Element):
    """A button."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Choice(Element):
    """A labeled drop-down list.

    Attributes:
        name: Its id.
        label: Its label.
        options: Labels of the options, by value.
        plots: Names of the plots whose panels it chooses.
    """

    name: str
    label: str
    options: Mapping[str, str]
    plots: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class RoundSlider(Element):
    """The slider of rounds and its button, for the script of a run's page."""


@dataclasses.dataclass(frozen=True)
class ClientPicker(Element):
    """The list of clients and its buttons, for the script of a run's page."""


def downloads(tables: Mapping[str, str]) -> Controls:
    """Returns buttons that download the CSV tables in a page's data.

    Args:
        tables: Texts of the buttons, by name of the table.
    """
    buttons = [Button(f"csv-{name}", text) for name, text in tables.items()]
    return Controls(buttons)
