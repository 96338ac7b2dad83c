"""Reading compiled programs: a program written by hand, whose figures follow from its lines."""

import pytest

from pfljax.planner import compiled_text

LOOPS = """HloModule jit_round, is_scheduled=true

%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[]{:T(128)}, /*index=1*/f32[8,16]{1,0:T(8,128)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %twice = f32[8,16]{1,0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
  %sum = f32[8,16]{1,0} all-reduce(%twice), replica_groups=mesh['clients'=4] {'clients'}, to_apply=%add
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %sum)
}

%fused (q: f32[8,16]) -> f32[8,16] {
  %q = f32[8,16]{1,0} parameter(0)
  ROOT %more = f32[8,16]{1,0} add(%q, %q)
}

%condition (c: (s32[], f32[8,16])) -> pred[] {
  %c = (s32[], f32[8,16]{1,0}) parameter(0)
  %limit = s32[] constant(7)
  %counter = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%counter, %limit), direction=LT
}

%asked (d: (s32[], f32[8,16])) -> pred[] {
  %d = (s32[], f32[8,16]{1,0}) parameter(0)
  %own = s32[] get-tuple-element(%d), index=0
  ROOT %less = pred[] compare(%own, %own), direction=LT
}

ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %start = s32[] constant(2)
  %begin = s32[] copy(%start)
  %given = (s32[], f32[8,16]{1,0}) tuple(%begin, %a)
  %loop = (s32[], f32[8,16]{1,0}) while(%given), condition=%CONDITION, body=%body, metadata={op_name="jit(f)/SCOPE"}
  %part = f32[8,16]{1,0} get-tuple-element(%loop), index=1
  %gathered = f32[32,16]{1,0} all-gather(%part), dimensions={0}
  %none = f32[8,16] fusion(%part), calls=%fused, backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %end = f32[8,16]{1,0} fusion(%part), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"3"}
}
"""


def program(condition, scope="while"):
    return LOOPS.replace("CONDITION", condition).replace("SCOPE", scope)


def collectives(reading):
    return {each.kind: (each.bytes, each.times, each.scalars) for each in reading.collectives}


def test_loops_of_known_length_are_weighed():
    found = compiled_text.read(program("condition"), devices=4)
    assert found.cycles == (7 - 2) * 100 + 3  # from 2 to 7; what has no estimate does not count
    assert found.unknown == 1
    size = 8 * 16 * 4
    assert collectives(found) == {
        "all-reduce": (size, 5, False),
        "all-gather": (4 * size, 1, False),
    }
    assert not found.doubles


@pytest.mark.parametrize("scope", ["vmap(jit(client))/steps/while", "vmap(steps)/while"])
def test_loops_that_depend_on_data_are_weighed_by_their_scope(scope):
    text = program("asked", scope)
    assert compiled_text.read(text, 4, {"steps": 6.5}.get).cycles == 6.5 * 100 + 3
    assert compiled_text.read(text, 4, {"rest_32_of_40": 6.5}.get).cycles == 100 + 3
    noted = text.replace('while"}', 'while"}, backend_config={"known_trip_count":{"n":"11"}}')
    assert compiled_text.read(noted, 4, {"steps": 6.5}.get).cycles == 11 * 100 + 3


def test_kernels_count_what_they_read_write_and_multiply():
    text = """
%product (l: f32[4,8,2], r: f32[4,2,3], whole: f32[100,5], at: s32[]) -> f32[4,8,3] {
  %l = f32[4,8,2]{2,1,0} parameter(0)
  %r = f32[4,2,3]{2,1,0} parameter(1)
  %whole = f32[100,5]{1,0} parameter(2)
  %at = s32[] parameter(3)
  %row = f32[1,5]{1,0} dynamic-slice(%whole, %at, %at), dynamic_slice_sizes={1,5}
  ROOT %made = f32[4,8,3]{2,1,0} dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}
}

ENTRY %main (l: f32[4,8,2], r: f32[4,2,3], w: f32[100,5], i: s32[]) -> f32[4,8,3] {
  %l = f32[4,8,2]{2,1,0} parameter(0)
  %r = f32[4,2,3]{2,1,0} parameter(1)
  %w = f32[100,5]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %image = f32[2,6,6,3]{3,2,1,0} parameter(4)
  %filter = f32[3,3,3,8]{3,2,1,0} parameter(5)
  %conv = (f32[2,6,6,8]{3,2,1,0}, u8[0]{0}) custom-call(%image, %filter), window={size=3x3}, dim_labels=b01f_01io->b01f
  ROOT %f = f32[4,8,3]{2,1,0} fusion(%l, %r, %w, %i), kind=kOutput, calls=%product
}
"""
    kernels = sorted(compiled_text.read(text, 1).kernels, key=lambda each: each.flops)
    product, convolution = kernels
    assert product.flops == 2 * 4 * 8 * 3 * 2
    read = 4 * 8 * 2 + 4 * 2 * 3 + 5 + 1  # of the large array only a row, and where it is
    assert product.bytes == 4 * (read + 4 * 8 * 3)
    assert convolution.flops == 2 * (2 * 6 * 6 * 8) * (3 * 3 * 3)


@pytest.mark.parametrize(
    ("kind", "said", "precision"),
    [
        ("f32", "", "tf32"),
        ("f32", ", operand_precision={high,high}", "tf32"),
        ("f32", ", operand_precision={highest,highest}", "f32"),
        (
            "f32",
            ', backend_config={"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}',
            "f32",
        ),
        ("f32", ", algorithm=dot_bf16_bf16_f32", "bf16"),
        ("bf16", "", "bf16"),
        ("f16", ", operand_precision={highest,highest}", "f16"),
    ],
)
def test_products_have_the_precision_of_their_operands_or_what_is_asked_for(kind, said, precision):
    text = f"""
ENTRY %main (l: {kind}[8,2], r: {kind}[2,3]) -> f32[8,3] {{
  %l = {kind}[8,2]{{1,0}} parameter(0)
  %r = {kind}[2,3]{{1,0}} parameter(1)
  ROOT %made = f32[8,3]{{1,0}} dot(%l, %r), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{said}
}}
"""
    (product,) = compiled_text.read(text, 1).kernels
    assert (product.flops, product.precision) == (2 * 8 * 3 * 2, precision)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 30),
        ("(s32[2]{0}, pred[7])", 15),
        ("f64[2]", 16),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert compiled_text.num_bytes(shape) == size


@pytest.mark.parametrize(
    ("told", "devices"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true", 4),
        ("replica_groups=mesh['clients'=2,'model'=4] {'model'}, to_apply=%add", 4),
        ("replica_groups=mesh['clients'=2,'model'=4] {'clients','model'}", 8),
        ("replica_groups={}, to_apply=%add", 8),
        ("source_target_pairs={{0,2},{2,0}}", 8),
    ],
)
def test_groups_of_collectives(told, devices):
    assert compiled_text.group_of(told, 8) == devices


def test_a_gather_counts_the_devices_of_its_group():
    """A part of f32[8,16] from each of 2 devices of 4."""
    text = program("condition").replace(
        "all-gather(%part), ", "all-gather(%part), replica_groups={{0,1},{2,3}}, "
    )
    (found,) = (
        each for each in compiled_text.read(text, 4).collectives if each.kind == "all-gather"
    )
    assert (found.devices, found.bytes) == (2, 2 * 8 * 16 * 4)


def test_doubles_are_seen():
    assert compiled_text.read(program("condition").replace("f32[32,16]", "f64[32,16]"), 4).doubles


def test_a_collective_in_pieces_counts_once():
    """A TPU's compiler spreads one gather over fusions in a row, and names it in each of them."""
    piece = "%fused_N (q: f32[8,16]) -> f32[32,16] {\n  %q = f32[8,16]{1,0} parameter(0)\n  ROOT %g = f32[32,16]{1,0} "
    piece += (
        'all-gather(%q), channel_id=4, dimensions={0}, frontend_attributes={chain_id="0"}\n}\n\n'
    )
    calls = [f"  %w{n} = f32[32,16]{{1,0}} fusion(%part), calls=%fused_{n}\n" for n in range(3)]
    text = program("condition").replace(
        "ENTRY", "".join(piece.replace("_N", f"_{n}") for n in range(3)) + "ENTRY"
    )
    text = text.replace("  %gathered", "".join(calls) + "  %gathered")
    # and %gathered
    assert collectives(compiled_text.read(text, 4))["all-gather"] == (4 * 8 * 16 * 4, 1 + 1, False)
