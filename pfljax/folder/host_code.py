"""What functions that Python runs compute with: the identity of metrics, stop rules and callbacks.

A traced function is known by its operations, see `fingerprint`. A function on the host is known by all that it reaches:
its instructions, those of the functions and classes that it uses, and the values that closures, defaults, attributes
and globals hold. Helper modules count as a whole. Comments, docstrings, formatting, addresses in memory, and names of
local variables, constants and functions do not count. Where names are computed, as in `globals()[name]`, or a value
cannot be read, as that of a generator, the function's whole file counts, so that one change too many is noticed rather
than one too few.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import copy
import copyreg
import dis
import enum
import functools
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# These packages are known by their versions, also where they are installed from a checkout.
LIBRARIES = ("pfljax", "jax", "jaxlib", "flax", "optax", "numpy")
# Names through which code reaches what its instructions do not name.
INDIRECT = {
    "eval",
    "exec",
    "globals",
    "locals",
    "vars",
    "getattr",
    "attrgetter",
    "__import__",
    "import_module",
    "modules",
    "run_path",
    "run_module",
    "__getattr__",
    "__getattribute__",
}
# Entries of a class that say how it was written, not what it does.
BOOKKEEPING = {
    "__module__",
    "__qualname__",
    "__name__",
    "__doc__",
    "__dict__",
    "__weakref__",
    "__annotations__",
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "__firstlineno__",
    "__static_attributes__",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__match_args__",
    "_abc_impl",
    "__abstractmethods__",
}
# What code defines, and what Python makes of it.
DEFINITIONS = (
    types.CodeType,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    functools.partial,
    staticmethod,
    classmethod,
    property,
)
MOST_DEEP = 100  # of values inside values; each takes several frames of Python's stack
# Functions for which the names of local variables matter, and what has variables of its own.
SEES_LOCALS = {"locals", "vars", "eval", "exec", "dir"}
SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ClassDef,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    types.NoneType,
    types.EllipsisType,
    types.NotImplementedType,
)
BUILT_IN: tuple[Any, ...] = (list, tuple, dict, str, bytes, int, float)
# What functions of libraries compute with if users pass it to them, as to `jax.vmap` or to a schedule.
VALUES = (
    *PLAIN,
    list,
    tuple,
    dict,
    set,
    frozenset,
    functools.partial,
    types.FunctionType,
    types.MethodType,
    np.ndarray,
    np.generic,
    jax.Array,
)
# Values of which nothing is left unread, so that the global name behind which they stand does not matter.
READ_WHOLLY = (*PLAIN, np.ndarray, types.FunctionType, type)


def identity(function: Any) -> dict[str, Any]:
    """Describes what a function on the host computes with.

    Args:
        function: A function, a bound method, an object that can be called, or several of these in a tuple or a dict.

    Returns:
        "python": the version of Python, on which instructions depend.
        "code": digest of all that the function reaches.
        "files": digest of the source of each user's file that defines a part of it, by `name_of` the file.
    """
    reader = _Reader()
    reader.read(function)
    whole_files = reader.whole_files()
    reader.add(*sorted(map(source_digest, whole_files)))
    files = sorted({*reader.files, *whole_files})
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "code": reader.digest(),
        "files": {name_of(file): source_digest(file) for file in files},
    }


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Says what has changed between two identities; "" if nothing has.

    Instructions of two versions of Python cannot be compared, so the files' sources are.
    """
    comparable = before["python"] == now["python"]
    if comparable and before["code"] == now["code"]:
        return ""
    digests_before = before["files"]
    digests_now = now["files"]
    names = sorted(digests_before.keys() | digests_now.keys())
    files = [name for name in names if digests_before.get(name) != digests_now.get(name)]
    if files:
        return f"{', '.join(files)} changed"
    return "a value that it uses changed" if comparable else ""


def content(array: Any) -> bytes:
    """Digest of an array: its type, shape and values."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.ascontiguousarray(array)
    kind = f"{array.dtype}{array.shape}"
    return hashlib.sha256(kind.encode() + array.tobytes()).digest()


def file_of(module: types.ModuleType | None) -> Path | None:
    """The file of a user's module; None for libraries, and for what was typed without a file."""
    if module is None or module.__name__.partition(".")[0] in LIBRARIES:
        return None
    return users_file(getattr(module, "__file__", None))


def users_file(name: str | Path | None) -> Path | None:
    """A file, unless it is a library's or there is none of this name."""
    if not name or not Path(name).is_file():
        return None
    file = Path(name).resolve()
    return None if is_librarys(file) else file


def is_librarys(file: Path) -> bool:
    """Whether a file is of the standard library or of an installed package."""
    return any(file.is_relative_to(folder) for folder in library_folders())


@functools.cache
def library_folders() -> tuple[Path, ...]:
    """The folders of the standard library and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({Path(sysconfig.get_path(name)).resolve() for name in names})


def is_users(defined: Any) -> bool:
    """Whether a function or class is the user's: from a file outside of libraries, or typed without a file."""
    name = getattr(defined, "__module__", None)
    if not isinstance(name, str):
        return False
    package = name.partition(".")[0]
    if package in (*LIBRARIES, *sys.builtin_module_names, *sys.stdlib_module_names):
        return name == "__main__"
    module = sys.modules.get(name)
    if module is None or not getattr(module, "__file__", None):
        return True
    return file_of(module) is not None


def parsed(file: Path) -> ast.Module | None:
    """The syntax tree of a file; None if it cannot be read."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def source_digest(file: Path) -> str:
    """Digest of a file's syntax tree without comments, docstrings and formatting; "" if it cannot be read."""
    tree = parsed(file)
    if tree is None:
        return ""
    return hashlib.sha256(syntax(tree).encode()).hexdigest()[:16]


def root_of(file: Path) -> Path:
    """The folder from which a file is imported: that of its outermost package."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def name_of(file: Path) -> str:
    """A file's name in messages: its path from the folder from which it is imported."""
    return file.relative_to(root_of(file)).as_posix()


def syntax(node: Any, names: Mapping[str, str] = types.MappingProxyType({})) -> str:
    """A syntax tree as text that is the same in all versions of Python: what is empty is left out.

    Local variables have numbers in place of their names, which `names` has for those of the functions around the node.
    The order of a set and the annotations of functions without decorators, which may read them, are left out.
    """
    if isinstance(node, list):
        return f"[{','.join(syntax(item, names) for item in node)}]"
    if isinstance(node, ast.Set):
        elements = sorted(syntax(element, names) for element in node.elts)
        return f"Set({','.join(elements)})"
    if isinstance(node, ast.Name):
        name = names.get(node.id, repr(node.id))
        return f"Name({name},{type(node.ctx).__name__})"
    if not isinstance(node, ast.AST):
        return repr(node)
    names_in_body = names  # defaults and decorators are outside of the function
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        names_in_body = {**names, **numbered(node, names)}
        node = node if node.decorator_list else without_annotations(node)
    entries = []
    for name, value in ast.iter_fields(node):
        is_body = name == "body"
        if is_body and isinstance(value, list) and has_docstring(node):
            value = value[1:]
        if value not in (None, []) and name != "type_comment":
            entries.append(f"{name}={syntax(value, names_in_body if is_body else names)}")
    return f"{type(node).__name__}({','.join(entries)})"


def numbered(
    function: ast.FunctionDef | ast.AsyncFunctionDef, names: Mapping[str, str]
) -> dict[str, str]:
    """Numbers for the local variables of a function whose names only its own code can see; `names` has those around it.

    Arguments keep their names, by which callers pass them, and so does all that is bound otherwise than by assignment.
    """
    nodes = [*ast.walk(function)]
    if any(isinstance(node, ast.Name) and node.id in SEES_LOCALS for node in nodes):
        return {}
    other = {name for node in nodes for name in otherwise_bound(node)}
    assigned = dict.fromkeys(assignments(function.body))
    local = [name for name in assigned if name not in other]
    first = 1 + max(map(int, names.values()), default=-1)
    return {name: str(number) for number, name in enumerate(local, first)}


def otherwise_bound(node: ast.AST) -> set[str]:
    """Names that a node binds otherwise than by assignment, and all those in a class, where they become attributes."""
    if isinstance(node, ast.ClassDef):
        names = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
        return {node.name, *names}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.Global | ast.Nonlocal):
        return {*node.names}
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    # Functions, exceptions and what a case captures.
    captured = (getattr(node, field, None) for field in ("name", "rest"))
    return {name for name in captured if isinstance(name, str)}


def assignments(nodes: list[Any]) -> Iterator[str]:
    """The names that code assigns to, in their order; not those inside functions, classes and comprehensions."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif not isinstance(node, SCOPES):
            yield from assignments([*ast.iter_child_nodes(node)])


def without_annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
    """A function without the annotations of its arguments and of what it returns."""
    bare = copy.copy(function)
    bare.args = copy.deepcopy(function.args)
    bare.returns = None
    for node in ast.walk(bare.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return bare


def has_docstring(node: ast.AST) -> bool:
    """Whether a module, a class or a function begins with a docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None


def imported_files(file: Path) -> Iterator[Path]:
    """The user's files that a file imports, if they are found from its folders or among the modules in memory."""
    tree = parsed(file)
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Import):
            base = root_of(file)
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if node.level else root_of(file)
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
        else:
            continue
        for name in names:
            words = name.split(".")
            modules = [".".join(words[:end]) for end in range(1, len(words) + 1)]
            packages = [base.joinpath(*words[:end]) for end in range(len(words) + 1)]
            candidates = [file_of(sys.modules.get(module)) for module in modules]
            candidates += [users_file(path / "__init__.py") for path in packages]
            candidates += [users_file(path.with_suffix(".py")) for path in packages[1:]]
            for candidate in candidates:
                if candidate is not None:
                    yield candidate


class Names(NamedTuple):
    """Names that the instructions of a function and of the functions inside it use.

    Attributes:
        read: Global names.
        attributes: Names of attributes.
        modules: Modules that it imports, with their level; 0 is not relative.
        texts: Strings.
    """

    read: dict[str, None]
    attributes: dict[str, None]
    modules: dict[str, None]
    texts: dict[str, None]


class _Reader:
    """Reads values, and all that they reach, into a digest.

    Attributes:
        files: The user's files that define what was read.
        whole: Those that count as a whole.
    """

    def __init__(self):
        self.files: dict[Path, None] = {}
        self.whole: dict[Path, None] = {}
        self._stream = hashlib.sha256()
        # With their values, so that no other gets the address of one.
        self._seen: dict[int, tuple[int, Any]] = {}
        self._depth = 0
        self._globals: dict[str, str] = {}  # numbers of names in the function that is being read

    def digest(self) -> str:
        return self._stream.hexdigest()[:16]

    def add(self, *texts: str) -> None:
        """Adds texts, each with its length, so that no two sequences are the same."""
        for text in texts:
            encoded = text.encode("utf-8", "surrogatepass")
            self._stream.update(f"{len(encoded)}:".encode() + encoded)

    def whole_files(self) -> list[Path]:
        """The files that count as a whole, and those that they import."""
        files: dict[Path, None] = {}
        remaining = [*self.whole]
        while remaining:
            file = remaining.pop()
            if file not in files:
                files[file] = None
                remaining.extend(imported_files(file))
        return [*files]

    def read(self, value: Any) -> None:
        """Reads any value."""
        if isinstance(value, PLAIN) and type(value).__module__ == "builtins":
            self.add(type(value).__name__, repr(value))
            return
        dtype = dtype_of(value)
        if dtype is not None:
            self.add("dtype", str(dtype))
            return
        if id(value) in self._seen:
            self.add("again", str(self._seen[id(value)][0]))
            return
        self._seen[id(value)] = (len(self._seen), value)
        if self._depth == MOST_DEEP:
            self.add("deep", type(value).__qualname__)
            return
        self._depth += 1
        try:
            self._read_new(value)
        finally:
            self._depth -= 1

    def _read_new(self, value: Any) -> None:
        """Reads a value that was not read before."""
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            self._read_array(value)
        elif isinstance(value, enum.Enum):
            self._read_class(type(value))
            self.add("member", value.name)
        elif isinstance(value, DEFINITIONS):
            self._read_definition(value)
        elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            self.add("weak")  # a cache, such as that of functools.singledispatch
        elif isinstance(value, memoryview):
            self.add("memory", str(value.format))
            self.read(value.tobytes())
        elif isinstance(value, Mapping) and not is_users(type(value)):
            self._read_mapping(value)
        elif isinstance(value, set | frozenset):
            self._read_set(value)
        elif isinstance(value, list | tuple) and not is_users(type(value)):
            self._read_sequence(value)
        elif getattr(value, "__wrapped__", None) is not None:
            self.add("wrapper", type(value).__qualname__)  # such as jax.jit and functools.cache
            self.read(getattr(value, "__wrapped__"))  # noqa: B009
        elif isinstance(value, types.BuiltinFunctionType):
            self.add("built-in", str(value.__module__), value.__qualname__)
            if not isinstance(value.__self__, types.ModuleType | types.NoneType):
                self.read(value.__self__)
        else:
            self._read_object(value)

    def _read_definition(self, value: Any) -> None:
        """Reads a function, a class, a module, or what is made of them; see `DEFINITIONS`."""
        if isinstance(value, types.CodeType):
            self._read_code(value)
        elif isinstance(value, types.FunctionType):
            self._read_function(value)
        elif isinstance(value, types.MethodType):
            self.add("method")
            self.read(value.__func__)
            self.read(value.__self__)
        elif isinstance(value, types.ModuleType):
            self._read_module(value, {})
        elif isinstance(value, type):
            self._read_class(value)
        elif isinstance(value, functools.partial):
            self.add("partial")
            for part in (value.func, value.args, value.keywords):
                self.read(part)
        elif isinstance(value, staticmethod | classmethod):
            self.add(type(value).__name__)
            self.read(value.__func__)
        elif isinstance(value, property):
            self.add("property")
            for part in (value.fget, value.fset, value.fdel):
                self.read(part)

    def _read_mapping(self, value: Mapping) -> None:
        self.add("mapping", str(len(value)))
        if type(value) is not dict:
            self.read(type(value))  # such as a Counter, in which nothing is missing
        if isinstance(value, collections.defaultdict):
            self.read(value.default_factory)
        for name, item in value.items():
            self.read(name)
            self.read(item)

    def _read_array(self, value: Any) -> None:
        if isinstance(value, np.ma.MaskedArray):
            self.add("masked")
            for part in (value.data, np.ma.getmaskarray(value), value.fill_value):
                self.read(part)
        elif value.dtype.hasobject:
            self.add("array", str(value.dtype))
            self.read(value.tolist())
        else:
            self.add("array", content(value).hex())
        if is_users(type(value)):
            self._read_class(type(value))
            self.read(state_of(value))

    def _read_sequence(self, value: list | tuple) -> None:
        self.add(type(value).__name__, str(len(value)))
        if {*map(type, value)} <= {bool, int, float, str}:  # also if they are many
            self.add(repr(value))
            return
        for item in value:
            self.read(item)

    def _read_set(self, value: set | frozenset) -> None:
        digests = []
        for item in value:
            reader = _Reader()
            reader.read(item)
            digests.append(reader.digest())
            self.files |= reader.files
            self.whole |= reader.whole
        self.add("set", *sorted(digests))

    def _read_module(self, module: types.ModuleType, attributes: Mapping[str, None]) -> None:
        """Reads a module, of which code uses some attributes."""
        file = file_of(module)
        self.add("module", module.__name__ if file is None else "")
        if file is not None:
            self._add_file(file, whole=True)
        for name in attributes:
            value = vars(module).get(name)
            # Of a library, only what a user has put there.
            if value is not None and (file is not None or is_users(value)):
                self.add(name)
                self.read(value)

    def _add_file(self, file: Path, whole: bool = False) -> None:
        """Notes a file. All but the first one count as a whole."""
        if whole or (self.files and file not in self.files):
            self.whole[file] = None
        self.files[file] = None

    def _read_function(self, function: types.FunctionType) -> None:
        cells = [
            cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()
        ]
        if not is_users(function):
            self._read_librarys_function(function, cells)
            return
        self.add("function")
        file = users_file(function.__code__.co_filename)
        if file is not None:
            self._add_file(file)
        names = names_in(function.__code__)
        numbers = numbers_of(names, function.__globals__)
        self._globals = numbers
        self.read(function.__code__)
        self._globals = {}
        for part in (function.__defaults__, function.__kwdefaults__, vars(function), tuple(cells)):
            self.read(part)
        self._read_names(names, numbers, function.__globals__, file)

    def _read_librarys_function(self, function: types.FunctionType, cells: list[Any]) -> None:
        """Reads the name of a library's function, and what users passed to it."""
        self.add("function", str(function.__module__), function.__qualname__)
        for value in (*cells, *(function.__defaults__ or ()), *vars(function).values()):
            if isinstance(value, VALUES) or is_users(value) or is_users(type(value)):
                self.read(value)

    def _read_names(
        self,
        names: Names,
        numbers: Mapping[str, str],
        namespace: Mapping[str, Any],
        file: Path | None,
    ) -> None:
        """Reads what the global names, the attributes and the imports of code stand for in its module's namespace."""
        for name in names.read:
            self.add("global", numbers.get(name, name))
            value = namespace.get(name)
            if isinstance(value, types.ModuleType):
                self._read_module(value, names.attributes)
            elif name in namespace:
                self.read(value)
            elif not hasattr(builtins, name):
                self.add("missing")
        for name in names.modules:
            self._read_import(name, namespace, names.attributes)
        if INDIRECT & {*names.read, *names.attributes}:
            if file is not None:
                self._add_file(file, whole=True)
            for text in names.texts:
                self._read_import(text, namespace, names.attributes)

    def _read_import(
        self, name: str, namespace: Mapping[str, Any], attributes: Mapping[str, None]
    ) -> None:
        """Reads a module by the name with which code imports it; nothing if there is no such module."""
        package = namespace.get("__package__") or ""
        full = name
        if name.startswith("."):
            with contextlib.suppress(ImportError):
                full = importlib.util.resolve_name(name, package)
        if not all(word.isidentifier() for word in full.split(".")):
            return
        module = sys.modules.get(full)
        if module is not None:
            self._read_module(module, attributes)
            return
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(full)
            if spec is None or not spec.origin or not Path(spec.origin).is_file():
                return
            file = Path(spec.origin).resolve()
            if not is_librarys(file):
                self._add_file(file, whole=True)

    def _read_code(self, code: types.CodeType) -> None:
        """Reads instructions, with the numbers of local variables in place of their names."""
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self.add("code", *map(str, counts), code.co_exceptiontable.hex())
        for instruction in dis.get_instructions(code):
            self.add(instruction.opname)
            if instruction.opcode in dis.hasconst:
                self.read(instruction.argval)
            elif instruction.opcode in dis.haslocal or instruction.opcode in dis.hasfree:
                self.add(str(instruction.arg))
            elif instruction.opname == "LOAD_GLOBAL":
                name = str(instruction.argval)
                self.add(self._globals.get(name, name))
            elif instruction.opcode in dis.hasname:
                self.add(str(instruction.argval))
            elif instruction.arg is not None:
                self.add(str(instruction.arg))

    def _read_class(self, cls: type) -> None:
        if not is_users(cls):
            self.add("class", str(cls.__module__), cls.__qualname__)
            return
        self.add("class")
        file = file_of(sys.modules.get(cls.__module__))
        if file is not None:
            self._add_file(file)
        for base in cls.__bases__:
            self.read(base)
        if type(cls) is not type:
            self.read(type(cls))
        for name in sorted(vars(cls).keys() - BOOKKEEPING):
            value = vars(cls)[name]
            if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                continue
            self.add(name)
            self.read(value)

    def _read_object(self, value: Any) -> None:
        """Reads an instance: its class and its state."""
        cls = type(value)
        self.read(cls)
        if isinstance(value, BUILT_IN):  # of a user's subclass
            self.read(plain(value))
        if is_users(cls) or not hasattr(value, "__reduce_ex__"):
            self.read(state_of(value))
            return
        try:
            reduce = copyreg.dispatch_table.get(cls)
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
            if isinstance(value, np.ufunc) and value.__name__.endswith("(vectorized)"):
                raise TypeError("np.frompyfunc hides its function")
        except Exception:  # locks, files, generators and others have no state that could be read
            self.add("no state")
            self.whole |= self.files
            return
        for part in reduced if isinstance(reduced, tuple) else (reduced,):
            self.read([*part] if isinstance(part, Iterator) else part)


def plain(value: Any) -> Any:
    """A value of a built-in type in place of one of a class derived from it."""
    for built_in in BUILT_IN:
        if isinstance(value, built_in):
            return built_in(value)
    return value


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of an instance; without computed ones, and those that a Flax module has for its own use."""
    cls = type(value)
    attributes = getattr(value, "__dict__", {})
    state = {name: item for name, item in attributes.items() if not is_computed(cls, name)}
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                state[name] = getattr(value, name)
    names = sorted(state)
    if any(base.__module__.startswith("flax.linen") for base in cls.__mro__):
        names = [name for name in names if not name.startswith("_") and name != "parent"]
    return {name: state[name] for name in names}


def is_computed(cls: type, name: str) -> bool:
    """Whether an attribute is a cached property, whose value an instance has only after it was read."""
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def dtype_of(value: Any) -> np.dtype | None:
    """The type of numbers that `np.float32`, `jnp.float32` or a dtype stands for; None for anything else."""
    if isinstance(value, np.dtype):
        return value
    is_type = isinstance(value, type) and issubclass(value, np.generic)
    if is_type or type(value).__name__ == "_ScalarMeta":
        with contextlib.suppress(TypeError):
            return np.dtype(value)
    return None


def names_in(code: types.CodeType) -> Names:
    """The names that code and the code inside it use."""
    names = Names(read={}, attributes={}, modules={}, texts={})
    for instruction in dis.get_instructions(code):
        operation = instruction.opname
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.read[instruction.argval] = None
        elif operation in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "LOAD_SUPER_ATTR"):
            names.attributes[instruction.argval] = None
        elif operation == "IMPORT_NAME":
            level = import_level(code, instruction)
            names.modules["." * level + instruction.argval] = None
        if instruction.opcode in dis.hasconst and isinstance(instruction.argval, str):
            names.texts[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for entries, inner in zip(names, names_in(constant), strict=True):
                entries.update(inner)
    return names


def numbers_of(names: Names, namespace: Mapping[str, Any]) -> dict[str, str]:
    """Numbers of global names, for those that only a value stands behind that is read wholly and stays the same.

    Names count where code may compute them, and those of variables that some function of the file assigns to.
    """
    if INDIRECT & {*names.read, *names.attributes}:
        return {}
    file = file_of(sys.modules.get(namespace.get("__name__", "")))
    assigned = set() if file is None else assigned_globals(file)
    numbers = {}
    for number, name in enumerate(names.read):
        if name not in namespace or name in assigned:
            continue
        if isinstance(namespace[name], READ_WHOLLY):
            numbers[name] = str(number)
    return numbers


def assigned_globals(file: Path) -> set[str]:
    """The names of a file that its functions declare as global."""
    tree = parsed(file)
    nodes = () if tree is None else ast.walk(tree)
    return {name for node in nodes if isinstance(node, ast.Global) for name in node.names}


def import_level(code: types.CodeType, instruction: dis.Instruction) -> int:
    """The level of an import inside a function: 1 for `from . import x`. It is loaded two instructions earlier."""
    instructions = [*dis.get_instructions(code)]
    before = [other for other in instructions if other.offset < instruction.offset]
    constants = [other.argval for other in before[-2:] if other.opcode in dis.hasconst]
    level = constants[0] if constants else 0
    return level if isinstance(level, int) else 0
