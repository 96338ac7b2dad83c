"""The Colab notebook runs from its first cell to its last and shows what it promises."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from nbclient.exceptions import CellExecutionError

from experiments.notebook import NOTEBOOK, check_stored, executed

METHODS = ["local", "fedavg", "fedavg_plus", "federico_friends"]


def read():
    return nbformat.read(NOTEBOOK, as_version=4)


def source_of(name):
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
    assert [row["method"] for row in table(outputs["compare"])] == METHODS
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
    assert "experiments" not in text and "subprocess.run(command" in source_of("install")


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
    assert [row["method"] for row in rows] == METHODS
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


# As Colab publishes them: https://github.com/googlecolab/backend-info
COLAB = ("numpy==2.1.3", "jax==0.7.2", "flax==0.11.2")


def python_of_colab():
    """A Python 3.13 that starts; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path("~").expanduser() / ".pyenv"))
    candidates = ["python3.13", *sorted(pyenv.glob("versions/3.13*/bin/python3.13"))]
    for candidate in candidates:
        # a name on the path may be a shim of pyenv, which does not start
        if (
            shutil.which(candidate)
            and not subprocess.run([candidate, "-c", "import venv"]).returncode
        ):
            return candidate
    return None


@pytest.fixture(scope="module")
def colab(tmp_path_factory):
    """The folder of a kernel like Colab's: its Python and packages, and NumPy imported before the first cell."""
    newest = python_of_colab()
    if newest is None:
        pytest.skip("needs Python 3.13")
    folder = tmp_path_factory.mktemp("colab")
    subprocess.run([newest, "-m", "venv", folder / "venv"], check=True)
    python = str(folder / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "ipykernel", *COLAB]
    if subprocess.run(install).returncode:
        pytest.skip(f"pip cannot fetch {', '.join(COLAB)}")
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    argv.append("--IPKernelApp.exec_lines=import numpy")
    kernel = folder / "kernels" / "colab" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({"argv": argv, "display_name": "Colab", "language": "python"}))
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The address of a wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    subprocess.run([*build, NOTEBOOK.parents[2]], check=True)
    (path,) = folder.glob("pfljax-*.whl")
    return path.as_uri()


@pytest.mark.long
def test_it_runs_in_a_kernel_like_colab_s(execute, colab, wheel, monkeypatch):
    """pip replaces jax and flax, which are too old, but not the NumPy that the kernel has imported."""
    monkeypatch.setenv("JUPYTER_PATH", str(colab))
    notebook = read()
    notebook.metadata.kernelspec.name = "colab"
    cells = {cell.id: cell for cell in notebook.cells}
    cells["parameters"].source = cells["parameters"].source.replace(
        'SOURCE = ""', f"SOURCE = {wheel!r}"
    )
    versions = (
        "import jax, numpy, sys\nprint(sys.version_info[:2], numpy.__version__, jax.__file__)"
    )
    notebook.cells.append(nbformat.v4.new_code_cell(versions, id="versions"))
    outputs = execute(notebook, PYTHONPATH="")

    said = text(outputs["install"])
    assert re.search(r"^pfljax [\d.]+ with jax 0\.1[0-2]\.", said, re.M)
    assert re.search(r"^  jax 0\.1[\d.]+ replaces 0\.7\.2$", said, re.M)
    assert re.search(r"^  flax 0\.12[\d.]+ replaces 0\.11\.2$", said, re.M)
    assert "numpy" not in said
    assert text(outputs["versions"]).startswith(f"(3, 13) 2.1.3 {colab}")
    assert [row["method"] for row in table(outputs["compare"])] == METHODS
    assert len(of_kind(outputs["scaling-figure"], "image/png")) == 1


class Environment:
    """Installed packages that a fake pip replaces, and the kernel's imported modules."""

    def __init__(self, installed, fetched=(), imported=(), refused=()):
        self.installed = dict(installed)
        self.fetched = dict(fetched)  # what pip installs
        self.imported = imported  # names of modules
        self.refused = refused  # requirements that pip cannot satisfy
        self.commands = []  # the requirements of each call of pip

    def distributions(self):
        return [SimpleNamespace(name=name, version=v) for name, v in self.installed.items()]

    def files(self, package):
        return [SimpleNamespace(locate=lambda: Path(f"/packages/{package}/__init__.py"))]

    def pip(self, command, check=False):
        assert command[:4] == [sys.executable, "-m", "pip", "install"]
        quiet, strategy, *requirements = command[4:]
        assert (quiet, strategy) == ("--quiet", "--upgrade-strategy=only-if-needed")
        self.commands.append(requirements)
        if {*requirements} & {*self.refused}:
            assert not check
            return SimpleNamespace(returncode=1)
        self.installed.update(self.fetched, pfljax="0.1")
        return SimpleNamespace(returncode=0)

    def install(self, source=""):
        """Runs the install cell."""
        code = source_of("install")
        modules = {
            name: SimpleNamespace(__file__=f"/packages/{name}/__init__.py")
            for name in self.imported
        }
        fakes = {
            "importlib": SimpleNamespace(invalidate_caches=lambda: None),
            "metadata": SimpleNamespace(distributions=self.distributions, files=self.files),
            "subprocess": SimpleNamespace(run=self.pip),
            "sys": SimpleNamespace(executable=sys.executable, modules=modules),
            "Path": Path,
            "SOURCE": source,
        }
        exec(code[code.index("def versions") :], fakes)  # its imports are replaced
        return self.commands


@pytest.mark.parametrize(
    ("installed", "fetched", "commands"),
    [
        ({"jax": "2", "libtpu": "1"}, {}, [["name"]]),  # the runtime's jax fits
        ({"jax": "1", "libtpu": "1"}, {"jax": "2"}, [["name"], ["jax[tpu]==2"]]),
        ({"jax": "1", "jax-cuda12-plugin": "1"}, {"jax": "2"}, [["name"], ["jax[cuda12]==2"]]),
        ({"jax": "1", "jax_cuda13_plugin": "1"}, {"jax": "2"}, [["name"], ["jax[cuda13]==2"]]),
        ({}, {"jax": "2"}, [["name"]]),
    ],
)
def test_installing_leaves_the_accelerator_its_jax(installed, fetched, commands, capsys):
    assert Environment(installed, fetched).install("name") == commands
    replaced = "  jax 2 replaces 1\n" if len(commands) == 2 else ""
    assert capsys.readouterr().out == f"pfljax 0.1 with jax 2\n{replaced}"


def test_numpy_stays_as_it_was_imported(capsys):
    """Also when the accelerator's plugin is replaced."""
    installed = {"numpy": "2.1.3", "jax": "1", "libtpu": "1"}
    environment = Environment(installed, {"jax": "2"}, imported=["numpy"])
    kept = "numpy==2.1.3"
    assert environment.install("name") == [["name", kept], ["jax[tpu]==2", kept]]
    assert Environment(installed, {"jax": "2"}).install("name") == [["name"], ["jax[tpu]==2"]]


def test_a_replaced_package_that_was_imported_needs_a_restart(capsys):
    """If pip cannot keep NumPy, or replaces another package; what was not imported needs none."""
    old = {"numpy": "1.26.4", "jax": "1", "Rich": "13"}
    new = {"numpy": "2.5", "jax": "2", "Rich": "14"}
    restart = r"restart the runtime .* then run all cells again: {} had been imported"
    environment = Environment(old, new, ["numpy"], refused=["numpy==1.26.4"])
    with pytest.raises(RuntimeError, match=restart.format("numpy")):
        environment.install("name")
    assert environment.commands == [["name", "numpy==1.26.4"], ["name"]]
    assert "numpy 2.5 replaces 1.26.4" in capsys.readouterr().out
    environment.imported = []
    assert environment.install("name") == environment.commands  # after it: nothing is installed
    assert "nothing is installed" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=restart.format("rich")):
        Environment(old, new | {"numpy": "1.26.4"}, ["numpy", "rich"]).install("name")


def test_what_is_installed(tmp_path, monkeypatch):
    """What SOURCE names; else the newest wheel in the folder, else the checkout around it, else a line that says so."""

    def install(source="", installed=()):
        commands = Environment({"jax": "1", **dict(installed)}).install(source)
        return commands[0][0] if commands else None

    folder = tmp_path / "checkout" / "experiments" / "notebooks"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with pytest.raises(
        ValueError,
        match=r"SOURCE: empty, .*; accepted: a wheel or its address, a checkout's folder, a git address",
    ):
        install()
    assert install(installed={"pfljax": "0.1"}) is None
    (tmp_path / "checkout" / "pfljax").mkdir()
    for name in ("pyproject.toml", "pfljax/__init__.py"):
        (tmp_path / "checkout" / name).touch()
    assert install() == str(tmp_path / "checkout")
    for number in (1, 2):
        (folder / f"pfljax-0.{number}.0-py3-none-any.whl").touch()
    assert install() == str(folder / "pfljax-0.2.0-py3-none-any.whl")
    assert install("pfljax-0.1.0-py3-none-any.whl") == str(folder / "pfljax-0.1.0-py3-none-any.whl")
    for address in ("https://host/name", "git+https://host/name"):
        assert install(address) == "git+https://host/name"
    for other in (
        "pfljax",
        "https://host/pfljax-0.1.0-py3-none-any.whl",
        "https://host/pfljax-0.1.0-py3-none-any.whl?token=a#sha256=b",
    ):
        assert install(other) == other
