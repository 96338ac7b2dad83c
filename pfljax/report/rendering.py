"""Text from templates: pages in HTML, and tables in Markdown and LaTeX. Each format escapes all text that it gets."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from pfljax.folder import files
from pfljax.report import escaping
from pfljax.report.elements import Element

ASSETS = Path(__file__).parent / "assets"
LOADER = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
PLOTLY = "plotly-cartesian.min.js"

# A page loads no scripts or images from elsewhere, whatever a run's files contain.
POLICY = Markup(
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)


def displayed(value: Any) -> Any:
    """Converts a value to what a page shows: elements to HTML, None and NaN to "-", and lists to text with commas."""
    if isinstance(value, Element):
        return render_element(value)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, Mapping):
        return joined([f"{name} {displayed(entry)}" for name, entry in value.items()])
    if isinstance(value, list | tuple):
        return joined(value)
    return value


def joined(values: Sequence[Any]) -> Markup:
    """Joins values with commas."""
    return Markup(", ").join(escape(displayed(value)) for value in values)


@functools.cache
def html_environment() -> jinja2.Environment:
    """Returns the environment of pages, which escapes every value."""
    return jinja2.Environment(
        loader=LOADER,
        autoescape=True,
        finalize=displayed,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_element(element: Element) -> Markup:
    """Returns the HTML of an element."""
    template = html_environment().get_template(element.template)
    return Markup(template.render(element=element).strip())


def render(elements: Sequence[Element]) -> Markup:
    """Returns the HTML of several elements."""
    return Markup("\n").join(render_element(element) for element in elements)


def document(
    title: str,
    lead: str,
    sections: Mapping[str, Sequence[Element]],
    data: Any,
    scripts: Sequence[str] = (),
) -> str:
    """Returns a page: a heading, a line below it, and sections by heading. Sections without elements are left out.

    Args:
        title: The heading.
        lead: The line below it.
        sections: Elements by heading.
        data: Data for the scripts, which are converted to JSON; NaN in arrays becomes null. "panels" are those of each
            plot by choice, and "csv" the tables for downloading.
        scripts: Files in assets/ that the page needs besides page.js.
    """
    template = html_environment().get_template("page.html.j2")
    code = [(ASSETS / name).read_text() for name in ("page.js", *scripts)]
    content = json.dumps(files.plain(data), allow_nan=False)
    return template.render(
        title=title,
        lead=lead,
        sections={heading: elements for heading, elements in sections.items() if elements},
        policy=POLICY,
        style=Markup((ASSETS / "page.css").read_text()),
        library=library(),
        data=pack(content),
        script=Markup("\n".join(code)),
    )


def pack(content: str) -> str:
    """Compresses text with gzip and encodes it in base64, which is safe in HTML."""
    compressed = gzip.compress(content.encode(), 6, mtime=0)
    return base64.b64encode(compressed).decode()


@functools.cache
def library() -> str:
    """Returns the packed code of Plotly, which is the same on every page."""
    return pack((ASSETS / PLOTLY).read_text())


# Tables as text


class Verbatim(str):
    """Text of a template that is not escaped again."""


@functools.cache
def markdown_environment() -> jinja2.Environment:
    """Returns the environment of Markdown, which escapes every value."""
    return jinja2.Environment(
        loader=LOADER,
        finalize=escaping.markdown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@functools.cache
def latex_environment() -> jinja2.Environment:
    """Returns the environment of LaTeX, which escapes every value; braces are LaTeX's own."""

    def escaped(value: str) -> str:
        return value if isinstance(value, Verbatim) else escaping.latex(value)

    def comment(value: str) -> Verbatim:
        return Verbatim(escaping.one_line(value))

    environment = jinja2.Environment(
        loader=LOADER,
        finalize=escaped,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
    environment.filters["comment"] = comment
    return environment


def markdown_table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown. The first column is text, the others are numbers."""
    template = markdown_environment().get_template("table.md.j2")
    return template.render(heads=heads, body=body).rstrip("\n")


def latex_table(title: str, heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a table in LaTeX, for the package booktabs. The title is a comment above it."""
    template = latex_environment().get_template("table.tex.j2")
    return template.render(title=title, heads=heads, body=body) + "\n"
