"""Runs the notebook and stores its outputs in it, so that a preview shows figures and tables.

python -m experiments.notebook

The notebook runs in an empty folder, on the CPU, at the size that it chooses there. Needs `pip install -e '.[test]'`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "experiments" / "notebooks" / "colab_tpu.ipynb"
MOST = 1_000_000  # bytes


def executed(notebook: Any, folder: Path, **variables: str) -> Any:
    """Runs a notebook's cells in a folder, with environment variables, and returns it with its outputs."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "IPYTHONDIR": str(folder / ".ipython"),
    }
    client = NotebookClient(
        notebook, timeout=1800, record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment | variables)
    return notebook


def check_stored(notebook: Any) -> None:
    """Raises `ValueError` if stored outputs are large, or name folders of the machine on which they were made."""
    size = len(nbformat.writes(notebook).encode())
    if size > MOST:
        raise ValueError(f"the notebook has {size:,} bytes; accepted: at most {MOST:,}")
    for cell in notebook.cells:
        for name in (str(ROOT), str(Path.home()), tempfile.gettempdir()):
            if any(name in text for output in cell.get("outputs", ()) for text in texts(output)):
                raise ValueError(f"an output of the cell {cell.id} names {name}")


def texts(output: Any) -> list[str]:
    """The texts of an output, without those that encode pictures."""
    shown = [text for kind, text in output.get("data", {}).items() if not kind.startswith("image/")]
    return [*map(str, shown), str(output.get("text", ""))]


def main() -> None:
    """Runs the notebook and replaces its outputs."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        executed(notebook, Path(folder))
    notebook.metadata.language_info = {"name": "python"}
    # what is printed to stderr are warnings and progress on this machine
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    check_stored(notebook)
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK.relative_to(ROOT)}: {NOTEBOOK.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
