"""Devices that are not here: their compilers, and what their makers publish about them.

JAX compiles for a TPU or a GPU without having one. A target is written "tpu:v5e:4x4" (name and shape) or "cuda:h100:4"
(name and number).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.exchange.plan import ExecutionPlan, Peers, make_mesh
from pfljax.planner import compiled_text
from pfljax.planner.compiled_text import Collective, Kernel, Lengths, Reading

GIB = 1 << 30
TERA = 1e12
GIGA = 1e9
LATENCY = 1e-6  # seconds of a collective besides its bytes
LAUNCH = 2e-6  # seconds of a GPU's kernel besides its bytes and FLOPs
ACCEPTED = (
    "tpu:NAME:SHAPE with {}, such as tpu:v5e:4x4, or cuda:NAME:NUMBER with {}, such as cuda:h100:8"
)


class Chip(NamedTuple):
    """What is published of a device.

    Attributes:
        memory: Bytes that a program can use.
        flops: Multiply-adds of matrices count as two: FLOP/s, in the precision that JAX uses for float32 by default
            (bfloat16 on a TPU, TF32 on a GPU), without sparsity.
        bandwidth: Bytes/s of its memory.
        link: Bytes/s that it receives from other devices: from both neighbors on one axis of a TPU's torus, by NVLink
            on a GPU.
        clock: Cycles/s of a TPU.
        cores, capability: Multiprocessors of a GPU, and its compute capability.
        peaks: FLOP/s in other precisions, as in `compiled_text.Kernel`.
    """

    memory: int
    flops: float
    bandwidth: float
    link: float
    clock: float = 0.0
    cores: int = 0
    capability: str = ""
    peaks: Mapping[str, float] = types.MappingProxyType({})


TPUS = {
    "v5e": Chip(int(15.75 * GIB), 197 * TERA, 819 * GIGA, 90 * GIGA, 1.5 * GIGA),
    "v5p": Chip(int(95.74 * GIB), 459 * TERA, 2765 * GIGA, 180 * GIGA, 1.75 * GIGA),
    "v6e": Chip(int(31.25 * GIB), 918 * TERA, 1640 * GIGA, 180 * GIGA, 1.75 * GIGA),
}
A100 = {"f32": 19.5 * TERA, "bf16": 312 * TERA, "f16": 312 * TERA, "f64": 19.5 * TERA}
HOPPER = {"f32": 67 * TERA, "bf16": 989 * TERA, "f16": 989 * TERA, "f64": 67 * TERA}
GPUS = {
    "a100": Chip(
        int(79.2 * GIB),
        156 * TERA,
        2039 * GIGA,
        300 * GIGA,
        cores=108,
        capability="major: 8",
        peaks=A100,
    ),
    "h100": Chip(
        int(79.1 * GIB),
        495 * TERA,
        3352 * GIGA,
        450 * GIGA,
        cores=132,
        capability="major: 9",
        peaks=HOPPER,
    ),
    "h200": Chip(
        int(139.8 * GIB),
        495 * TERA,
        4800 * GIGA,
        450 * GIGA,
        cores=132,
        capability="major: 9",
        peaks=HOPPER,
    ),
}
# as JAX calls them
GENERATIONS = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"}
GENERATIONS |= {"TPU v6 lite": "v6e", "TPU v6e": "v6e"}
# What XLA's compiler asks of a GPU; shared memory and clock are those of an H100, an A100's are slightly smaller.
GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} device_memory_size: {memory}
  cuda_compute_capability {{ {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "NVIDIA {name}"
"""
AMPERE_LIMITS = {"shared": 167936, "optin": 166912, "units": 64, "ghz": 1.41, "cache": 41943040}
HOPPER_LIMITS = {"shared": 233472, "optin": 232448, "units": 128, "ghz": 1.98, "cache": 52428800}
# kernels are not timed on a GPU, which takes long, or there is none
UNTUNED = {"xla_gpu_autotune_level": 0}
# libtpu looks for a TPU's machine unless it is told that it is on one, and for other users of its TPU
HERE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclasses.dataclass(frozen=True)
class PlanElsewhere(ExecutionPlan):
    """A plan for devices that are not here: what it places on them has shapes only."""

    def hold(self, leaf: Any) -> Any:
        """The shape of a host array that all clients share."""
        sharding = self.sharding(leaf, by_rows=False, leading=0)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def place(self, leaf: Any, num: int, axis: int = 0, by_rows: bool = True) -> Any:
        """The shape of a host array on the devices."""
        dims = (*leaf.shape[:axis], num, *leaf.shape[axis + 1 :])
        shape = jax.ShapeDtypeStruct(dims, leaf.dtype)
        sharding = self.sharding(shape, by_rows=by_rows, axis=axis)
        return jax.ShapeDtypeStruct(dims, leaf.dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
        name: As the user writes it, such as "tpu:v5e:4x4".
        devices: The devices.
        chip: What is published of one of them.
        options: Options of the compiler.
    """

    name: str
    devices: Sequence[Any]
    chip: Chip
    options: Mapping[str, Any]

    @property
    def rests_on(self) -> str:
        """What estimated times rest on, in words."""
        if self.chip.clock:
            return f"the compiler's estimated cycles at {self.chip.clock / GIGA:g} GHz"
        return (
            "a roofline of each kernel's FLOPs and bytes at published peak rates, "
            "and 2 us to launch it"
        )

    def plan(self, chunk: int, peers: Peers, model_devices: int = 1) -> PlanElsewhere:
        """Returns the plan with `chunk` clients at a time, and models on `model_devices`; see `ExecutionPlan`."""
        mesh = make_mesh(self.devices, model_devices)
        return PlanElsewhere(mesh, chunk, peers)


class ProgramEstimate(NamedTuple):
    """What a compiler says of a program of one round, per device.

    Attributes:
        arguments_bytes, outputs_bytes, temporaries_bytes: Memory; outputs are those that reuse no argument's memory.
        collectives_bytes: Bytes of all collectives.
        compute_milliseconds, collectives_milliseconds: Estimated times, which are added up.
        collectives: The collectives, the largest first.
        doubles: Whether it computes in 64-bit floating point.
        compile_seconds: How long compiling took here.
        unknown: Number of operations of which the compiler has no estimate, so that they count as 0.
    """

    arguments_bytes: int
    outputs_bytes: int
    temporaries_bytes: int
    collectives_bytes: float
    compute_milliseconds: float
    collectives_milliseconds: float
    collectives: Sequence[Collective]
    doubles: bool
    compile_seconds: float
    unknown: int = 0

    @property
    def total_bytes(self) -> int:
        return self.arguments_bytes + self.outputs_bytes + self.temporaries_bytes

    @property
    def milliseconds(self) -> float:
        return self.compute_milliseconds + self.collectives_milliseconds


class TooLarge(NamedTuple):
    """A program that its compiler refuses since it needs too much memory; `text` is the compiler's."""

    text: str
    compile_seconds: float


def find(name: str) -> Target:
    """Finds devices by their name.

    Raises:
        ArgumentError: if there are no such devices, or their compiler is not installed.
    """
    platform, _, rest = name.partition(":")
    kind, _, shape = rest.partition(":")
    if platform == "tpu" and kind in TPUS and re.fullmatch(r"\d+(x\d+){1,2}", shape):
        return _tpu(name, kind, shape)
    if platform == "cuda" and kind in GPUS and re.fullmatch(r"[1-9]\d{0,3}", shape):
        return _gpu(name, kind, int(shape))
    accepted = ACCEPTED.format(", ".join(TPUS), ", ".join(GPUS))
    raise ArgumentError("target", f"accepted: {accepted}", name)


def _tpu(name: str, kind: str, shape: str) -> Target:
    """TPUs that are connected in a shape such as "4x4"."""
    optional.load("libtpu", "target", name)
    try:
        with _environment(HERE):
            topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{shape}")
    except jax.errors.JaxRuntimeError as error:
        text = (
            "no such shape; accepted: those that are sold, "
            "such as 2x2, 4x4, 8x8, 16x16 (v5e, v6e) or 4x4x4 (v5p)"
        )
        if "INVALID_ARGUMENT" not in str(error):
            first_line = str(error).splitlines()[0]
            text = f"its compiler does not start: {first_line}"
        raise ArgumentError("target", text, name) from error
    return Target(name, topology.devices, TPUS[kind], {})


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, and removes them again."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _gpu(name: str, kind: str, number: int) -> Target:
    """A machine with a number of GPUs."""
    optional.load("jax_cuda12_plugin", "target", name)
    jax.devices()  # finds the compilers of all platforms
    chip = GPUS[kind]
    limits = AMPERE_LIMITS if kind == "a100" else HOPPER_LIMITS
    config = GPU.format(
        name=kind.upper(),
        cores=chip.cores,
        capability=chip.capability,
        memory=chip.memory,
        bandwidth=int(chip.bandwidth),
        **limits,
    )
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        topology=f"1x1x{number}",
        target_config=config,
    )
    return Target(name, topology.devices, chip, UNTUNED)


def compile_for(
    target: Target, program: jax.stages.Lowered, lengths: Lengths
) -> ProgramEstimate | TooLarge:
    """Compiles a program of a round for a target and estimates what it needs.

    Args:
        target: The devices.
        program: A lowered program whose arguments are on the target's devices.
        lengths: As in `compiled_text.read`.
    """
    begin = time.perf_counter()
    try:
        compiled = program.compile(compiler_options=dict(target.options))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "memory" not in str(error):
            raise
        return TooLarge(str(error), time.perf_counter() - begin)
    seconds = time.perf_counter() - begin
    reading = compiled_text.read(compiled.as_text() or "", len(target.devices), lengths)
    memory: Any = compiled.memory_analysis()
    collectives = reading.collectives
    all_bytes = [collective.bytes * collective.times for collective in collectives]
    all_seconds = [collective.times * seconds_of(collective, target) for collective in collectives]
    return ProgramEstimate(
        arguments_bytes=memory.argument_size_in_bytes,
        outputs_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries_bytes=memory.temp_size_in_bytes,
        collectives_bytes=sum(all_bytes),
        compute_milliseconds=1e3 * _compute_seconds(target.chip, reading),
        collectives_milliseconds=1e3 * sum(all_seconds),
        collectives=collectives,
        doubles=reading.doubles,
        compile_seconds=seconds,
        unknown=reading.unknown,
    )


def _compute_seconds(chip: Chip, reading: Reading) -> float:
    """A TPU's cycles over its clock; on a GPU, each kernel takes as long as computing or moving its bytes at peak."""
    if chip.clock:
        return reading.cycles / chip.clock

    def seconds_of_kernel(kernel: Kernel) -> float:
        peak_flops = chip.peaks.get(kernel.precision, chip.flops)
        moving = kernel.bytes / chip.bandwidth
        computing = kernel.flops / peak_flops
        return kernel.times * (LAUNCH + max(moving, computing))

    return sum(seconds_of_kernel(kernel) for kernel in reading.kernels)


def seconds_of(collective: Collective, target: Target) -> float:
    """Estimated seconds of one collective: each device receives the other devices' parts; a sum is two such passes.

    A hop around the ring comes from one neighbor, so on a TPU it has half of the link's rate.
    """
    devices = collective.devices or len(target.devices)
    if devices == 1:
        return 0.0
    if collective.kind == "all-reduce":
        passes = 2.0
    elif collective.kind == "collective-permute":
        sides = 2 if target.chip.clock else 1
        passes = sides * devices / (devices - 1)
    else:
        passes = 1.0
    received_bytes = passes * (devices - 1) / devices * collective.bytes
    return LATENCY + received_bytes / target.chip.link
