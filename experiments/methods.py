"""README's table of methods, from the registry.

    python -m experiments.methods

A test compares README with it, so that the table cannot go stale.
"""

from __future__ import annotations

from pfljax import algorithms


def table() -> str:
    """The methods, a line each, in markdown."""
    lines = [
        "| `--algorithm` | method | file | a client keeps | what travels in a round |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, method in algorithms.METHODS.items():
        file = method.make.__module__.rpartition(".")[2]
        link = f"[{file}](pfljax/algorithms/{file}.py)"
        lines.append(f"| `{name}` | {method.title} | {link} | {method.keeps} | {method.travels} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
