"""The table of methods in docs/methods.md, from the registry.

    python -m experiments.methods

writes the page anew. A test compares the page with the registry, so that it cannot go stale.
"""

from __future__ import annotations

from pathlib import Path

import pfljax.algorithms  # noqa: F401  (registers the methods)
from pfljax.algorithms import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
OPENING = f"""# Methods

All {len(METHODS)} methods, by the name that `--method` and `--methods` take. Each links to its algorithm, the
hyperparameters and the departures from its paper. Their accuracies side by side: [results](results/methods.md).
"""


def table() -> str:
    """The methods as a markdown table, one line each."""
    lines = [
        "| `--method` | method | a client keeps | what travels in a round |",
        "| --- | --- | --- | --- |",
    ]
    for name, method in METHODS.items():
        file = method.__module__.rpartition(".")[2]
        info = method.info
        link = f"[{info.title}](../pfljax/algorithms/{file}.py)"
        lines.append(f"| `{name}` | {link} | {info.keeps} | {info.travels} |")
    return "\n".join(lines)


def page() -> str:
    """The page."""
    return f"{OPENING}\n{table()}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
