"""README's table of methods, from the registry.

    python -m experiments.methods

A test compares README with it, so that the table cannot go stale.
"""

from __future__ import annotations

import pfljax.algorithms  # noqa: F401  (registers the methods)
from pfljax.core.method import METHODS


def table() -> str:
    """The methods as a markdown table, one line each."""
    lines = [
        "| `--algorithm` | method | file | a client keeps | what travels in a round |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, method in METHODS.items():
        file, info = method.__module__.rpartition(".")[2], method.info
        link = f"[{file}](pfljax/algorithms/{file}.py)"
        lines.append(f"| `{name}` | {info.title} | {link} | {info.keeps} | {info.travels} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
