"""The Colab notebook runs from its first cell to its last and shows what it promises."""

import os
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "experiments" / "notebooks" / "colab_tpu.ipynb"


def read():
    return nbformat.read(NOTEBOOK, as_version=4)


def source(name):
    """The code of the cell of this id."""
    return next(cell.source for cell in read().cells if cell.id == name)


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """Executes a notebook in a new folder, on CPU at small sizes: (notebook, variables) -> its outputs by cell id."""
    cache = tmp_path_factory.mktemp("cache")

    def execute(notebook, **variables):
        folder = tmp_path_factory.mktemp("notebook")
        environment = {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "PFLJAX_CACHE": str(cache),
            "PFLJAX_NOTEBOOK": "small",
            "IPYTHONDIR": str(folder / "ipython"),
        }
        client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
        client.execute(env=os.environ | environment | variables)
        return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}

    return execute


def only(notebook, *names):
    """The notebook with only the cells of these ids."""
    cells = {cell.id: cell for cell in notebook.cells}
    notebook.cells = [cells[name] for name in names]
    return notebook


def of_kind(outputs, kind):
    """The shown data of a MIME type."""
    return [output.data[kind] for output in outputs if kind in getattr(output, "data", {})]


def text(outputs):
    return "".join(output.text for output in outputs if output.output_type == "stream")


def table(outputs):
    """The rows of the only table."""
    (shown,) = of_kind(outputs, "text/markdown")
    heads, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines() if "|" in line
    ]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_the_committed_file_is_clean():
    notebook = read()
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.accelerator == "TPU" and notebook.metadata.kernelspec.name == "python3"
    before = None
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id
            assert before == "markdown", f"{cell.id}: not explained"
        before = cell.cell_type


def test_it_is_written_with_the_python_api():
    text = "\n".join(cell.source for cell in read().cells if cell.cell_type == "code")
    assert "import pfljax as pfl" in text and "pfl.Run(" in text and "pfl.compare(" in text
    assert "experiments" not in text and "subprocess.run(command" in source("install")


def test_there_is_a_kernel():
    assert "ipykernel_launcher" in KernelSpecManager().get_kernel_spec("python3").argv


@pytest.mark.slow
def test_it_runs_and_shows_what_it_promises(execute):
    outputs = execute(read())
    assert not [name for name, of_cell in outputs.items() for output in of_cell if output.output_type == "error"]

    assert "nothing is installed" in text(outputs["install"])
    assert re.match(r"\d+ x cpu \(cpu\)\njax \d", text(outputs["devices"]))
    assert "small: clients 8, rounds 10" in text(outputs["sizes"])

    assert "per-client state" in text(outputs["train"])  # the plan
    (shown,) = of_kind(outputs["train"], "text/plain")[-1:]
    accuracy = float(re.search(r"round 10: accuracy (0\.\d+)", shown)[1])
    assert 0.4 < accuracy < 1
    for name in ("collaboration", "weights", "accuracy", "comparison", "scaling-figure"):
        assert len(of_kind(outputs[name], "image/png")) == 1, name
    assert f"accuracy {100 * accuracy:.1f} %" in text(outputs["result"])
    assert all(0 <= float(found) <= 1 for found in re.findall(r"probability ([\d.]+)", text(outputs["result"])))

    rows = table(outputs["compare"])
    assert [row["method"] for row in rows] == ["local", "fedavg", "fedavg_plus", "federico"]
    assert all(0 < float(row["test accuracy, %"].split()[0]) < 100 for row in rows)
    sent = [float(found) for found in re.findall(r"([\d.]+) KiB sent", text(outputs["adapters"]))]
    assert len(sent) == 2 and sent[1] < sent[0] / 2
    assert re.findall(r"^(\d+) clients: [\d.]+ s a round", text(outputs["scaling"]), re.M) == ["4", "8"]

    for name in ("summary.json", "report.html", "table.md", "results.npz"):
        assert name in text(outputs["files"])


def test_a_wrong_size_says_what_is_accepted(execute):
    notebook = only(read(), "parameters", "sizes")
    notebook.cells.insert(1, nbformat.v4.new_code_cell("import os\nfrom types import SimpleNamespace as Space"))
    notebook.cells.insert(2, nbformat.v4.new_code_cell("device = Space(platform='cpu')"))
    with pytest.raises(CellExecutionError, match="SIZE=huge: accepted: auto, small"):
        execute(notebook, PFLJAX_NOTEBOOK="huge")


@pytest.mark.parametrize(
    ("before", "after", "commands"),
    [
        ({"jax": "2", "libtpu": "1"}, {}, ["git+address"]),  # the runtime's jax fits
        ({"jax": "1", "libtpu": "1"}, {"jax": "2"}, ["git+address", "jax[tpu]==2"]),
        ({"jax": "1", "jax-cuda12-plugin": "1"}, {"jax": "2"}, ["git+address", "jax[cuda12]==2"]),
        ({}, {"jax": "2"}, ["git+address"]),
    ],
)
def test_installing_leaves_the_accelerator_its_jax(before, after, commands):
    versions, run = dict(before), []

    def version(package):
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    def pip(command, check):
        assert command[:4] == [sys.executable, "-m", "pip", "install"] and check
        assert "--upgrade-strategy=only-if-needed" in command
        run.append(command[-1])
        versions.update(after, pfljax="0.1")

    code = source("install")
    modules = code[code.index("def version") :]  # its imports are replaced
    fakes = {
        "importlib": SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None), invalidate_caches=lambda: None),
        "metadata": SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError),
        "subprocess": SimpleNamespace(run=pip),
        "sys": sys,
    }
    exec(modules, fakes | {"REPOSITORY": "address"})
    assert run == commands
    with pytest.raises(ValueError, match="REPOSITORY: empty"):
        exec(modules, fakes | {"REPOSITORY": ""})
