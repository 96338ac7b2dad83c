"""Pages that the site makes of the code: one for each method and example, and the project's own files.

MkDocs calls the functions at the end (`hooks` in mkdocs.yml). Links that are right in the repository, such as
examples/own_method.py, become links to these pages.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import html
import os.path
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
NAMES = (
    "alpha beta gamma delta epsilon eta theta lambda mu pi phi sigma tau omega Delta Theta Omega Pi"
)
GREEK = NAMES.split(" ")
LETTERS = dict(zip(GREEK, "αβγδεηθλμπφστωΔΘΩΠ", strict=True))
SYMBOLS = {"<-": "←", "->": "→", "<=": "≤", ">=": "≥", "!=": "≠"}
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)((?:#[^)\s]*)?)(?=\))")
SHIM = "https://unpkg.com/iframe-worker/shim"  # which the theme would fetch to search from a folder
FILLED = 95  # a docstring's line of so many characters goes on in the next


def source_of(path: str) -> str:
    """The text of a file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


# Mathematics in the docstrings' plain text, such as theta_k <- sum_j w_kj theta_j


def typeset(text: str) -> str:
    """HTML of a text with formulas; what stands between backticks stays code."""
    parts = text.split("`")
    return "".join(
        f"<code>{html.escape(part, quote=False)}</code>" if number % 2 else _formulas(part)
        for number, part in enumerate(parts)
    )


def _formulas(text: str) -> str:
    for plain, symbol in SYMBOLS.items():
        text = text.replace(plain, symbol)
    text = html.escape(text, quote=False)
    text = re.sub(r"(?<![A-Za-z])sum(?=_)", "∑", text)
    text = re.sub(
        r"(?<![A-Za-z])grad(?![a-z])(_?)(?= ?[A-Za-z({])", lambda found: "∇" + found[1], text
    )
    text = re.sub(
        rf"(?<![A-Za-z])({'|'.join(GREEK)})(?![A-Za-z])", lambda found: LETTERS[found[1]], text
    )
    text = re.sub(r"_\{([^}]*)\}", r"<sub>\1</sub>", text)
    text = re.sub(r"∇_(\w)_(\w)", r"∇<sub>\1<sub>\2</sub></sub>", text)
    text = re.sub(
        r"(?<=[\wΔ∑∇\])’'])_([A-Za-z0-9α-ω]{1,3})(?![A-Za-z0-9_])", r"<sub>\1</sub>", text
    )
    text = re.sub(r"\^\(([^)]*)\)", r"<sup>\1</sup>", text)
    text = re.sub(r"\^(-?[A-Za-z0-9]+)", r"<sup>\1</sup>", text)
    return re.sub(
        r"(?<![A-Za-z&<])([A-Za-z]|[α-ω])(?=<su[bp]>)|([α-ω])(?!<su)", r"<i>\1\2</i>", text
    )


def algorithm(lines: list[str]) -> str:
    """HTML of an indented block of a docstring: its lines, those joined that were wrapped only to fit."""
    joined: list[str] = []
    filled = False
    for line in lines:
        whole = line.rstrip()
        if filled and joined and whole.strip():
            joined[-1] += " " + whole.strip()
        else:
            joined.append(whole)
        filled = (
            len(whole) >= FILLED and not whole.endswith((";", ".", ":")) and not _reference(whole)
        )
    shown = []
    for line in filter(str.strip, joined):
        depth = ' class="deeper"' if len(line) - len(line.lstrip()) > 4 else ""
        found = _reference(line)
        reference = f'<span class="reference">{typeset(found[1])}</span>' if found else ""
        body = line[: found.start()] if found else line
        shown.append(
            f"<div{depth}>{reference}{typeset(re.sub(r' {2,}', '   ', body.strip()))}</div>"
        )
    return '<div class="algorithm">\n' + "\n".join(shown) + "\n</div>"


def _reference(line: str) -> re.Match[str] | None:
    """The equation or line of the paper at the end of a line."""
    return re.search(r"\s{2,}(\((?:l\.|Eq|[A-Z][a-z]+ )[^()]*\))$", line)


def prose(docstring: str) -> str:
    """Markdown of a method's module docstring, without its first line."""
    blocks: list[str] = []
    lines = docstring.split("\n")[1:]
    while lines:
        line = lines.pop(0)
        if line.startswith("    "):
            block = [line]
            while lines and (lines[0].startswith("    ") or not lines[0].strip()):
                block.append(lines.pop(0))
            blocks += ["", algorithm(block), ""]
            continue
        title, found, rest = line.partition("Departures from the paper")
        if found and not title:
            blocks += ["", "## Departures from the paper", ""]
            line = re.sub(r"^s?:\s*", "", rest)
            line = line[:1].upper() + line[1:]
        if (
            line.startswith("- ")
            and blocks
            and blocks[-1]
            and not blocks[-1].startswith(("-", " "))
        ):
            blocks.append("")
        inside = "  " if line and not line.startswith("- ") and _in_a_list(blocks) else ""
        blocks.append(inside + typeset(line))
    return "\n".join(blocks)


def _in_a_list(blocks: list[str]) -> bool:
    return bool(blocks) and blocks[-1].startswith(("- ", "  "))


# Pages


@functools.cache
def methods() -> dict[str, list]:
    """The registered methods by file."""
    import pfljax.algorithms  # noqa: F401  (registers them)
    from pfljax.settings.method import METHODS

    found: dict[str, list] = {}
    for method in METHODS.values():
        found.setdefault(method.__module__.rpartition(".")[2], []).append(method)
    return found


def title_of(name: str) -> str:
    """A page's title: the names of the file's methods."""
    return ", ".join(method.info.title.split(" (")[0] for method in methods()[name])


def method_page(name: str) -> str:
    """The page of a file of methods: what its docstring says, its hyperparameters, how to call it, its code."""
    path = f"pfljax/algorithms/{name}.py"
    text = source_of(path)
    docstring = ast.get_docstring(ast.parse(text)) or ""
    parts = [
        f"# {title_of(name)}",
        "",
        typeset(docstring.split("\n")[0]),
        "",
        prose(docstring),
        "",
        "## Use",
        "",
    ]
    for method in methods()[name]:
        parts += usage(method)
    parts += [f'??? note "Source: {path}"', "", "    ```python"]
    return "\n".join([*parts, *(f"    {line}" for line in text.split("\n")), "    ```", ""])


def usage(method: type) -> list[str]:
    """How a method is called, what it keeps and sends, and its hyperparameters."""
    info, fields = method.info, dataclasses.fields(method)
    call = f"pfl.{method.__name__}()"
    lines = [f"### {info.title}", "", "```python", call, "```", "", "```bash"]
    lines += [f"pfljax train --method={info.name}", "```", ""]
    lines += [f"- A client keeps: {info.keeps}.", f"- What travels in a round: {info.travels}."]
    lines += ["- It needs validation examples."] if info.validates else []
    lines += [f"- It is told {info.knows}."] if info.knows else []
    if fields:
        flag = f"--{info.name}.{fields[0].name}"
        lines += ["", f"Hyperparameters; on the command line, the first is `{flag}`:", ""]
        lines += ["| hyperparameter | default | what it is |", "| --- | --- | --- |"]
    for field in fields:
        told = field.metadata.get("help", "").replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{field.default}` | {told} |")
    return [*lines, ""]


def example_page(path: Path) -> str:
    """The page of an example: its code."""
    title = path.stem.replace("_", " ").capitalize()
    return f"# {title}\n\n`examples/{path.name}`\n\n```python\n{path.read_text()}```\n"


def pages() -> dict[str, tuple[str, Callable[[], str], str]]:
    """Pages by the file of the repository that they show: (address, text, folder that the file's links start from)."""
    found: dict[str, tuple[str, Callable[[], str], str]] = {}
    for name in methods():
        make = functools.partial(method_page, name)
        found[f"pfljax/algorithms/{name}.py"] = (f"methods/{name}.md", make, "pfljax/algorithms")
    for path in sorted((ROOT / "examples").glob("*.py")):
        make = functools.partial(example_page, path)
        found[f"examples/{path.name}"] = (f"examples/{path.stem}.md", make, "examples")
    for name in ("CHANGELOG", "CONTRIBUTING", "BUILD_NOTES"):
        found[f"{name}.md"] = (f"{name.lower()}.md", functools.partial(source_of, f"{name}.md"), "")
    return found


def relink(text: str, folder: str, page: str) -> str:
    """The text of a page with its links to files of the repository turned into links to the site's pages.

    Args:
        text: Markdown.
        folder: The folder of the repository that its links start from.
        page: The page's own address in the site.
    """

    def replace(found: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(folder, found[1]))
        address = {"README.md": "index.md", "docs": "index.md"}.get(path)
        address = address or (PAGES[path][0] if path in PAGES else path.removeprefix("docs/"))
        if address == path:  # a file that the site does not show
            return found[0]
        return os.path.relpath(address, os.path.dirname(page) or ".") + found[2]

    return LINK.sub(replace, text)


PAGES = pages()


# What MkDocs calls


def on_config(config):
    """Adds the pages of the methods to the navigation."""
    entries = next(entry["Methods"] for entry in config["nav"] if "Methods" in entry)
    titles = {name: title_of(name) for name in methods()}
    entries += [
        {titles[name]: f"methods/{name}.md"}
        for name in sorted(titles, key=lambda name: titles[name].lower())
    ]
    project = next(entry["Project"] for entry in config["nav"] if "Project" in entry)
    examples = [address for address, *_ in PAGES.values() if address.startswith("examples/")]
    project.append(
        {
            "Examples": [
                {Path(address).stem.replace("_", " ").capitalize(): address} for address in examples
            ]
        }
    )
    return config


def on_files(files, config):
    """Adds the pages that are made of code."""
    for address, make, _ in PAGES.values():
        files.append(File.generated(config, address, content=make()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Mends the links of a page."""
    made = {address: folder for address, _, folder in PAGES.values()}
    address = page.file.src_uri
    return relink(markdown, made.get(address, os.path.dirname(f"docs/{address}")), address)


def on_post_page(output, page, config):
    """Searches with our own script, so that nothing is fetched when a page is read."""
    return output.replace(SHIM, get_relative_url("assets/search.js", page.url))


def on_post_template(output_content, template_name, config):
    """The same for pages without a source, such as 404.html, which stand at the root."""
    return output_content.replace(SHIM, "assets/search.js")
