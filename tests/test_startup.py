"""Importing the package, its public names, and what a script's second start compiles."""

import ast
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import pfljax as pfl
from pfljax.contract import compile_cache

ROOT = Path(__file__).parents[1]
MODULES = (
    "adapters",
    "author",
    "author.tree",
    "data",
    "methods",
    "metrics",
    "models",
    "models.weights",
    "partitions",
    "trackers",
)
# What version 0.2 had at the top, besides the methods.
FORMER = """
METHODS Aggregate Algorithm ArgumentError Attack ClientContext ClientData ClientOutput ClientPrivacy Clock Cohort
Collaboration Compression Evaluation Execution Faults Federation First Ledger LocalTraining MLflow Mixture Model
Networks Pair Personal Prediction Privacy Problem Report Result Run RunError Server Simulation Slope Solver Start State
Table TensorBoard Told Topology Traffic Trained Tuning Upload WandB adapters compare data estimate knob load
method metric models partitions patience train_replicates tree tune weights
"""

TRAINED_TWICE = """
import jax, jax.monitoring
import numpy as np
import pfljax as pfl

compiled = []

def count(event, **details):
    if event.endswith("/cache_misses"):
        compiled.append(event)

jax.monitoring.register_event_listener(count)
x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
clients = pfl.Federation.from_arrays(x, np.arange(40) % 2, client=np.arange(40) // 10)
for method in (pfl.FedAvg(), pfl.Ditto()):
    run = pfl.Run(method, clients, pfl.models.MLP((4,)), metrics=["f1"])
    run.train(3, eval_every=2, progress=False)
print(len(compiled), jax.config.jax_compilation_cache_dir)
"""


def run(code, *options, **environment):
    """What a new process prints; JAX has the number of devices that it takes by default."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=ROOT,
        env=outer | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()


def resolve(path):
    value = pfl
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_importing_changes_nothing_and_loads_nothing_slow():
    code = """
import sys
import jax
before = dict(jax.config.values)
import pfljax as pfl
from jax.extend import backend
assert dict(jax.config.values) == before
print(*{name.partition(".")[0] for name in sys.modules})
jax.config.update("jax_num_cpu_devices", 3)  # refused once JAX has started
pfl.Run, pfl.author, pfl.methods, pfl.metrics, pfl.trackers
assert "scipy" not in sys.modules
print(jax.device_count())
"""
    *loaded, num_devices = run(code)
    slow = {"scipy", "sklearn", "matplotlib", "plotly", "networkx", "pandas", "optax", "flax"}
    assert not slow & set(loaded)
    assert num_devices == "3"


def test_public_modules_show_public_names_only():
    assert len(pfl.__all__) <= 60
    for path in MODULES:
        module = resolve(path)
        shown = [name for name in dir(module) if not name.startswith("__")]
        assert shown == sorted(module.__all__), path
        assert all(hasattr(module, name) for name in shown), path
    assert {*pfl.__all__, "__version__"} <= set(dir(pfl))
    assert [name for name in pfl.__all__ if not hasattr(pfl, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'FedNothing'"):
        resolve("FedNothing")


def test_type_checkers_see_the_names_that_are_imported_late():
    tree = ast.parse(Path(pfl.__file__).read_text())
    seen = [
        alias.asname
        for node in tree.body
        if isinstance(node, ast.If)
        for statement in node.body
        for alias in statement.names
    ]
    assert sorted(seen) == sorted(pfl.__all__)


def test_former_names_say_the_new_ones():
    for name in [*FORMER.split(), *pfl.methods.__all__]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = getattr(pfl, name)
        if name in pfl.__all__:
            assert not caught, name
            continue
        (warning,) = caught
        former, _, new = str(warning.message).partition(" is now ")
        assert warning.category is FutureWarning and former == f"pfljax.{name}"
        assert resolve(new.removeprefix("pfljax.")) is value


def test_methods_are_registered_before_those_of_an_author():
    assert pfl.methods.METHODS["fedah"] is pfl.methods.FedAH
    with pytest.raises(pfl.ArgumentError, match="name"):
        pfl.author.method(type("FedAH", (), {"__doc__": "Taken.", "build": None}))


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    first, folder = run(TRAINED_TWICE, PFLJAX_CACHE=str(tmp_path))
    assert int(first) > 5 and Path(folder).is_relative_to(tmp_path)
    assert run(TRAINED_TWICE, PFLJAX_CACHE=str(tmp_path)) == ["0", folder]

    # Files that another process has not written to the end, and folders that cannot be written.
    for file in Path(folder).iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert run(TRAINED_TWICE, "-W", "error", PFLJAX_CACHE=str(tmp_path))[1] == folder
    (tmp_path / "file").touch()
    assert run(TRAINED_TWICE, "-W", "error", PFLJAX_CACHE=str(tmp_path / "file"))[1] == "None"


@pytest.mark.slow
def test_the_cache_is_the_users_choice(tmp_path):
    home = tmp_path / "home"
    assert run(TRAINED_TWICE, PFLJAX_CACHE="", HOME=str(home)) == ["0", "None"]
    assert not home.exists()
    own = str(tmp_path / "own")
    environment = {"JAX_COMPILATION_CACHE_DIR": own, "HOME": str(home)}
    assert run(TRAINED_TWICE, PFLJAX_CACHE=str(tmp_path), **environment)[1] == own


def test_the_folder_of_compiled_programs_stays_small(tmp_path):
    for age, name in enumerate("dcba"):
        file = tmp_path / name
        file.write_bytes(bytes(10))
        os.utime(file, (100 - age, 100 - age))  # a is the oldest
    compile_cache.trim(tmp_path, 40)
    assert len(list(tmp_path.iterdir())) == 4
    compile_cache.trim(tmp_path, 39)  # down to 19 bytes: one file
    assert [file.name for file in tmp_path.iterdir()] == ["d"]
    compile_cache.trim(tmp_path / "absent", 1)
