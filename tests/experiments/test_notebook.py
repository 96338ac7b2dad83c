"""The Colab notebook runs from its first cell to its last, shows what it promises, and fails with one clear line."""

import os
import re
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
    """The displayed data of a MIME type."""
    return [output.data[kind] for output in outputs if output.output_type == "display_data" and kind in output.data]


def text(outputs):
    return "".join(output.text for output in outputs if output.output_type == "stream")


def table(outputs):
    """The rows of the only table."""
    (lines,) = of_kind(outputs, "text/markdown")
    heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.strip().splitlines()]
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


def test_its_process_never_opens_a_device():
    for cell in read().cells:
        if cell.cell_type == "code" and cell.id != "devices":  # which asks in a process of its own
            assert not re.search(r"^\s*(import|from) (jax|pfljax|experiments)\b", cell.source, re.M), cell.id


def test_there_is_a_kernel():
    assert "ipykernel_launcher" in KernelSpecManager().get_kernel_spec("python3").argv


def test_it_runs_and_shows_what_it_promises(execute):
    outputs = execute(read())
    assert not [name for name, of_cell in outputs.items() for output in of_cell if output.output_type == "error"]

    assert "nothing is installed" in text(outputs["install"])
    assert re.match(r"\d+ x cpu \(cpu\); jax \d", text(outputs["devices"]))
    assert "small: clients 8, rounds 10" in text(outputs["sizes"])

    assert "federico on digits, label_groups: 8 clients, 10 rounds" in text(outputs["train"])
    assert "collaboration_matrix.png" in text(outputs["figures"])
    assert len(of_kind(outputs["figures"], "image/png")) == 3
    last, best = table(outputs["result"])
    assert last["round"] == "10" and 40 < float(last["accuracy, %"]) < 100 and best["federico"] == "best"

    rows = table(outputs["comparison"])
    assert [row["method"] for row in rows] == ["local", "fedavg", "fedavg_plus", "federico"]
    assert all(0 < float(row["test accuracy, %"].split()[0]) < 100 for row in rows)
    assert len(of_kind(outputs["comparison"], "image/png")) == 1

    assert {row["num clients"] for row in table(outputs["scaling-figures"])} == {"4", "8"}
    assert of_kind(outputs["scaling-figures"], "image/png")

    for name in ("summary.json", "report.html", "table.md", "scaling.csv"):
        assert name in text(outputs["files"])


@pytest.mark.parametrize(
    ("last", "variables", "message"),
    [
        ('command("experiments.train", "--round=3")', {}, "experiments.train: exit code 2: error: .*'round'.*"),
        (source("devices"), {"JAX_PLATFORMS": "abacus"}, "finding the devices: exit code 1: RuntimeError: .*abacus.*"),
        (
            'found = {"platform": "cpu"}\n' + source("sizes"),
            {"PFLJAX_NOTEBOOK": "huge"},
            "SIZE=huge: accepted: auto, .*",
        ),
    ],
    ids=["flag", "device", "size"],
)
def test_what_fails_ends_the_notebook_with_one_line(execute, last, variables, message):
    notebook = only(read(), "parameters", "helpers")
    notebook.cells += [nbformat.v4.new_code_cell(last), nbformat.v4.new_code_cell("print('went on')")]
    with pytest.raises(CellExecutionError):
        execute(notebook, **variables)
    failed, after = notebook.cells[-2:]
    (error,) = [output for output in failed.outputs if output.output_type == "error"]
    assert len(error.traceback) == 1 and re.fullmatch(message, error.traceback[0]), error.traceback
    assert "\nerror: " not in text(failed.outputs) and not after.outputs


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

    def python(*arguments, name):
        assert arguments[:3] == ("-m", "pip", "install") and "--upgrade-strategy=only-if-needed" in arguments
        run.append(arguments[-1])
        versions.update(after, pfljax="0.1")

    fakes = {
        "importlib": SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None), invalidate_caches=lambda: None),
        "metadata": SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError),
        "python": python,
    }
    exec(source("install"), fakes | {"REPOSITORY": "address"})
    assert run == commands
    with pytest.raises(ValueError, match="REPOSITORY: empty"):
        exec(source("install"), fakes | {"REPOSITORY": "", "Failure": ValueError})
