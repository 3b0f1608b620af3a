"""ldmatrix and stmatrix: who of a warp gets which element."""

import pytest
import torch

from ..backend import executor
from .snippets import run

ROW = "shl.b32 %r1, %r0, 4;\n"  # of 8 elements, one a lane, 16 bytes from the next
FOUR = "{%r2, %r3, %r4, %r5}"


def elements(lane, transposed):
    """(row, column) of the two that a lane has of every matrix."""
    pair = [(lane // 4, lane % 4 * 2 + half) for half in range(2)]
    return [(column, row) for row, column in pair] if transposed else pair


def numbered(count=256):
    """Every element is its own number."""
    return torch.arange(count, dtype=torch.int16).view(torch.int32)


def per_lane(body, words):
    """What a lane leaves in %r2 to %r5 where it has its four words of the input there."""
    out = torch.zeros(32, 4, dtype=torch.int32)
    lines = """
mul.wide.u32 %rd9, %r0, 16;
add.s64 %rd0, %rd0, %rd9;
add.s64 %rd1, %rd1, %rd9;
ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1];
"""
    end = "st.global.v4.b32 [%rd0], {%r2, %r3, %r4, %r5};"
    run(lines + ROW + body + end, out, words, shared=512)
    return out.view(torch.int16).view(32, 4, 2)  # lane, matrix, half


@pytest.mark.parametrize("matrices", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_load(transposed, matrices):
    registers = ["%r2", "%r3", "%r4", "%r5"][:matrices]
    trans = ".trans" if transposed else ""
    body = f"""
st.shared.v4.b32 [%r1], {FOUR};
bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x{matrices}{trans}.shared.b16 {{{", ".join(registers)}}}, [%r1];
"""
    out = per_lane(body, numbered())
    for lane in range(32):
        for matrix in range(matrices):
            expected = [
                64 * matrix + 8 * row + column for row, column in elements(lane, transposed)
            ]
            assert out[lane, matrix].tolist() == expected


@pytest.mark.parametrize("transposed", [False, True])
def test_store(transposed):
    trans = ".trans" if transposed else ""
    body = f"""
stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1], {FOUR};
bar.warp.sync -1;
ld.shared.v4.b32 {FOUR}, [%r1];
"""
    rows = per_lane(body, numbered()).reshape(4, 8, 8)  # matrix, row, column
    numbers = numbered().view(torch.int16).view(32, 4, 2)
    for lane in range(32):
        for matrix in range(4):
            found = [rows[matrix, row, column] for row, column in elements(lane, transposed)]
            assert found == numbers[lane, matrix].tolist()


LOAD = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {FOUR}, [%r1];\n"


def test_stores_of_the_same_matrix_are_replicas():
    """Two warps write one row each to the same place; what differs is a race."""
    body = "mov.u32 %r1, 0;\nmov.u32 %r2, {value};\n"
    body += "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {{%r2}};"
    executor().configure(1)
    run(body.format(value=7), threads=64, shared=512, replicas=True)
    for value, replicas in [("7", False), ("%r0", True)]:
        with pytest.raises(RuntimeError, match="data race"):
            run(body.format(value=value), threads=64, shared=512, replicas=replicas)


ERRORS = {
    "no barrier before a load": (
        f"st.shared.v4.b32 [%r1], {FOUR};\n" + LOAD.replace("%r1]", "%r6]"),
        "data race.*ldmatrix",
    ),
    "no barrier after a store": (
        f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {FOUR};\nld.shared.b32 %r2, [%r6];\n",
        "data race",
    ),
    "a row that begins within another": ("add.s32 %r1, %r1, 8;\n" + LOAD, "16 bytes misaligned"),
    "a row behind the end": ("add.s32 %r1, %r1, 16;\n" + LOAD, "thread 31.*ldmatrix"),
    "half a warp": (
        "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra END;\n" + LOAD + "END:\n",
        "not all lanes take part",
    ),
    "a form that is not known": (LOAD.replace("x4", "x3"), "unknown opcode ldmatrix.*x3"),
    "three registers of four": (LOAD.replace(", %r5}", "}"), "wrong number of registers"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_reported(error):
    body, report = ERRORS[error]
    executor().configure(1)
    with pytest.raises(RuntimeError, match=f"(?s){report}"):
        per_lane("xor.b32 %r6, %r1, 16;\n" + body, numbered())
