"""What a compiled program says of itself: its collectives, kernels and estimated cycles, weighed by loops.

The text of a program lists every operation once, also those of a loop's body. Here they count as often as the loop
runs: as the compiler notes it, or as the loop's condition compares its counter with a constant. A loop whose length
depends on data counts as the caller says for its scope (`jax.named_scope`), otherwise once. All branches of a condition
count.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "collective-broadcast",
)
NO_WORK = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
)
SLICES = ("dynamic-slice", "slice", "gather")  # read only the part that they return
CALLING = ("call", "conditional", "fusion", "async-start")
Lengths = Callable[[str], float | None]
UNKNOWN = 1 << 60  # cycles from here on mean that the compiler has no estimate
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*-> .*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
ARRAY = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
)
# one collective in pieces, each beside another fusion's work
CHAIN = re.compile(r"(channel_id=\d+),.*chain_id=")
NAMES = re.compile(r"%([\w.\-]+)")


class Operation(NamedTuple):
    """One line of a program.

    Attributes:
        name: Its name.
        kind: Its opcode, such as "fusion".
        shape: What it returns, as text: "f32[4,64]{1,0}", or a tuple of these.
        given: Its operands, or a constant's value, as text.
        rest: What follows the operands.
        root: Whether it is what its computation returns.
    """

    name: str
    kind: str
    shape: str
    given: str
    rest: str
    root: bool

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        return NAMES.findall(self.given)


class Collective(NamedTuple):
    """A kind of collective and the shapes that each device gives to it.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all".
        shapes: Shapes of a device's operands, as text.
        bytes: Bytes of one such collective: of the operands; of the result for an all-gather.
        times: How often it runs in a round.
        scalars: Whether all operands are scalars.
        devices: Number of devices that take part in one; 0: all.
    """

    kind: str
    shapes: str
    bytes: int
    times: float
    scalars: bool
    devices: int = 0


class Kernel(NamedTuple):
    """An operation that a device runs on its own.

    Attributes:
        times: How often it runs in a round.
        bytes: What it reads and writes.
        flops: Of its matrix products and convolutions; a multiply-add counts as two.
        precision: What the largest of them multiplies: "f32", "tf32" (float32 unless the program asks for more),
            "bf16", "f16" or another type; "": there is none.
    """

    times: float
    bytes: int
    flops: float
    precision: str = ""


class Reading(NamedTuple):
    """What the text of a program says.

    Attributes:
        cycles: The compiler's estimated cycles, loops weighed; 0 if it gives none.
        collectives: All collectives, the largest first.
        kernels: All other operations.
        doubles: Whether the program computes in 64-bit floating point.
        unknown: Number of operations of which the compiler says that it has no estimate; they count as 0 cycles.
    """

    cycles: float
    collectives: list[Collective]
    kernels: list[Kernel]
    doubles: bool
    unknown: int = 0


def read(text: str, devices: int, lengths: Lengths = lambda scope: None) -> Reading:
    """Reads the text of a compiled program.

    Args:
        text: As `jax.stages.Compiled.as_text` returns it.
        devices: Number of devices that the program runs on.
        lengths: How often a loop whose length depends on data runs, by the name of the scope that it is in; None: not
            known, so it counts once.
    """
    computations, entry = parse(text)
    times, fused = _times(computations, entry, lengths)
    cycles = 0.0
    unknown = 0
    kernels = []
    found: dict[tuple[str, str, int], float] = collections.defaultdict(float)
    chains: dict[str, tuple[tuple[str, str, int], float]] = {}
    for name in {*times, *fused}:
        number = times.get(name, 0.0)
        shapes = _shapes(computations[name])
        for each in computations[name]:
            kind = each.kind.removesuffix("-start")
            if kind in COLLECTIVES:
                given = " ".join(
                    _without_layout(shapes.get(operand, "")) for operand in each.operands
                )
                which = (kind, given, group_of(each.rest, devices))
                runs = number + fused.get(name, 0.0)
                if chain := CHAIN.search(each.rest):
                    chains[chain[1]] = which, min(runs, chains.get(chain[1], (which, runs))[1])
                else:
                    found[which] += runs
            elif number and each.kind not in NO_WORK:
                estimated = _cycles(each.rest)
                cycles += number * (estimated or 0)
                unknown += estimated is None
                products = list(_products(computations, each, shapes))
                flops = sum(size for size, _ in products)
                precision = max(products, default=(0.0, ""))[1]
                kernels.append(Kernel(number, _moved(computations, each, shapes), flops, precision))
    for which, runs in chains.values():
        found[which] += runs
    collectives = [_collective(*which, number) for which, number in found.items()]
    collectives.sort(key=lambda each: -each.bytes * each.times)
    doubles = re.search(r"\b(f64|c128)\[", text) is not None
    return Reading(cycles, collectives, kernels, doubles, unknown)


def parse(text: str) -> tuple[dict[str, list[Operation]], str]:
    """Returns the operations of each computation by its name, and the name of the entry."""
    computations: dict[str, list[Operation]] = {}
    entry = ""
    current = None
    for line in text.splitlines():
        if head := HEAD.match(line):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif current is not None and (start := LINE.match(line)):
            shape, after = _shape_and_rest(re.sub(r"/\*.*?\*/", "", line[start.end() :]))
            kind, _, arguments = after.partition("(")
            given = _until_closed(arguments)
            rest = arguments[len(given) + 1 :]
            current.append(Operation(start[2], kind, shape, given, rest, start[1] is not None))
    return computations, entry


def num_bytes(shape: str) -> int:
    """Bytes of an array or a tuple of arrays, from its shape as text."""
    return sum(_width(kind) * math.prod(sizes) for kind, sizes in _arrays(shape))


def _arrays(shape: str) -> list[tuple[str, list[int]]]:
    """Types and sizes of the arrays of a shape."""
    found = ARRAY.findall(_without_layout(shape))
    return [(kind, [int(size) for size in sizes.split(",") if size]) for kind, sizes in found]


def _shapes(operations: Sequence[Operation]) -> dict[str, str]:
    return {each.name: each.shape for each in operations}


def _width(kind: str) -> int:
    """Bytes of an element of a type, at least 1 ("pred", and types of fewer bits)."""
    digits = re.search(r"\d+", kind)
    return (
        max(int(digits[0]) // 8, 1)
        if digits and kind[0] in "sufbc"
        else 0
        if kind == "token"
        else 1
    )


def _without_layout(shape: str) -> str:
    return re.sub(r"\{[^}]*\}", "", shape)


def _shape_and_rest(text: str) -> tuple[str, str]:
    """Splits "SHAPE opcode(...)" after the shape, which may be a tuple."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    inside = _until_closed(text[1:])
    return text[: len(inside) + 2], text[len(inside) + 3 :]


def _until_closed(text: str) -> str:
    """The text before the parenthesis that closes one which was opened before it."""
    depth = 1
    for place in re.finditer(r"[()]", text):
        depth += 1 if place[0] == "(" else -1
        if not depth:
            return text[: place.start()]
    return text


def _cycles(rest: str) -> int | None:
    """The compiler's estimate for an operation; 0 if it says nothing, None if it says that it has none."""
    found = re.search(r'"estimated_cycles":"(\d+)"', rest)
    cycles = int(found[1]) if found else 0
    return cycles if cycles < UNKNOWN else None


def _moved(
    computations: Mapping[str, list[Operation]], kernel: Operation, shapes: Mapping[str, str]
) -> int:
    """Bytes that an operation reads and writes. Of what is sliced or replaced in part, only this part counts."""

    def size_of(name):
        return num_bytes(shapes.get(name, ""))

    if kernel.kind in SLICES:
        return 2 * num_bytes(kernel.shape)
    if kernel.kind == "dynamic-update-slice":
        return 2 * size_of(kernel.operands[1])
    if kernel.kind != "fusion":
        return num_bytes(kernel.shape) + sum(map(size_of, kernel.operands))
    inner = computations[next(_called(kernel.rest))]
    own = _shapes(inner)
    by_name = {each.name: each for each in inner}
    read = 0
    replaced = set()
    for each in inner:
        if each.kind == "dynamic-update-slice":
            replaced.add(each.operands[0])
    for each in inner:
        if each.kind == "parameter":
            users = [user for user in inner if each.name in user.operands]
            partly = all(user.kind in SLICES and user.operands[0] == each.name for user in users)
            whole = 0 if each.name in replaced else num_bytes(each.shape)
            read += sum(num_bytes(user.shape) for user in users) if partly else whole
    root = next((each for each in inner if each.root), None)
    parts = (
        [root]
        if root is None or root.kind != "tuple"
        else [by_name.get(name) for name in root.operands]
    )
    written = 0
    for part in parts:
        if part is not None and part.kind == "dynamic-update-slice":
            written += num_bytes(own.get(part.operands[1], ""))
        elif part is not None:
            written += num_bytes(part.shape)
    return read + written


def _products(
    computations: Mapping[str, list[Operation]], kernel: Operation, shapes: Mapping[str, str]
) -> Iterator[tuple[float, str]]:
    """FLOPs and precision of each matrix product and convolution of an operation."""
    if kernel.kind == "fusion":
        inner = computations[next(_called(kernel.rest))]
        for each in inner:
            yield from _products(computations, each, _shapes(inner))
        return
    sizes = [_arrays(shapes.get(name, "")) for name in kernel.operands[:2]]
    if len(sizes) < 2 or not all(sizes) or not (made := _arrays(kernel.shape)):
        return
    (kind, left) = sizes[0][0]
    (_, right) = sizes[1][0]
    labels = re.search(r"dim_labels=\w+_(\w+)->", kernel.rest)
    over = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', kernel.rest)
    if labels:
        summed = math.prod(right) / max(right[labels[1].index("o")], 1)
    elif over:
        summed = math.prod(left[int(place)] for place in re.findall(r"\d+", over[1]))
    else:
        return
    yield 2.0 * math.prod(made[0][1]) * summed, _precision(kind, kernel.rest)


def _precision(kind: str, rest: str) -> str:
    """What a product of operands of a type multiplies."""
    algorithm = re.search(r"algorithm=dot_([a-z0-9]+)_", rest)
    if kind != "f32" or algorithm:
        return algorithm[1] if algorithm else kind
    return (
        "f32"
        if re.search(r'operand_precision(=\{|":\[)[^}\]]*highest', rest, re.IGNORECASE)
        else "tf32"
    )


def group_of(rest: str, devices: int) -> int:
    """Number of devices that take part in a collective, of the ways in which a program may tell its groups.

    Args:
        rest: What follows its operands.
        devices: All devices, which are one group if it tells none.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return math.prod(sizes.get(name, 1) for name in re.findall(r"'(\w+)'", named[2]))
    return devices


def _collective(kind: str, shapes: str, devices: int, times: float) -> Collective:
    size = num_bytes(shapes) * (devices if kind == "all-gather" else 1)
    return Collective(
        kind, shapes, size, times, all(not sizes for _, sizes in _arrays(shapes)), devices
    )


def _times(
    computations: Mapping[str, list[Operation]], entry: str, lengths: Lengths
) -> tuple[dict[str, float], dict[str, float]]:
    """How often each computation runs: those whose operations run one by one, and those that are part of a fusion."""
    times: dict[str, float] = collections.defaultdict(float)
    fused: dict[str, float] = collections.defaultdict(float)

    def visit(name: str, number: float, within: bool) -> None:
        (fused if within else times)[name] += number
        for each in computations.get(name, ()):
            if each.kind == "while":
                length = _length(computations, each, computations[name])
                if length is None:
                    length = lengths(_scope(each))
                    length = 1.0 if length is None else length
                for called in _called(each.rest):
                    visit(called, number * length, within)
            elif each.kind in CALLING:
                for called in _called(each.rest):
                    visit(called, number, within or each.kind == "fusion")

    visit(entry, 1.0, False)
    return dict(times), dict(fused)


def _called(rest: str) -> Iterator[str]:
    """Names of the computations that an operation calls."""
    for place in CALLED.finditer(rest):
        after = rest[place.end() :]
        yield from NAMES.findall(
            after[: after.index("}")] if after.startswith("{") else re.split(r"[,\s]", after)[0]
        )


def _scope(loop: Operation) -> str:
    """The name of the scope that a loop is in; "" if there is none."""
    found = re.search(r'op_name="[^"]*?([^"/()]*)\)*/while"', loop.rest)
    return found[1] if found else ""


def _length(
    computations: Mapping[str, list[Operation]], loop: Operation, around: Sequence[Operation]
) -> float | None:
    """How often a loop runs; None if the program does not say."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
    if noted:
        return float(noted[1])
    named = re.search(r"condition=%?([\w.\-]+)", loop.rest)
    condition = {each.name: each for each in computations.get(named[1] if named else "", ())}
    root = next((each for each in condition.values() if each.root), None)
    if root is None or root.kind != "compare" or "direction=LT" not in root.rest:
        return None
    counter, limit = (condition.get(name) for name in root.operands)
    end = _constant(limit)
    if counter is None or counter.kind != "get-tuple-element" or end is None:
        return None
    place = re.search(r"index=(\d+)", counter.rest)
    start = _started(loop, around, int(place[1]) if place else 0)
    return max(end - start, 0.0)


def _constant(operation: Operation | None) -> float | None:
    """The value of an integer constant."""
    if operation is None or operation.kind != "constant":
        return None
    return float(operation.given)


def _started(loop: Operation, around: Sequence[Operation], place: int) -> float:
    """The first value of a loop's counter, at `place` of what the loop carries; 0 if it is not a constant."""
    by_name = {each.name: each for each in around}
    carried = by_name.get(loop.operands[0])
    if carried is None or carried.kind != "tuple":
        return 0.0
    value = by_name.get(carried.operands[place])
    while value is not None and value.kind in ("copy", "bitcast", "copy-done", "copy-start"):
        value = by_name.get(value.operands[0])
    return _constant(value) or 0.0
