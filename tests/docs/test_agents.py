"""What programs and agents read first: AGENTS.md and llms.txt are short, and their commands and links are right."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from pfljax.cli.launch import named
from pfljax.cli.settings import parse

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "AGENTS.md", ROOT / "docs" / "llms.txt", ROOT / "docs" / "howto" / "programs.md"]
COMMAND = re.compile(r"`pfljax ((?:[a-z]+)(?: [^`]*)?)`")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_between_the_lines_are_right(path):
    """Every flag is known and has an accepted value."""
    commands = COMMAND.findall(path.read_text())
    assert len(commands) >= 1
    for text in commands:
        name, *words = shlex.split(text)
        words = [word for word in words if word not in ("NAME...", "--help")]
        words = [word for word in words if "FILE.py" not in word]
        made = importlib.import_module(f"pfljax.cli.{name}").COMMAND
        assert parse(made.define, named(words, made.listed) if made.listed else words)


def test_llms_txt_has_the_form_of_its_convention_and_links_to_pages_of_the_site():
    """A title, a summary in a quotation, and sections of links; https://llmstxt.org."""
    text = (ROOT / "docs" / "llms.txt").read_text()
    lines = text.splitlines()
    assert lines[0].startswith("# ") and lines[2].startswith("> ")
    sections = text.split("\n## ")[1:]
    assert [section.split("\n")[0] for section in sections][-1] == "Optional"
    for section in sections:
        for line in section.strip().splitlines()[2:]:
            link = re.fullmatch(r"- \[[^\]]+\]\(([^)]+)\): .+", line)
            assert link, line
            page = (ROOT / "docs" / link[1]).with_suffix(".md")
            assert link[1].endswith(".html") and page.exists(), line


def test_they_fit_on_a_screen():
    for path in FILES[:2]:
        assert len(path.read_text().splitlines()) <= 50
