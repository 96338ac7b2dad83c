"""Four CPU devices, so that every test can lay clients out over one, two or four; must run before JAX starts."""

import gc
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jaxtyping
import pytest

PACKAGE = Path(__file__).parents[1] / "pfljax"
# names the folder of compiled programs, in which each worker has a folder
COMPILED = "PFLJAX_TESTS_COMPILED"
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")

# Code is split and emitted in ways that cost more time to compile than small programs take to run.
FASTER_TO_COMPILE = (
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
)


def known_to_xla(flags: str) -> bool:
    """Whether this XLA has the flags; one that it does not know ends the process, so that another process asks."""
    ask = "from jaxlib import xla_client; xla_client.CompileOptions().executable_build_options.debug_options"
    asked = subprocess.run(
        [sys.executable, "-c", ask], env=os.environ | {"XLA_FLAGS": flags}, capture_output=True
    )
    return asked.returncode == 0


def start_jax() -> None:
    """Starts JAX with flags that only this process sees: commands that tests start compile as users' do."""
    given = os.environ.get("XLA_FLAGS")
    known = (
        FASTER_TO_COMPILE
        if known_to_xla(" ".join(FASTER_TO_COMPILE))
        else filter(known_to_xla, FASTER_TO_COMPILE)
    )
    os.environ["XLA_FLAGS"] = " ".join([given or "", *known])
    jax.local_devices()
    if given is None:
        del os.environ["XLA_FLAGS"]
    else:
        os.environ["XLA_FLAGS"] = given


def modules_with_shapes() -> list[str]:
    """The modules whose signatures tell shapes; they are checked as the tests call them."""
    files = [file for file in PACKAGE.rglob("*.py") if "from jaxtyping import" in file.read_text()]
    return [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]


MOST_BYTES = 6 << 30  # of a worker, above which it forgets programs between files


def pytest_runtest_teardown(item, nextitem):
    """Forgets compiled programs once they take too much memory; the folder of compiled programs still has them."""
    if nextitem is not None and nextitem.path != item.path and resident_bytes() > MOST_BYTES:
        jax.clear_caches()


def resident_bytes() -> int:
    """Memory that this process takes; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


gc.freeze()  # modules stay; visiting them in every collection takes a part of the suite's time
gc.set_threshold(50_000)
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 4)
# Devices of one CPU process share a thread pool: with several dispatches in flight their collectives can starve.
jax.config.update("jax_cpu_enable_async_dispatch", False)
# Most of the suite's time is compiling, often of what another test has compiled before.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # no lines of Python in compiled code
# the first process; its workers start with its environment and share the folder
if COMPILED not in os.environ:
    compiled = tempfile.TemporaryDirectory()
    os.environ[COMPILED] = compiled.name
# JAX writes a program in place, so no worker may read what another one writes.
jax.config.update("jax_compilation_cache_dir", str(Path(os.environ[COMPILED]) / WORKER))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
start_jax()

jaxtyping.install_import_hook(modules_with_shapes(), "typechecking.check")

# Fixtures; after JAX has its devices.
from runs import compile_once, whole  # noqa: E402, F401
from shared_runs import (  # noqa: E402
    digits_clients,  # noqa: F401
    finished_comparison,  # noqa: F401
    finished_run,  # noqa: F401
    run_of_arrays,  # noqa: F401
)

from pfljax.contract import speech  # noqa: E402
from pfljax.settings.method import METHODS  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """One worker plays the tests that compile and train the same; those outside the default suite are spread."""
    for item in items:
        if not any(map(item.get_closest_marker, ("xdist_group", "slow", "campaign", "long"))):
            item.add_marker(pytest.mark.xdist_group(group_of(item)))


def group_of(item) -> str:
    """The method that a test in tests/algorithms is about, whose programs its tests share; else the test's file."""
    if "algorithms" in item.path.parts:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        subjects = [getattr(value, "method", value) for value in values]
        subjects.append(item.path.stem.removeprefix("test_"))
        for subject in subjects:
            if isinstance(subject, str) and subject in METHODS:
                return subject
    return item.path.relative_to(PACKAGE.parent).as_posix()


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """A folder for what commands keep, one for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFLJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def registry():
    """Methods that a test registers are no methods of the tests after it."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.fixture
def said():
    """All lines that the library logs during a test."""
    lines: list[str] = []
    with speech.lines_to(lines.append, logging.DEBUG):
        yield lines
