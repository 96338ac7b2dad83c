"""What a release needs: one version everywhere."""

import re
from pathlib import Path

import pfljax

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert cited and cited[1] == pfljax.__version__
    assert newest in ("Unreleased", pfljax.__version__)
