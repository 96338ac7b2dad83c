"""What a reader sees of an HTML page: its tables, sections, links and choices."""

from __future__ import annotations

import html.parser
from pathlib import Path

UNSEEN = ("script", "style")
CELLS = ("td", "th")


class Page(html.parser.HTMLParser):
    """A page, parsed.

    Attributes:
        rows: The rows of all tables, as the texts of their cells. Heads of columns are cells, too.
        sections: Text below each heading of the second level, by the heading; "" is what stands above the first.
        links: Where links lead, in order.
        options: Values and texts of choices.
        images: Sources of images.
    """

    def __init__(self, text: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.sections = {"": ""}
        self.links: list[str] = []
        self.options: dict[str, str] = {}
        self.images: list[str] = []
        self._open: list[str] = []  # tags of which the text belongs to something
        self._section = ""
        self._option = ""
        self.feed(text)

    @property
    def text(self) -> str:
        """All text."""
        return "".join(self.sections.values())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens rows, cells, headings and choices."""
        given = dict(attrs)
        if tag == "tr":
            self.rows.append([])
        elif tag in CELLS and self.rows:
            self.rows[-1].append("")
        elif tag == "h2":
            self._section = ""
        elif tag == "option":
            self._option = given.get("value") or ""
            self.options[self._option] = ""
        elif tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        elif tag == "img":
            self.images.append(given.get("src") or "")
        if tag in (*UNSEEN, *CELLS, "h2", "option"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Closes what `handle_starttag` has opened."""
        if tag in self._open:
            while self._open.pop() != tag:
                pass
        if tag == "h2":
            self.sections.setdefault(self._section, "")

    def handle_data(self, data: str) -> None:
        """Adds text to the cell, heading or choice that is open, and to the section."""
        if any(tag in self._open for tag in UNSEEN):
            return
        if "h2" in self._open:
            self._section += data
            return
        if any(tag in self._open for tag in CELLS):
            self.rows[-1][-1] += data
        elif "option" in self._open:
            self.options[self._option] += data
        self.sections[self._section] += data


def read(path: Path) -> Page:
    """Parses a page."""
    return Page(path.read_text())
