"""The house rules: imports go down only, mapping is in one room, and nothing below the command line knows its flags."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

from pfljax.algorithms import METHODS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pfljax"
FILES = sorted(PACKAGE.rglob("*.py"))
METHOD_FILES = sorted((PACKAGE / "algorithms").glob("[!_]*.py"))
ROOMS = ["contract", "settings", "models", "exchange", "local", "data", "evaluation", "algorithms"]
ROOMS += [
    "stages",
    "run",
    "stores",
    "folder",
    "training",
    "planner",
    "flower",
    "report",
    "api",
    "cli",
]
HEAVY = {
    "sklearn",
    "matplotlib",
    "tensorflow_datasets",
    "tensorflow",
    "networkx",
    "scipy.sparse",
    "orbax",
}
HEAVY |= {
    "cvxpy",
    "jax_privacy",
    "pandas",
    "IPython",
    "jinja2",
    "flax.nnx",
    "pyarrow",
    "h5py",
    "PIL",
    "datasets",
}
# Words that say little as names; see `vague_names`.
VAGUE = {
    "found",
    "each",
    "told",
    "said",
    "kept",
    "held",
    "made",
    "given",
    "beside",
    "apart",
    "whom",
    "kinds",
    "dealt",
    "places",
}
FLAG = re.compile(r"(?<![\w-])--[a-z]")


def relative(path):
    return path.relative_to(PACKAGE).as_posix()


def room(path):
    """The room that a file is in; the package's own names are above all."""
    return path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else None


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


def imports(path):
    """Full names of the modules, and of what is taken from them."""
    found = []
    for node in ast.walk(tree(path)):
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
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute | ast.Name)
    }


def strings(path):
    """String constants, docstrings among them."""
    return [
        node.value
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def found(rule, files=FILES):
    """What a rule finds against files, by file."""
    return {relative(path): wrong for path in files if (wrong := rule(path))}


def climbs(path, own):
    """Imports of rooms above `own`, of what is in no room, of experiments, and of absl outside of the command line."""
    wrong = []
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "pfljax" and own:
            bad = rest[0] not in ROOMS or ROOMS.index(rest[0]) > ROOMS.index(own)
        else:
            bad = top == "experiments" or (top == "absl" and own != "cli")
        wrong += [name] * bad
    return wrong


def several_at_once(path):
    """Assignments of a tuple to a tuple; a tuple on the left unpacks one value only."""
    return [
        f"line {node.lineno}: {ast.unparse(node)[:80]}"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    ]


def splatted(path):
    """Calls that get a dictionary of arguments, in which no reader and no type checker sees what is passed."""
    return [
        f"line {node.lineno}: {ast.unparse(node)[:80]}"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and any(word.arg is None for word in node.keywords)
    ]


def defined_names(path):
    """Names that a file defines: variables, arguments, functions, classes, attributes and import aliases."""
    defined = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias) and node.asname:
            defined.add(node.asname)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.add(node.attr)
    return defined


def vague_names(path):
    """Names that a file defines and that do not say what they hold: `VAGUE`, and those that begin with of_."""
    vague = set()
    for name in defined_names(path):
        word = name.strip("_")
        if word in VAGUE or word.startswith("of_"):
            vague.add(name)
    return sorted(vague)


def test_names_say_what_they_hold():
    assert found(vague_names) == {}


def test_one_assignment_a_line():
    assert found(several_at_once) == {}


def test_methods_and_stages_name_their_arguments():
    files = [path for path in FILES if room(path) in ("algorithms", "stages")]
    assert found(splatted, files) == {}


def test_imports_go_down_only():
    assert {room(path) for path in FILES} == {*ROOMS, None}  # the package's own names are in none
    assert found(lambda path: climbs(path, room(path))) == {}


def test_the_public_names_are_those_of_the_api():
    assert not [name for name in imports(PACKAGE / "__init__.py") if name.startswith("pfljax.cli")]


def test_methods_do_not_import_each_other():
    def others(path):
        return [name for name in imports(path) if name.startswith("pfljax.algorithms")]

    def outside(path):
        return [name for name in others(path) if not name.startswith("pfljax.algorithms.common.")]

    assert found(outside, METHOD_FILES) == {}
    assert found(lambda path: not ast.get_docstring(tree(path)), METHOD_FILES) == {}


def test_only_the_engine_says_how_clients_are_laid_out():
    mapped = {
        "jax.vmap",
        "jax.lax.map",
        "lax.map",
        "jax.shard_map",
        "jax.pmap",
        "shard_map",
        "vmap",
        "pmap",
    }
    assert found(lambda path: room(path) != "exchange" and names(path) & mapped) == {}
    assert (
        found(
            lambda path: [
                n for n in imports(path) if n.split(".")[-1] in ("vmap", "pmap", "shard_map")
            ]
        )
        == {}
    )


def test_only_the_command_line_speaks_of_flags():
    assert (
        found(
            lambda path: (
                room(path) != "cli" and [text for text in strings(path) if FLAG.search(text)]
            )
        )
        == {}
    )


def test_no_method_is_known_by_name_outside_its_file():
    for path in FILES:
        if room(path) == "cli":
            continue  # commands have defaults
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        others = {name for name, method in METHODS.items() if method.__module__ != module}
        assert not others & set(strings(path)), path


def test_importing_the_package_is_light():
    """What is heavy or rarely used is imported where it is used."""
    code = "import sys, pfljax; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(out.stdout.split())


def test_the_rules_see_what_they_forbid(tmp_path):
    bad = tmp_path / "bad.py"
    lines = [
        "import jax",
        "from absl import flags",
        "from pfljax import api, models",
        "from jax import vmap",
    ]
    bad.write_text("\n".join([*lines, "y = jax.lax.map(vmap, '--rounds')"]))
    assert vague_names(bad) == []
    assert "absl.flags" in imports(bad) and "jax.vmap" in imports(bad)
    assert {"jax.lax.map", "vmap"} <= names(bad)
    assert climbs(bad, "data") == ["absl.flags", "pfljax.api"] and climbs(bad, "cli") == []
    assert (
        FLAG.search(*strings(bad))
        and FLAG.search("use --rounds=3")
        and not FLAG.search("a -- b, well--known")
    )


def test_the_rule_of_names_sees_every_definition(tmp_path):
    bad = tmp_path / "bad.py"
    lines = [
        "import json as told",
        "def of_model(given, *, places=0):",
        "    found = given.found",
        "    return [each for each in found]",
        "class Held:",
        "    def _kept(self):",
        "        self.made = self.told",
        "        for kinds, other in self.each():",
        "            pass",
        "offset = profile_of = 0",
    ]
    bad.write_text("\n".join(lines))
    vague = ["_kept", "each", "found", "given", "kinds", "made", "of_model", "places", "told"]
    assert vague_names(bad) == vague
