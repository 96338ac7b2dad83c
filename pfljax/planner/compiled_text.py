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
COPIES = ("copy", "bitcast", "copy-done", "copy-start")
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
    operands_text: str
    rest: str
    root: bool

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        return NAMES.findall(self.operands_text)


Computations = Mapping[str, list[Operation]]  # the operations of each computation, by its name


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
    times, fused_times = _times(computations, entry, lengths)
    cycles = 0.0
    unknown = 0
    kernels: list[Kernel] = []
    for name, number in times.items():
        shapes = _shapes(computations[name])
        for operation in computations[name]:
            is_collective = _collective_kind(operation) is not None
            if not number or is_collective or operation.kind in NO_WORK:
                continue
            estimated = _cycles(operation.rest)
            if estimated is None:
                unknown += 1
            else:
                cycles += number * estimated
            kernels.append(_kernel(computations, operation, shapes, number))

    return Reading(
        cycles,
        collectives=_all_collectives(computations, times, fused_times, devices),
        kernels=kernels,
        doubles=re.search(r"\b(f64|c128)\[", text) is not None,
        unknown=unknown,
    )


def _kernel(
    computations: Computations, operation: Operation, shapes: Mapping[str, str], times: float
) -> Kernel:
    """An operation that is no collective and runs on its own."""
    products = list(_products(computations, operation, shapes))
    flops = sum(size for size, _ in products)
    _, precision = max(products, default=(0.0, ""))
    return Kernel(times, _moved(computations, operation, shapes), flops, precision)


def _all_collectives(
    computations: Computations,
    times: Mapping[str, float],
    fused_times: Mapping[str, float],
    devices: int,
) -> list[Collective]:
    """All collectives, the largest first; those that are alike are counted together."""
    counts: dict[tuple[str, str, int], float] = collections.defaultdict(float)
    chains: dict[str, tuple[tuple[str, str, int], float]] = {}
    for name in {**times, **fused_times}:
        number = times.get(name, 0.0) + fused_times.get(name, 0.0)
        shapes = _shapes(computations[name])
        for operation in computations[name]:
            kind = _collective_kind(operation)
            if kind is None:
                continue
            operands = [_without_layout(shapes.get(operand, "")) for operand in operation.operands]
            alike = (kind, " ".join(operands), group_of(operation.rest, devices))
            chain = CHAIN.search(operation.rest)
            if chain is None:
                counts[alike] += number
                continue
            # The pieces of a chain are one collective, which runs as often as the rarest piece.
            _, fewest = chains.get(chain[1], (alike, number))
            chains[chain[1]] = (alike, min(number, fewest))
    for alike, number in chains.values():
        counts[alike] += number

    all_collectives: list[Collective] = []
    for (kind, shapes_of_operands, members), number in counts.items():
        all_collectives.append(_collective(kind, shapes_of_operands, members, number))
    all_collectives.sort(key=lambda collective: -collective.bytes * collective.times)
    return all_collectives


def _collective_kind(operation: Operation) -> str | None:
    """Which of `COLLECTIVES` an operation is or starts; None: none."""
    kind = operation.kind.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def parse(text: str) -> tuple[dict[str, list[Operation]], str]:
    """Returns the operations of each computation by its name, and the name of the entry."""
    computations: dict[str, list[Operation]] = {}
    entry = ""
    current: list[Operation] | None = None
    for line in text.splitlines():
        head = HEAD.match(line)
        if head:
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif current is not None:
            operation = _operation(line)
            if operation is not None:
                current.append(operation)
    return computations, entry


def _operation(line: str) -> Operation | None:
    """The operation of a line "NAME = SHAPE KIND(OPERANDS), REST"; None if it has none."""
    start = LINE.match(line)
    if start is None:
        return None
    without_comments = re.sub(r"/\*.*?\*/", "", line[start.end() :])
    shape, call = _shape_and_rest(without_comments)
    kind, _, arguments = call.partition("(")
    operands = _until_closed(arguments)
    return Operation(
        name=start[2],
        kind=kind,
        shape=shape,
        operands_text=operands,
        rest=arguments[len(operands) + 1 :],
        root=start[1] is not None,
    )


def num_bytes(shape: str) -> int:
    """Bytes of an array or a tuple of arrays, from its shape as text."""
    return sum(_width(kind) * math.prod(sizes) for kind, sizes in _arrays(shape))


def _arrays(shape: str) -> list[tuple[str, list[int]]]:
    """Types and sizes of the arrays of a shape."""
    arrays: list[tuple[str, list[int]]] = []
    for kind, listed in ARRAY.findall(_without_layout(shape)):
        sizes = [int(size) for size in listed.split(",") if size]
        arrays.append((kind, sizes))
    return arrays


def _shapes(operations: Sequence[Operation]) -> dict[str, str]:
    """Shapes of what operations return, by their names."""
    return {operation.name: operation.shape for operation in operations}


def _width(kind: str) -> int:
    """Bytes of an element of a type, at least 1 ("pred", and types of fewer bits)."""
    digits = re.search(r"\d+", kind)
    if digits and kind[0] in "sufbc":
        return max(int(digits[0]) // 8, 1)
    return 0 if kind == "token" else 1


def _without_layout(shape: str) -> str:
    """A shape without the order of its axes in memory."""
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
    for parenthesis in re.finditer(r"[()]", text):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return text[: parenthesis.start()]
    return text


def _cycles(rest: str) -> int | None:
    """The compiler's estimate for an operation; 0 if it says nothing, None if it says that it has none."""
    estimate = re.search(r'"estimated_cycles":"(\d+)"', rest)
    cycles = int(estimate[1]) if estimate else 0
    return cycles if cycles < UNKNOWN else None


def _moved(computations: Computations, kernel: Operation, shapes: Mapping[str, str]) -> int:
    """Bytes that an operation reads and writes. Of what is sliced or replaced in part, only this part counts."""
    if kernel.kind in SLICES:
        return 2 * num_bytes(kernel.shape)
    if kernel.kind == "dynamic-update-slice":
        return 2 * num_bytes(shapes.get(kernel.operands[1], ""))
    if kernel.kind == "fusion":
        inner = computations[next(_called(kernel.rest))]
        return _read_by_fusion(inner) + _written_by_fusion(inner)
    read = [num_bytes(shapes.get(name, "")) for name in kernel.operands]
    return num_bytes(kernel.shape) + sum(read)


def _read_by_fusion(inner: Sequence[Operation]) -> int:
    """Bytes that a fusion of these operations reads."""
    replaced: set[str] = set()
    for operation in inner:
        if operation.kind == "dynamic-update-slice":
            replaced.add(operation.operands[0])

    read = 0
    for parameter in inner:
        if parameter.kind != "parameter":
            continue
        name = parameter.name
        users = [user for user in inner if name in user.operands]
        is_sliced = all(user.kind in SLICES and user.operands[0] == name for user in users)
        if is_sliced:
            read += sum(num_bytes(user.shape) for user in users)
        elif name not in replaced:
            read += num_bytes(parameter.shape)
    return read


def _written_by_fusion(inner: Sequence[Operation]) -> int:
    """Bytes that a fusion of these operations writes."""
    shapes = _shapes(inner)
    by_name = {operation.name: operation for operation in inner}
    root = next((operation for operation in inner if operation.root), None)
    if root is None:
        return 0
    results = [by_name.get(name) for name in root.operands] if root.kind == "tuple" else [root]

    written = 0
    for result in results:
        if result is None:
            continue
        if result.kind == "dynamic-update-slice":
            written += num_bytes(shapes.get(result.operands[1], ""))
        else:
            written += num_bytes(result.shape)
    return written


def _products(
    computations: Computations, kernel: Operation, shapes: Mapping[str, str]
) -> Iterator[tuple[float, str]]:
    """FLOPs and precision of each matrix product and convolution of an operation."""
    if kernel.kind == "fusion":
        inner = computations[next(_called(kernel.rest))]
        inner_shapes = _shapes(inner)
        for operation in inner:
            yield from _products(computations, operation, inner_shapes)
        return

    # The first array of each of two operands and of the result.
    operands = [_arrays(shapes.get(name, "")) for name in kernel.operands[:2]]
    result = _arrays(kernel.shape)
    if len(operands) < 2 or not all(operands) or not result:
        return
    kind, left = operands[0][0]
    _, right = operands[1][0]
    _, sizes = result[0]

    # Number of products that are summed up for one element of the result.
    labels = re.search(r"dim_labels=\w+_(\w+)->", kernel.rest)
    contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', kernel.rest)
    if labels:
        output_axis = labels[1].index("o")
        summed = math.prod(right) / max(right[output_axis], 1)
    elif contracted:
        axes = re.findall(r"\d+", contracted[1])
        summed = math.prod(left[int(axis)] for axis in axes)
    else:
        return
    yield 2.0 * math.prod(sizes) * summed, _precision(kind, kernel.rest)


def _precision(kind: str, rest: str) -> str:
    """What a product of operands of a type multiplies."""
    algorithm = re.search(r"algorithm=dot_([a-z0-9]+)_", rest)
    if algorithm:
        return algorithm[1]
    if kind != "f32":
        return kind
    highest = re.search(r'operand_precision(=\{|":\[)[^}\]]*highest', rest, re.IGNORECASE)
    return "f32" if highest else "tf32"


def group_of(rest: str, devices: int) -> int:
    """Number of devices that take part in a collective, of the ways in which a program may tell its groups.

    Args:
        rest: What follows its operands.
        devices: All devices, which are one group if it tells none.
    """
    # replica_groups={{0,1},{2,3}}: all groups are listed.
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    if listed:
        return listed[1].count(",") + 1
    # replica_groups=[2,2]: number of groups and of members.
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    if counted:
        return int(counted[1])
    # replica_groups=mesh['a'=2,'b'=2] {'a'}: axes of a mesh.
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", rest)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = re.findall(r"'(\w+)'", named[2])
        return math.prod(sizes.get(axis, 1) for axis in axes)
    return devices


def _collective(kind: str, shapes: str, devices: int, times: float) -> Collective:
    copies = devices if kind == "all-gather" else 1
    return Collective(
        kind,
        shapes,
        bytes=num_bytes(shapes) * copies,
        times=times,
        scalars=all(not sizes for _, sizes in _arrays(shapes)),
        devices=devices,
    )


def _times(
    computations: Computations, entry: str, lengths: Lengths
) -> tuple[dict[str, float], dict[str, float]]:
    """How often each computation runs: those whose operations run one by one, and those that are part of a fusion."""
    times: dict[str, float] = collections.defaultdict(float)
    fused_times: dict[str, float] = collections.defaultdict(float)

    def length_of(loop: Operation, around: Sequence[Operation]) -> float:
        """How often a loop runs: as the program says, else as the caller says for its scope, else once."""
        length = _length(computations, loop, around)
        if length is None:
            length = lengths(_scope(loop))
        return 1.0 if length is None else length

    def visit(name: str, number: float, is_fused: bool) -> None:
        """Counts a computation that runs `number` times more, and those that it calls."""
        counts = fused_times if is_fused else times
        counts[name] += number
        operations = computations.get(name, [])
        for operation in operations:
            if operation.kind == "while":
                length = length_of(operation, operations)
                for called in _called(operation.rest):
                    visit(called, number * length, is_fused)
            elif operation.kind in CALLING:
                within_fusion = is_fused or operation.kind == "fusion"
                for called in _called(operation.rest):
                    visit(called, number, within_fusion)

    visit(entry, 1.0, is_fused=False)
    return dict(times), dict(fused_times)


def _called(rest: str) -> Iterator[str]:
    """Names of the computations that an operation calls."""
    for attribute in CALLED.finditer(rest):
        value = rest[attribute.end() :]
        if value.startswith("{"):
            names = value[: value.index("}")]
        else:
            names = re.split(r"[,\s]", value)[0]
        yield from NAMES.findall(names)


def _scope(loop: Operation) -> str:
    """The name of the scope that a loop is in; "" if there is none."""
    scope = re.search(r'op_name="[^"]*?([^"/()]*)\)*/while"', loop.rest)
    return scope[1] if scope else ""


def _length(
    computations: Computations, loop: Operation, around: Sequence[Operation]
) -> float | None:
    """How often a loop runs; None if the program does not say."""
    trip_count = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
    if trip_count:
        return float(trip_count[1])

    # Its condition compares a counter with a constant: counter < end.
    called = re.search(r"condition=%?([\w.\-]+)", loop.rest)
    operations = computations.get(called[1], []) if called else []
    root = next((operation for operation in operations if operation.root), None)
    if root is None or root.kind != "compare" or "direction=LT" not in root.rest:
        return None
    by_name = {operation.name: operation for operation in operations}
    counter, limit = (by_name.get(name) for name in root.operands)
    end = _constant(limit)
    if counter is None or counter.kind != "get-tuple-element" or end is None:
        return None

    # The counter starts as the operand of this position.
    index = re.search(r"index=(\d+)", counter.rest)
    position = int(index[1]) if index else 0
    start = _first_value(loop, around, position)
    return max(end - start, 0.0)


def _constant(operation: Operation | None) -> float | None:
    """The value of an integer constant."""
    if operation is None or operation.kind != "constant":
        return None
    return float(operation.operands_text)


def _first_value(loop: Operation, around: Sequence[Operation], position: int) -> float:
    """The first value of a loop's counter, at `position` of what the loop carries; 0 if it is not a constant."""
    by_name = {operation.name: operation for operation in around}
    carry = by_name.get(loop.operands[0])
    if carry is None or carry.kind != "tuple":
        return 0.0
    value = by_name.get(carry.operands[position])
    while value is not None and value.kind in COPIES:
        value = by_name.get(value.operands[0])
    return _constant(value) or 0.0
