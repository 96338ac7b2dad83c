"""The Colab notebook runs from its first cell to its last and shows what it promises."""

import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from nbclient.exceptions import CellExecutionError

from experiments.notebook import NOTEBOOK, check_stored, executed


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
        executed(
            notebook,
            folder,
            **({"PFLJAX_CACHE": str(cache), "PFLJAX_NOTEBOOK": "small"} | variables),
        )
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
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in shown.splitlines()
        if "|" in line
    ]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_the_committed_file_is_whole():
    """Its outputs are those of a run of all cells in their order, small, and without folders of a machine."""
    notebook = read()
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.accelerator == "TPU" and notebook.metadata.kernelspec.name == "python3"
    before = None
    counts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            counts.append(cell.execution_count)
            assert before == "markdown", f"{cell.id}: not explained"
            assert not [output for output in cell.outputs if output.output_type == "error"], cell.id
        before = cell.cell_type
    assert counts == [*range(1, len(counts) + 1)]
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    for name in ("collaboration", "weights", "accuracy", "comparison", "scaling-figure"):
        assert len(of_kind(outputs[name], "image/png")) == 1, name
    assert [row["method"] for row in table(outputs["compare"])] == [
        "local",
        "fedavg",
        "fedavg_plus",
        "federico",  # as FedeRiCoFriends was called when the outputs were stored
    ]
    check_stored(notebook)


def test_outputs_that_are_large_or_name_a_folder_are_not_stored():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[])])
    check_stored(notebook)
    home = str(Path.home() / "runs")
    for text, said in (
        ("x" * 1_000_001, "bytes; accepted: at most"),
        (home, "an output of the cell .* names"),
    ):
        notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text=text)]
        with pytest.raises(ValueError, match=said):
            check_stored(notebook)


def test_it_is_written_with_the_python_api():
    text = "\n".join(cell.source for cell in read().cells if cell.cell_type == "code")
    assert "import pfljax as pfl" in text and "pfl.Run(" in text and "pfl.compare(" in text
    assert "experiments" not in text and "subprocess.run(command" in source("install")


def test_there_is_a_kernel():
    assert "ipykernel_launcher" in KernelSpecManager().get_kernel_spec("python3").argv


@pytest.mark.long
def test_it_runs_and_shows_what_it_promises(execute):
    outputs = execute(read())
    assert not [
        name
        for name, of_cell in outputs.items()
        for output in of_cell
        if output.output_type == "error"
    ]

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
    assert all(
        0 <= float(found) <= 1
        for found in re.findall(r"probability ([\d.]+)", text(outputs["result"]))
    )

    rows = table(outputs["compare"])
    names = ["local", "fedavg", "fedavg_plus", "federico_friends"]
    assert [row["method"] for row in rows] == names
    assert all(0 < float(row["test accuracy, %"].split()[0]) < 100 for row in rows)
    sent = [float(found) for found in re.findall(r"([\d.]+) KiB sent", text(outputs["adapters"]))]
    assert len(sent) == 2 and sent[1] < sent[0] / 2
    assert re.findall(r"^(\d+) clients: [\d.]+ s a round", text(outputs["scaling"]), re.M) == [
        "4",
        "8",
    ]

    for name in ("summary.json", "report.html", "table.md", "results.npz"):
        assert name in text(outputs["files"])


def test_a_wrong_size_says_what_is_accepted(execute):
    notebook = only(read(), "parameters", "sizes")
    notebook.cells.insert(
        1, nbformat.v4.new_code_cell("import os\nfrom types import SimpleNamespace as Space")
    )
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
    versions = dict(before)
    run = []

    def version(package):
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    def pip(command, check):
        assert command[:4] == [sys.executable, "-m", "pip", "install"] and check
        assert "--upgrade-strategy=only-if-needed" in command
        run.append(command[-1])
        versions.update(after, pfljax="0.1")

    run_install(SOURCE="address", version=version, run=pip)
    assert run == commands


def run_install(SOURCE, version, run, present=()):
    """Runs the install cell with other versions, another pip, and only the modules that are present."""
    code = source("install")

    def find(name):
        return name in present or None

    fakes = {
        "importlib": SimpleNamespace(
            util=SimpleNamespace(find_spec=find), invalidate_caches=lambda: None
        ),
        "metadata": SimpleNamespace(
            version=version, PackageNotFoundError=metadata.PackageNotFoundError
        ),
        "subprocess": SimpleNamespace(run=run),
        "sys": sys,
        "Path": Path,
        "SOURCE": SOURCE,
    }
    exec(code[code.index("def version") :], fakes)  # its imports are replaced


def test_what_is_installed(tmp_path, monkeypatch):
    """What SOURCE names; else the newest wheel in the folder, else the checkout around it, else a line that says so."""
    installed = []

    def install(source="", present=()):
        run_install(
            source,
            lambda package: "1",
            lambda command, check: installed.append(command[-1]),
            present,
        )
        return installed.pop() if installed else None

    folder = tmp_path / "checkout" / "experiments" / "notebooks"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with pytest.raises(
        ValueError,
        match=r"SOURCE: empty, .*; accepted: a wheel, a checkout's folder, a git address",
    ):
        install()
    assert install(present=["pfljax", "flax", "optax"]) is None
    (tmp_path / "checkout" / "pfljax").mkdir()
    for name in ("pyproject.toml", "pfljax/__init__.py"):
        (tmp_path / "checkout" / name).touch()
    assert install() == str(tmp_path / "checkout")
    for number in (1, 2):
        (folder / f"pfljax-0.{number}.0-py3-none-any.whl").touch()
    assert install() == str(folder / "pfljax-0.2.0-py3-none-any.whl")
    assert install("pfljax-0.1.0-py3-none-any.whl") == str(folder / "pfljax-0.1.0-py3-none-any.whl")
    assert (
        install("https://host/name") == install("git+https://host/name") == "git+https://host/name"
    )
