"""Tests of the counts in lock-step execution, and of the costs computed from these counts."""

import pytest
import torch

from .. import build, counting, machine_code, toolkit
from ..backend import executor
from ..cases import Case
from .snippets import run

pytestmark = pytest.mark.skipif(
    toolkit.missing() is not None, reason=f"not on this machine: {toolkit.missing()}"
)
SYMBOLS = {"together": "_Z8togetherPKlPl", "loops": "_Z5loopsPii", "fills": "_Z5fillsPii"}


def counted(body, *tensors, threads=32, shared=0):
    """{opcode: (issues, lanes, sectors)}, (sectors read, sectors written, launches)."""
    executor().configure(0)
    run(body, *tensors, threads=threads, shared=shared)
    totals, report = executor().counts().split("\n\n")
    rows = [line.split() for line in report.splitlines()[1:]]
    found = {row[-1]: tuple(map(int, row[1:-1])) for row in rows}
    return found, tuple(map(int, totals.split()[:3]))


def test_active_lanes():
    """In each of 3 warps, lanes below 8 branch and later reconverge with the others."""
    body = """
and.b32 %r1, %r0, 31;
setp.lt.u32 %p1, %r1, 8;
@%p1 bra BELOW;
add.s32 %r2, %r1, 1;
bra MEET;
BELOW:
sub.s32 %r2, %r1, 1;
MEET:
@%p1 xor.b32 %r3, %r2, 1;
"""
    rows, _ = counted(body, threads=96)
    assert rows["setp.lt.u32"] == (3, 96, 0)
    assert rows["add.s32"] == (3, 72, 0)
    assert rows["sub.s32"] == (3, 24, 0)
    assert rows["xor.b32"] == (3, 24, 0)


@pytest.mark.parametrize(
    "stride, first, sectors", [(4, 0, 4), (4, 4, 5), (8, 0, 8), (32, 0, 32), (64, 0, 32), (0, 0, 1)]
)
@pytest.mark.parametrize("access", ["ld", "st"])
def test_sectors_of_device_memory(access, stride, first, sectors):
    """Strided accesses of a warp. The accesses that follow hit the cache."""
    memory = torch.zeros(640, dtype=torch.int32)
    start = -memory.data_ptr() % 32 + first
    order = "ld.global.u32 %r2, [%rd2];" if access == "ld" else "st.global.u32 [%rd2], %r2;"
    if access == "st" and stride == 0:
        order = "@!%p1 " + order  # or lanes race
    body = f"""
setp.ne.s32 %p1, %r0, 0;
mad.lo.s32 %r1, %r0, {stride}, {start};
cvt.u64.u32 %rd1, %r1;
add.s64 %rd2, %rd0, %rd1;
{order}
{order.replace("u32", "b32")}
"""
    rows, totals = counted(body, memory)
    lanes = 1 if order.startswith("@") else 32
    assert rows[f"{access}.global.u32"] == (1, lanes, sectors)
    assert totals == ((sectors, 0, 1) if access == "ld" else (0, sectors, 1))


def test_written_sectors_are_not_read_from_memory():
    out = torch.zeros(40)
    start = -out.data_ptr() % 32
    body = f"""
mad.lo.s32 %r1, %r0, 4, {start};
cvt.u64.u32 %rd1, %r1;
add.s64 %rd2, %rd0, %rd1;
st.global.u32 [%rd2], %r0;
ld.global.u32 %r2, [%rd2];
"""
    assert counted(body, out)[1] == (0, 4, 1)


def cost(kernel, *arguments):
    executor().load(*toolkit.ptx([build.HERE / "counted.cu"]))
    loaded = SYMBOLS[kernel]

    def call(ops, _):
        executor().launch(loaded, 1, 32, *arguments)

    found = counting.count(Case(kernel, "", 1, 0, 1, call), 1)
    return found.kernels[0], machine_code.machine_code(executor().text(loaded), loaded)


def test_straight_code_is_issued_once():
    """A warp issues each instruction up to EXIT once."""
    kernel, code = cost("together", *(torch.zeros(96, dtype=torch.int64) for _ in range(2)))
    listed = [i.text for block in code.blocks for i in block.code]
    assert kernel.slots == listed.index("EXIT") + 1


def test_a_loop_body_is_issued_once_per_iteration():
    out = torch.zeros(32, dtype=torch.int32)
    few, code = cost("loops", out, 10)
    many, _ = cost("loops", out, 30)
    (body,) = [block for block in code.blocks if any("SHFL" in i.text for i in block.code)]
    assert many.slots - few.slots == 20 * len(body.code)
    # Per iteration: two additions and a comparison, but not the shuffle and the branch.
    assert many.half_rate - few.half_rate == 20 * 3


def test_an_unrolled_loop_is_counted_once_per_iteration():
    """The machine code contains copies of the store; each iteration executes one copy."""
    out = torch.zeros(32 * 64, dtype=torch.int32)
    few, code = cost("fills", out, 32)
    many, _ = cost("fills", out, 64)
    stores = sum("STG" in i.text for block in code.blocks for i in block.code)
    assert stores > 1
    per_round = (many.slots - few.slots) / 32
    assert 1 <= per_round <= 4, "one store, and a quarter of the loop around four stores"
