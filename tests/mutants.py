"""Makes small faults in pfljax and counts how many of them the default suite finds.

    python tests/mutants.py --list                             # the faults, and nothing else
    python tests/mutants.py --out=mutants.json --workers=2     # about an hour on two cores; continues where it stopped
    python tests/mutants.py --compare before.json after.json   # which faults were found before and are lost

Faults are drawn with a fixed seed: at least one in the update of every method, the others over all packages. Each one
meets the tests that are named after its file, the tables and the contract tests of its method, or those of its package
and the contract tests, and stops at the first test that fails. Faults that are left are made all at once, and meet the
whole default suite; each test that fails then is run again with one fault at a time. The exit code is 1 if less than
95 % are found.

`--checkout` measures the tests of another checkout with the faults of its own `pfljax`. Every fault has an identifier
that depends on the changed code alone, so that two checkouts with the same code can be compared.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SEED = 0
SHARE_TO_FIND = 0.95
PLUGIN = ROOT / "tests" / "time_limit.py"
SECONDS_PER_STAGE = 900  # a fault that makes a test hang is found, too
SECONDS_OF_SUITE = 7200
METHODS = "algorithms"

# Number of faults in each package beside those of the methods.
FAULTS_PER_PACKAGE = {
    "contract": 4,
    "models": 5,
    "exchange": 8,
    "local": 7,
    "data": 6,
    "evaluation": 5,
    "algorithms/common": 7,
    "stages": 9,
    "stores": 4,
    "folder": 4,
    "training": 4,
    "report": 3,
    "api": 3,
    "cli": 3,
    "planner": 2,
    "run": 2,
    "settings": 2,
}

# Faults that change no result, with the reason. They meet their own tests, too, but do not count.
EQUIVALENT = {
    "algorithms/common/aggregation.py off by one: weight > 0 -> weight >= 0": (
        "the next line replaces what is divided by 0"
    ),
    "algorithms/fedbuff.py index: trained.losses[0] -> trained.losses[1]": (
        "the axis has one entry, and JAX clamps the index"
    ),
    "algorithms/pfedhn.py index: trained.losses[0] -> trained.losses[1]": (
        "the axis has one entry, and JAX clamps the index"
    ),
    "algorithms/scaffold.py mask: tree.where(num_steps > 0, new_variate, control_variate) -> "
    "new_variate": ("a client takes no step if it has no examples, and then both are 0"),
    "contract/vectors.py off by one: norm > 0 -> norm >= 0": "the other condition implies that the norm is above 0",
    "stages/sampling.py mask: jnp.where(sizes > 0, jnp.minimum(per_example(sizes, num) * sizes, 1), 0) -> "
    "jnp.minimum(per_example(sizes, num) * sizes, 1)": (
        "the two differ only if all who have examples are drawn, which `top_k` sees to"
    ),
    "stages/sampling.py constant: 0.5 -> 1.0": "clients that a point draws stay before all others",
    "stages/robust.py mask: jnp.where(weight > 0, distance, jnp.inf) -> distance": (
        "the loop stops later if an update without weight is near; the result is within the tolerance either way"
    ),
    "report/content.py off by one: widest + 1 -> (widest)": "a tree that is cut lower in a gap has the same parts",
    "report/plots.py constant: 0.8 -> 1.6": "the size of a figure",
    "cli/launch.py constant: 0.2 -> 0.4": "which programs are kept for later runs, which changes their time only",
}

# Two stages in another order, or one that is left out: (old text, new text) in run/experiment.py.
STAGES = "run/experiment.py"
STAGE_ORDERS = [
    (
        "self.attack.stage,\n            self.compression.downloads,\n            self.compression.uploads,",
        "self.compression.downloads,\n            self.compression.uploads,\n            self.attack.stage,",
    ),
    (
        "clock_stage,\n            functools.partial(self.faults.stage, checked=self.checked),",
        "functools.partial(self.faults.stage, checked=self.checked),\n            clock_stage,",
    ),
]


class Fault(NamedTuple):
    """A change of the code.

    Attributes:
        file: The changed file, relative to pfljax/.
        line: The line of the change, from 1.
        kind: The kind of fault, such as "sign".
        old: The code before.
        new: The code after.
        start: Offset of `old` in the file, in bytes.
        subject: The method whose update the fault is in; "" in other packages.
    """

    file: str
    line: int
    kind: str
    old: str
    new: str
    start: int
    subject: str = ""

    @property
    def identifier(self) -> str:
        """Names the fault by the code that it changes."""
        return f"{self.file}:{self.line} {self.kind}: {one_line(self.old)} -> {one_line(self.new)}"

    @property
    def change(self) -> str:
        """The fault without its line, which other changes of the file move."""
        return f"{self.file} {self.kind}: {one_line(self.old)} -> {one_line(self.new)}"

    @property
    def package(self) -> str:
        """The package that the file is in."""
        return self.file.split("/")[0]


class Verdict(NamedTuple):
    """What the suite says of a fault.

    Attributes:
        fault: The fault's identifier.
        found_by: The first test that fails; "" if none does.
        stage: Which tests ran last: method, file, package, contract or suite.
        seconds: Time that the tests took.
    """

    fault: str
    found_by: str
    stage: str
    seconds: float


# Packages whose faults show in what methods compute.
COMPUTING = ("contract", "models", "exchange", "local", "algorithms", "stages")


# The kinds of fault. Each function yields pairs of a node and the code that replaces it.


def wrong_sign(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """a + b for a - b, and the reverse; the two arguments of `subtract` in the other order."""
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add | ast.Sub)
        and is_arithmetic(node)
    ):
        sign = "-" if isinstance(node.op, ast.Add) else "+"
        yield node, f"({ast.unparse(node.left)}) {sign} ({ast.unparse(node.right)})"

    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and not isinstance(node.operand, ast.Constant)
    ):
        yield node, ast.unparse(node.operand)

    if isinstance(node, ast.Call) and name_of(node) == "subtract" and len(node.args) == 2:
        yield (
            node,
            f"{ast.unparse(node.func)}({ast.unparse(node.args[1])}, {ast.unparse(node.args[0])})",
        )


def dropped_weight(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """a for a * b, a / b and scale(a, b)."""
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult | ast.Div)
        and is_arithmetic(node)
    ):
        yield node, ast.unparse(node.left)

    if isinstance(node, ast.Call) and name_of(node) == "scale" and len(node.args) == 2:
        yield node, ast.unparse(node.args[0])


def wrong_index(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """a[i + 1] for a[i], and a[0] for a[-1]."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        index = node.slice
        if isinstance(index, ast.Constant) and type(index.value) is int:
            yield node, f"{ast.unparse(node.value)}[{index.value + 1}]"
        elif ast.unparse(index) == "-1":
            yield node, f"{ast.unparse(node.value)}[0]"


def off_by_one(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """<= for <, >= for >, and the reverse; one step less of a range; n for n + 1 and n - 1."""
    others = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in others:
        right = ast.unparse(node.comparators[0])
        yield node, f"{ast.unparse(node.left)} {others[type(node.ops[0])]} {right}"

    if isinstance(node, ast.Call) and ast.unparse(node.func) == "range" and len(node.args) == 1:
        yield node, f"range({ast.unparse(node.args[0])} - 1)"

    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
    if is_sum and isinstance(node.right, ast.Constant) and node.right.value == 1:
        yield node, f"({ast.unparse(node.left)})"


def reused_key(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The key itself for a key that is folded from it."""
    if isinstance(node, ast.Call) and name_of(node) == "fold_in":
        yield node, ast.unparse(node.args[0])


def ignored_mask(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """a for where(mask, a, b)."""
    if isinstance(node, ast.Call) and name_of(node) == "where" and len(node.args) == 3:
        yield node, ast.unparse(node.args[1])


def wrong_constant(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """0.1 for a tolerance, and twice any other number with a fraction."""
    if (
        isinstance(node, ast.Constant)
        and type(node.value) is float
        and node.value not in (0.0, 1.0)
    ):
        yield node, "0.1" if abs(node.value) < 1e-3 else repr(2 * node.value)


def wrong_extreme(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """maximum for minimum, argmax for argmin, and the reverse; a sum for a mean."""
    others = {
        "maximum": "minimum",
        "minimum": "maximum",
        "argmax": "argmin",
        "argmin": "argmax",
        "mean": "sum",
    }
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in others
    ):
        if any(keyword.arg == "weights" for keyword in node.keywords):
            return
        function = f"{ast.unparse(node.func.value)}.{others[node.func.attr]}"
        arguments = [ast.unparse(argument) for argument in node.args]
        arguments += [ast.unparse(keyword) for keyword in node.keywords]
        yield node, f"{function}({', '.join(arguments)})"


def wrong_condition(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The other branch of an expression, `or` for `and`, and the reverse."""
    if isinstance(node, ast.IfExp):
        yield (
            node,
            f"({ast.unparse(node.body)} if not ({ast.unparse(node.test)}) else {ast.unparse(node.orelse)})",
        )

    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, word.join(f"({ast.unparse(value)})" for value in node.values)

    if isinstance(node, ast.If):
        yield node.test, f"not ({ast.unparse(node.test)})"


def left_out_argument(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """A call without one of the functions or values that define a method."""
    if isinstance(node, ast.Call):
        for left_out in node.keywords:
            if left_out.arg not in DEFINING:
                continue
            arguments = [ast.unparse(argument) for argument in node.args]
            arguments += [
                ast.unparse(keyword) for keyword in node.keywords if keyword is not left_out
            ]
            yield node, f"{ast.unparse(node.func)}({', '.join(arguments)})"


# Arguments without which a method is another one.
DEFINING = (
    "train",
    "server",
    "predict",
    "own",
    "phases",
    "objective",
    "adapt",
    "models",
    "h",
    "inputs",
    "control",
)

KINDS = {
    "sign": wrong_sign,
    "weight": dropped_weight,
    "index": wrong_index,
    "off by one": off_by_one,
    "key": reused_key,
    "mask": ignored_mask,
    "constant": wrong_constant,
    "extreme": wrong_extreme,
    "condition": wrong_condition,
    "argument": left_out_argument,
}


def name_of(call: ast.Call) -> str:
    """The last part of the called function's name."""
    return ast.unparse(call.func).rpartition(".")[2]


def is_arithmetic(node: ast.BinOp) -> bool:
    """Whether both sides may be numbers: texts, lists and the like are put together by +, too."""
    literals = ast.List | ast.Tuple | ast.Set | ast.Dict | ast.JoinedStr | ast.ListComp
    for part in ast.walk(node):
        if isinstance(part, literals) or (
            isinstance(part, ast.Constant) and isinstance(part.value, str)
        ):
            return False
    return True


def faults_in(pfljax: Path, path: Path) -> list[Fault]:
    """All faults of a file, in the order of its lines."""
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    line_starts = [0]
    for line in lines:
        line_starts.append(line_starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return line_starts[line - 1] + column

    found = []
    for node in executed_nodes(ast.parse(source)):
        for kind, make in KINDS.items():
            for changed, new in make(node):
                start = offset(changed.lineno, changed.col_offset)
                end = offset(changed.end_lineno, changed.end_col_offset)
                old = source[start:end].decode()
                file = path.relative_to(pfljax).as_posix()
                found.append(Fault(file, changed.lineno, kind, old, new, start))
    return found


def executed_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of functions' bodies, without what only describes: annotations, messages, defaults and accounting."""

    def describes(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return name_of(node) in ("Ledger", "Report", "zip") or name_of(node).endswith("Error")
        if isinstance(node, ast.FunctionDef):
            return (
                node.name.startswith(("check", "_check"))
                or "traffic" in node.name
                or node.name.startswith("__")
            )
        return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)

    def visit(node: ast.AST, within: bool) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if describes(child):
                continue
            if isinstance(child, ast.FunctionDef | ast.Lambda):
                body = child.body if isinstance(child.body, list) else [child.body]
                for statement in body:
                    yield statement
                    yield from visit(statement, True)
            else:
                if within:
                    yield child
                yield from visit(child, within)

    yield from visit(tree, False)


def one_line(code: str) -> str:
    """Code with its line breaks and indents as single spaces."""
    return " ".join(code.split())


def methods_of(path: Path) -> dict[str, tuple[int, int]]:
    """The methods that a file registers: registered name -> first and last line of the class."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        for decorator in getattr(node, "decorator_list", ()):
            if isinstance(decorator, ast.Call) and name_of(decorator) == "method":
                named = [
                    ast.literal_eval(each.value)
                    for each in decorator.keywords
                    if each.arg == "name"
                ]
                found[named[0] if named else node.name.lower()] = (node.lineno, node.end_lineno)
    return found


def draw(generator: random.Random, faults: list[Fault], taken: set[str]) -> Fault | None:
    """Draws a kind of fault, then a fault of this kind; None if all are taken."""
    left = [fault for fault in faults if fault.identifier not in taken]
    if not left:
        return None
    kinds = sorted({fault.kind for fault in left})
    if kinds != ["argument"]:
        # only where there is nothing else to change
        kinds = [kind for kind in kinds if kind != "argument"]
    kind = generator.choice(kinds)
    return generator.choice([fault for fault in left if fault.kind == kind])


def make_faults(pfljax: Path) -> list[Fault]:
    """The faults that are tried: at least one in each method's update, those of the packages, and orders of stages."""
    taken: set[str] = set()
    chosen = []

    def take(generator: random.Random, faults: list[Fault], subject: str = "") -> bool:
        fault = draw(generator, faults, taken)
        if fault is None:
            return False
        taken.add(fault.identifier)
        chosen.append(fault._replace(subject=subject))
        return True

    shared = faults_in(pfljax, pfljax / METHODS / "common" / "aggregation.py")
    for path in sorted((pfljax / METHODS).glob("[!_]*.py")):
        methods = methods_of(path)
        faults = faults_in(pfljax, path)
        for number, (method, (first, last)) in enumerate(methods.items()):
            # A method that shares its file is changed in its own class, if there is anything to change.
            generator = random.Random(f"{SEED} {path.stem} {number}")
            own = [fault for fault in faults if first <= fault.line <= last]
            if len(methods) > 1 and take(generator, own, method):
                continue
            if not take(generator, faults, method):
                take(generator, shared, method)  # such as FedAvg, which is the shared code

    for package, number in FAULTS_PER_PACKAGE.items():
        generator = random.Random(f"{SEED} {package}")
        faults = []
        for path in sorted((pfljax / package).rglob("*.py")):
            faults += faults_in(pfljax, path)
        for _ in range(number):
            take(generator, faults)

    source = (pfljax / STAGES).read_bytes().decode()
    for old, new in STAGE_ORDERS:
        start = source.find(old)
        if start >= 0:
            line = source[:start].count("\n") + 1
            chosen.append(Fault(STAGES, line, "order", old, new, len(source[:start].encode())))
    return chosen


def stages_of(fault: Fault, tests: Path) -> list[tuple[str, list[str]]]:
    """The tests that a fault meets on its own: (name of the stage, arguments of pytest)."""
    file = Path(fault.file)
    stages = []
    named = [
        path for path in sorted(tests.rglob(f"test_{file.stem}.py")) if fault.package in path.parts
    ]
    if fault.subject:
        files = sorted((tests / METHODS).glob("test_*.py"))
        tables = [path for path in files if not is_of_a_method(path)]
        if not named:
            named = [path for path in files if path.stem == f"test_{fault.subject}"]
        if not named:  # a method without a file of tests is played in those of others
            quoted = f'"{fault.subject}"'
            named = [path for path in files if path not in tables and quoted in path.read_text()]
        words = " or ".join(sorted({file.stem, fault.subject, *(path.stem for path in named)}))
        return [("method", [*map(str, named), *map(str, tables), "-k", words])]
    if named:
        stages.append(("file", [*map(str, named)]))
    folder = tests / fault.package
    if fault.package == METHODS:
        folder = tests / file.parent
    if folder.exists():
        stages.append(("package", [str(folder)]))
    if fault.package in COMPUTING:
        stages.append(("contract", ["tests/algorithms/test_contract.py"]))
    return [(stage, arguments) for stage, arguments in stages if arguments]


def is_of_a_method(path: Path) -> bool:
    """Whether a file in tests/algorithms is named after a file of pfljax/algorithms."""
    name = path.stem.removeprefix("test_")
    return (path.parents[2] / "pfljax" / METHODS / f"{name}.py").exists()


@dataclasses.dataclass
class Copy:
    """A copy of a checkout, in which faults are made.

    Attributes:
        folder: The copy.
        compiled: Folder of compiled programs, which all copies share.
    """

    folder: Path
    compiled: Path

    def judge(self, fault: Fault) -> Verdict:
        """Makes the fault, runs tests until one fails, and restores the code."""
        begun = time.monotonic()
        failed: list[str] = []
        stage = ""
        with self.changed([fault]):
            for name, arguments in stages_of(fault, self.folder / "tests"):
                stage = name
                failed = self.failures(["-x", "-n", "0", *arguments])
                if failed:
                    break
        seconds = round(time.monotonic() - begun, 1)
        return Verdict(fault.identifier, failed[0] if failed else "", stage, seconds)

    @contextlib.contextmanager
    def changed(self, faults: list[Fault]) -> Iterator[None]:
        """The code with some faults; it is restored in the end."""
        sources = {}
        for fault in faults:
            path = self.folder / "pfljax" / fault.file
            sources[path] = path.read_bytes()
        try:
            # The last ones of a file first, as they move no others; of faults within each other, the inner one stays.
            last: dict[Path, int] = {}
            for fault in sorted(faults, key=lambda fault: -fault.start):
                path = self.folder / "pfljax" / fault.file
                old = fault.old.encode()
                end = fault.start + len(old)
                if end > last.get(path, end):
                    continue
                source = path.read_bytes()
                assert source[fault.start : end] == old
                path.write_bytes(source[: fault.start] + f"({fault.new})".encode() + source[end:])
                last[path] = fault.start
            yield
        finally:
            for path, source in sources.items():
                path.write_bytes(source)

    def failures(self, arguments: list[str], seconds: int = SECONDS_PER_STAGE) -> list[str]:
        """The tests that fail."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            PLUGIN.stem,
            "--tb=no",
            "-rfE",
        ]
        command += arguments
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(self.folder.parent)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PFLJAX_TESTS_COMPILED": str(self.compiled),
        }
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return ["(no end)"]
        if done.returncode in (0, 5):  # 5: no test has been selected
            return []
        failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return [test.split("@")[0] for test in failed] or [f"(exit code {done.returncode})"]


def copy_of(checkout: Path, folder: Path, compiled: Path) -> Copy:
    """Copies what the tests need."""
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".venv", "build", "*.egg-info")
    shutil.copytree(checkout, folder, ignore=ignored)
    shutil.copy(PLUGIN, folder.parent)
    return Copy(folder, compiled)


class Results:
    """The verdicts so far, in a file.

    Attributes:
        path: The file.
        verdicts: By the faults' identifiers.
    """

    def __init__(self, path: Path):
        self.path = path
        self.verdicts: dict[str, Verdict] = {}
        self.lock = threading.Lock()
        if path.exists():
            rows = json.loads(path.read_text())
            self.verdicts = {row["fault"]: Verdict(**row) for row in rows}

    def add(self, verdict: Verdict) -> None:
        """Adds a verdict, or replaces it, writes the file, and prints a line."""
        with self.lock:
            self.verdicts[verdict.fault] = verdict
            partial = self.path.with_suffix(".part")
            partial.write_text(
                json.dumps([each._asdict() for each in self.verdicts.values()], indent=1)
            )
            partial.replace(self.path)
            mark = "found" if verdict.found_by else "NOT FOUND"
            how = f"{mark} in {verdict.seconds:.0f} s ({verdict.stage})"
            print(f"{how}: {verdict.fault}  {verdict.found_by}", flush=True)


def run(checkout: Path, results: Results, workers: int) -> list[Verdict]:
    """Judges all faults that have no verdict yet; the verdicts of those that change a result."""
    faults = make_faults(checkout / "pfljax")
    waiting = [fault for fault in faults if fault.identifier not in results.verdicts]
    with tempfile.TemporaryDirectory() as temporary:
        compiled = Path(temporary) / "compiled"
        compiled.mkdir()
        copies = [
            copy_of(checkout, Path(temporary) / f"copy-{number}", compiled)
            for number in range(workers)
        ]

        def judge_all(copy: Copy) -> None:
            while waiting:
                results.add(copy.judge(waiting.pop(0)))

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            list(pool.map(judge_all, copies))

        left = []
        for fault in faults:
            verdict = results.verdicts[fault.identifier]
            if not verdict.found_by and verdict.stage != "suite" and fault.change not in EQUIVALENT:
                left.append(fault)
        if left:
            judge_together(copies, left, results)
    return [
        results.verdicts[fault.identifier] for fault in faults if fault.change not in EQUIVALENT
    ]


def judge_together(copies: list[Copy], faults: list[Fault], results: Results) -> None:
    """Makes all faults at once and runs the whole suite, then each test that fails with one fault at a time."""
    suspects = suspects_of(copies, faults, results.path.with_suffix(".suspects"))
    waiting = list(faults)

    def judge_alone(copy: Copy) -> None:
        while waiting:
            fault = waiting.pop(0)
            begun = time.monotonic()
            with copy.changed([fault]):
                failed = (
                    copy.failures(["-x", "-n", "0", *nearest_first(suspects, fault)])
                    if suspects
                    else []
                )
            seconds = round(time.monotonic() - begun, 1)
            results.add(Verdict(fault.identifier, failed[0] if failed else "", "suite", seconds))

    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(judge_alone, copies))


def nearest_first(tests: list[str], fault: Fault) -> list[str]:
    """The tests, first those of the fault's file, then those of its package."""
    file = Path(fault.file)

    def distance(test: str) -> tuple[bool, bool]:
        return (f"test_{file.stem}.py" not in test, fault.package not in Path(test).parts)

    return sorted(tests, key=distance)


def suspects_of(copies: list[Copy], faults: list[Fault], path: Path) -> list[str]:
    """The tests of the suite that fail with all faults at once and pass without any; they are noted in a file."""
    if path.exists():
        return path.read_text().splitlines()
    several = ["-n", str(len(copies))]
    with copies[0].changed(faults):
        failed = copies[0].failures([*several, "tests"], SECONDS_OF_SUITE)
    broken = copies[0].failures([*several, *failed], SECONDS_OF_SUITE) if failed else []
    suspects = [test for test in failed if test not in broken]
    print(
        f"{len(faults)} faults together fail {len(suspects)} tests of the suite; {len(broken)} fail without",
        flush=True,
    )
    path.write_text("\n".join(suspects))
    return suspects


def compare(before: Path, after: Path) -> int:
    """Prints the faults that were found before and are not found after; the exit code."""
    found_before = {row["fault"] for row in json.loads(before.read_text()) if row["found_by"]}
    found_after = {row["fault"] for row in json.loads(after.read_text()) if row["found_by"]}
    lost = sorted(found_before - found_after)
    print(f"{len(found_before)} found before, {len(found_after)} after, {len(lost)} lost")
    print(*lost, sep="\n")
    return 1 if lost else 0


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        description="Counts the small faults that the default suite finds."
    )
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="compare two results"
    )
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="checkout to measure; default: this one"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("mutants.json"), help="file of the results"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="number of faults at a time"
    )
    options = parser.parse_args()

    if options.compare:
        return compare(*options.compare)
    if options.list:
        for fault in make_faults(options.checkout / "pfljax"):
            print(
                f"{zlib.crc32(fault.identifier.encode()):08x} {fault.subject or '-':20} {fault.identifier}"
            )
        return 0

    verdicts = run(options.checkout, Results(options.out), options.workers)
    found = sum(bool(verdict.found_by) for verdict in verdicts)
    print(
        f"{found} of {len(verdicts)} faults that change a result are found ({found / len(verdicts):.1%})"
    )
    for verdict in verdicts:
        if not verdict.found_by:
            print(f"not found: {verdict.fault}")
    return 0 if found >= SHARE_TO_FIND * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
