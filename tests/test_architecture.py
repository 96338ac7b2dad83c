"""The house rules: imports run one way, mapping is in one place, and nothing in the package reads flags."""

import ast
from pathlib import Path

import pytest

from pfljax.algorithms import METHODS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pfljax"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
FLOORS = [
    {"types"},
    {"tree", "processes", "schedules"},
    {"stores", "views"},
    {"mapping", "models", "data"},
    {"privacy"},
    {"solvers", "neighbors", "evaluation", "aggregation", "graphs", "branches"},
    {"surrogates", "global_model", "embedding", "fine_tuning"},
    {"algorithms"},
    {"training", "report"},
]
SAME_FLOOR = {("evaluation", "solvers"), ("report", "training")}  # and not the other way round
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}


def imports(path):
    """Full names of the modules, and of what is taken from them."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def names(path):
    """Dotted names that are used as attributes or on their own."""
    return {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
    }


def relative(path):
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_run_one_way(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        assert not [name for name in imports(path) if name.startswith("pfljax")]
        return
    part = parts[0]
    assert part in FLOOR, f"{part} has no floor"
    for name in imports(path):
        top, *rest = name.split(".")
        assert top not in ("experiments", "absl"), name
        if top != "pfljax":
            continue
        other = rest[0]
        assert other in FLOOR and FLOOR[other] <= FLOOR[part], name
        if FLOOR[other] == FLOOR[part] and other != part:
            assert (part, other) in SAME_FLOOR, f"{name}: a neighbor on the same floor"


@pytest.mark.parametrize("path", sorted((PACKAGE / "algorithms").glob("[!_]*.py")), ids=relative)
def test_methods_do_not_import_each_other(path):
    assert not [name for name in imports(path) if name.startswith("pfljax.algorithms")]
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_mapping_says_how_clients_are_laid_out(path):
    mapped = {"jax.vmap", "jax.lax.map", "lax.map", "jax.shard_map", "jax.pmap", "shard_map", "vmap", "pmap"}
    used = names(path) & mapped
    assert not used or relative(path) == "mapping.py", used
    assert not [name for name in imports(path) if name.split(".")[-1] in ("vmap", "pmap", "shard_map")]


def test_no_method_is_known_by_name_outside_the_registry():
    methods = set(METHODS)
    for path in FILES:
        if relative(path) == "algorithms/__init__.py":
            continue
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not strings & methods, path


def test_the_rules_see_what_they_forbid(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import jax\nfrom absl import flags\nfrom jax import vmap\ny = jax.lax.map(vmap, 1)\n")
    assert "absl.flags" in imports(bad) and "jax.vmap" in imports(bad)
    assert {"jax.lax.map", "vmap"} <= names(bad)
