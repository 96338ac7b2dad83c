"""HTML shared by all pages: escaped text, tables, and a document with the plotting library, data and scripts."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pfljax.folder import files

ASSETS = Path(__file__).parent / "assets"

# A page loads no scripts or images from elsewhere, whatever a run's files contain.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)


class Raw(str):
    """HTML that is inserted into a page unchanged."""


def text(value: Any) -> str:
    """Converts any value to escaped text."""
    if isinstance(value, Raw):
        return value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{text(name)} {text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(text, value))
    return html.escape(str(value))


def score(name: str, value: Any) -> str:
    """Formats a score: accuracies in percent, losses with four decimals."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return text(None if isinstance(value, float) else value)
    return f"{100 * value:.1f} %" if name.startswith("accuracy") else f"{value:.4f}"


def table(
    heads: Sequence[str], body: Iterable[Sequence[Any]], kind: str = "", title: str = ""
) -> Raw:
    """Returns a table; without headings, of names and values. `kind` has CSS classes, and `title` is the caption.

    Tables of the kind "sortable" are sorted by clicking a heading.
    """
    sortable = "sortable" in kind.split()

    def wrap(head):
        return f'<button type="button">{text(head)}</button>' if sortable and head else text(head)

    def line(cells):
        return "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>"

    head = "".join(f'<th scope="col">{wrap(head)}</th>' for head in heads)
    caption = f"<caption>{text(title)}</caption>" if title else ""
    return Raw(
        f'<div class="wide" tabindex="0"><table class="{text(kind)}">{caption}'
        + (f"<thead><tr>{head}</tr></thead>" if heads else "")
        + f"<tbody>{''.join(map(line, body))}</tbody></table></div>"
    )


def paragraph(content: str) -> Raw:
    """Returns a paragraph of text; "" if the text is empty."""
    return Raw(f"<p>{text(content)}</p>" if content else "")


def plot(name: str, label: str, caption: str = "", height: str = "22rem") -> Raw:
    """Returns the placeholder of an interactive plot, which a script fills; `document`'s data name it by its id.

    `label` describes it for screen readers; `height` is that in CSS.
    """
    told = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    attributes = f'class="plot" id="{text(name)}" style="height: {height}" role="img" aria-label="{text(label)}"'
    return Raw(f"<figure><div {attributes}></div>{told}</figure>")


def choice(name: str, label: str, options: Mapping[str, str], *plots: str) -> Raw:
    """Returns a labeled drop-down list; `options` are labels by value. It chooses the panels of plots, if named."""
    entries = "".join(
        f'<option value="{text(value)}">{text(word)}</option>' for value, word in options.items()
    )
    of = f' data-plot="{" ".join(plots)}"' if plots else ""
    return Raw(
        f'<label for="{name}">{text(label)} <select id="{name}"{of}>{entries}</select></label>'
    )


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list]:
    """Returns the cells of a table with a row per entry, headings first."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    return [heads, *([row.get(name) for name in heads] for row in rows)]


def controls(*content: str) -> Raw:
    return Raw(f'<div class="controls">{"".join(content)}</div>')


def downloads(names: Mapping[str, str]) -> Raw:
    """Returns buttons that download the tables of these names in a page's data; their texts by name."""
    return controls(
        *(
            f'<button type="button" id="csv-{name}">{text(label)}</button>'
            for name, label in names.items()
        )
    )


def document(
    title: str, lead: str, sections: Mapping[str, str], data: Any, scripts: Sequence[str] = ()
) -> str:
    """Returns a page with a heading, a line below it, and sections of HTML by heading; empty ones are left out.

    `data` for the scripts are converted to JSON; NaN in arrays becomes null. "panels" are those of each plot by choice,
    and "csv" the tables for downloading. `scripts` are files in assets/ that the page needs besides page.js.
    """
    kept = {name: content for name, content in sections.items() if content}
    ids = {name: f"section-{number}" for number, name in enumerate(kept)}
    links = "".join(f'<a href="#{ids[name]}">{text(name)}</a>' for name in kept)
    body = "\n".join(
        f'<section id="{ids[name]}">\n<h2>{text(name)}</h2>\n{content}\n</section>'
        for name, content in kept.items()
    )
    packed = _packed(json.dumps(data, allow_nan=False, default=files.plain))
    code = "\n".join((ASSETS / name).read_text() for name in ("page.js", *scripts))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{text(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{(ASSETS / 'page.css').read_text()}</style>\n</head>\n<body>\n"
        f'<header><h1>{text(title)}</h1><button type="button" id="theme">Dark</button></header>\n'
        f'<p class="lead">{text(lead)}</p>\n<nav aria-label="Sections">{links}</nav>\n'
        "<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>\n"
        '<p id="problem" role="alert" hidden></p>\n'
        f"<main>\n{body}\n</main>\n"
        f'<script type="text/plain" id="library">{library()}</script>\n'
        f'<script type="text/plain" id="data">{packed}</script>\n'
        f"<script>{code}</script>\n</body>\n</html>\n"
    )


def _packed(content: str) -> str:
    """Compresses text with gzip and encodes it in base64, which is safe in HTML."""
    return base64.b64encode(gzip.compress(content.encode(), 6, mtime=0)).decode()


@functools.cache
def library() -> str:
    """Returns the packed code of the plots' library, which is the same on every page."""
    from plotly.offline import get_plotlyjs  # heavy

    return _packed(get_plotlyjs())
