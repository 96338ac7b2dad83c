"""Where a round's time goes: the arithmetic on made-up events, planes of other devices, and real traces."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pfljax.exchange.plan import make_plan
from pfljax.exchange.routes import AXIS
from pfljax.planner import profiling
from pfljax.planner.profiling import Op


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0),
        ([(5, 7)], 2),
        ([(0, 10), (2, 3), (4, 10)], 10),  # nested
        ([(4, 8), (0, 5)], 8),  # overlapping, out of order
        ([(0, 1), (1, 2), (5, 6)], 3),
        ([(0, 9), (1, 2), (3, 4), (10, 12)], 11),
    ],
)
def test_time_is_covered_once(intervals, expected):
    assert profiling.covered(intervals) == expected


def test_shares_of_two_devices():
    second = 1_000_000_000

    def op(device, start, stop, collective=False):
        return Op(device, start * second, stop * second, collective)

    ops = [
        op("CPU:0", 0, 8),  # a loop ...
        op("CPU:0", 1, 3),  # ... its body
        op("CPU:0", 2, 5, True),
        op("CPU:0", 4, 6, True),
        op("CPU:1", 0, 2),
        op("CPU:1", 4, 6, True),  # the same moment as on the other device, and its own
    ]
    # (8 - 4, 4, 2) and (2, 2, 6) of 10
    assert profiling.shares(ops, 10.0) == pytest.approx((3.0, 3.0, 4.0))
    assert profiling.shares(ops, 4.0) == pytest.approx((1.0, 3.0, 0.0))  # never more than there was


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (name, True)
        for name in (
            "all-reduce.21",
            "all-gather-start",
            "psum.14",
            "reduce_scatter.7",
            "all-to-all",
        )
    ]
    + [
        (name, True)
        for name in (
            "%all-reduce.3 = f32[8] all-reduce(%x)",
            "collective-permute-done.1.clone",
            "recv.2",
        )
    ]
    + [
        (name, True)
        for name in (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)",
            "ppermute",
        )
    ]
    + [
        (name, False)
        for name in (
            "reduce.4",
            "gather.1",
            "all_gather_bitcast_fusion",
            "send_fusion.1",
            "while.2",
            "",
        )
    ],
)
def test_names_of_collectives(name, expected):
    assert bool(profiling.COLLECTIVE.match(name)) == expected


def trace_of(plane, lines):
    """A trace of one plane; lines: name -> [(event, start, duration in ns, stats)]."""
    names = sorted({event[0] for events in lines.values() for event in events})
    keys = sorted({key for events in lines.values() for event in events for key in event[3]})

    def stat(key, value):
        return f"stats {{ metadata_id: {keys.index(key) + 1} " + (
            f'str_value: "{value}" }}' if isinstance(value, str) else f"int64_value: {value} }}"
        )

    text = f'planes {{ name: "{plane}"\n'
    for number, (line, events) in enumerate(lines.items()):
        text += f'lines {{ id: {number} name: "{line}" timestamp_ns: 0\n'
        for name, start, duration, stats in events:
            all_stats = " ".join(stat(*item) for item in stats.items())
            text += f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {1000 * start} "
            text += f"duration_ps: {1000 * duration} {all_stats} }}\n"
        text += "}\n"
    for kind, values in (("event", names), ("stat", keys)):
        for number, value in enumerate(values, 1):
            text += (
                f'{kind}_metadata {{ key: {number} value {{ id: {number} name: "{value}" }} }}\n'
            )
    data = jax.profiler.ProfileData
    return data.from_serialized_xspace(data.text_proto_to_serialized_xspace(text + "}"))


def test_operations_of_a_cpu():
    stats = {"hlo_op": "x", "device_ordinal": 1}
    one = [
        ("while.1", 0, 1, stats | {"_p": 7}),
        ("psum.3", 2, 4, stats | {"_p": 8}),
        ("Rendezvous", 3, 2, {}),
    ]
    two = [
        ("end: psum.3", 6, 1, {"_c": 8}),
        ("end: while.1", 20, 1, {"_c": 7}),
        ("end: while.1", 90, 1, {"_c": 1}),
    ]
    ops = profiling.read(trace_of("/host:CPU", {"one": one, "two": two}))
    assert ops == [Op("CPU:1", 0, 20, False), Op("CPU:1", 2, 6, True)]


def test_operations_of_a_gpu():
    lines = {
        "Stream #1(Compute)": [("gemm", 0, 5, {"hlo_op": "dot.1"}), ("MemcpyD2H", 9, 5, {})],
        "Stream #2": [("ncclDevKernel_AllReduce", 4, 3, {"hlo_op": "all-reduce-start"})],
        "XLA Modules": [("jit_segment", 0, 100, {})],
    }
    ops = profiling.read(trace_of("/device:GPU:0", lines))
    assert ops == [Op("/device:GPU:0", 0, 5, False), Op("/device:GPU:0", 4, 7, True)]


def test_operations_of_a_tpu():
    lines = {
        "XLA Ops": [
            ("%fusion.3 = f32[] fusion()", 0, 5, {}),
            ("%all-gather.1 = f32[8] all-gather(%a)", 5, 3, {}),
        ],
        "Steps": [("1", 0, 100, {})],
    }
    ops = profiling.read(trace_of("/device:TPU:1", lines))
    assert ops == [Op("/device:TPU:1", 0, 5, False), Op("/device:TPU:1", 5, 8, True)]


def dispatch_of(devices, communicates, log):
    """A warm program on `devices`, as a round; what each device has is summed, or not."""
    plan = make_plan("map", devices=devices)

    def on_device(x):
        x = jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x) @ x, x)
        return jax.lax.psum(x, AXIS) if communicates else x

    spec = PartitionSpec(AXIS)
    program = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=spec,
        out_specs=PartitionSpec() if communicates else spec,
        check_vma=False,
    )
    x = np.ones((64 * devices, 64), np.float32)
    x = jax.device_put(x, plan.sharding(x, by_rows=True))
    program = jax.jit(program).lower(x).compile()

    def dispatch():
        jax.block_until_ready(program(x))
        log.append(1)

    return dispatch


@pytest.mark.parametrize(
    ("devices", "communicates"),
    [
        (1, False),
        (2, True),
        pytest.param(4, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.long),
    ],
)
def test_a_real_trace(tmp_path, devices, communicates):
    log = []
    dispatch = dispatch_of(devices, communicates, log)
    dispatch()
    shares = profiling.profile(tmp_path, dispatch)
    assert len(log) == 1 + 3 + 3  # warm-up, untraced and traced rounds
    assert shares.compute + shares.exchange + shares.host == pytest.approx(shares.wall)
    assert min(shares.compute, shares.untraced) > 0
    assert shares.host >= 0
    assert (shares.exchange > 0) == communicates
    files = list(tmp_path.rglob("*.xplane.pb"))
    assert len(files) == 1
    ops = profiling.read(jax.profiler.ProfileData.from_file(str(files[0])))
    assert {op.device for op in ops} == {f"CPU:{number}" for number in range(devices)}
    assert sum(op.collective for op in ops) == (3 * devices if communicates else 0)
    assert profiling.describe(shares).endswith(f"; trace in {tmp_path}")


def test_an_older_trace_is_left_alone_and_not_read(tmp_path):
    profiling.profile(tmp_path, dispatch_of(2, True, []))
    first = set(tmp_path.rglob("*.xplane.pb"))
    shares = profiling.profile(tmp_path, dispatch_of(2, False, []))
    assert shares.exchange == 0
    assert first < set(tmp_path.rglob("*.xplane.pb"))


def test_a_trace_without_device_events(tmp_path):
    shares = profiling.profile(tmp_path, lambda: None)
    assert math.isnan(shares.compute)
    assert math.isnan(shares.exchange)
    assert math.isnan(shares.host)
    assert "the trace has no device events" in profiling.describe(shares)


def test_the_line():
    shares = profiling.Shares(0.02, 0.015, 0.004, 0.001, 0.01, Path("traces"))
    line = "profile: 20.00 ms per round (10.00 ms untraced): compute 75 %, exchange 20 %, host 5 %; trace in traces"
    assert profiling.describe(shares) == line
