"""Tests which lane of a warp gets which element in ldmatrix and stmatrix."""

import pytest
import torch

from ..backend import executor
from .snippets import run

FOUR = "{%r2, %r3, %r4, %r5}"
LOAD = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {FOUR}, [%r1];\n"
STORE = f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {FOUR};\n"
STORE_ROW = f"st.shared.v4.b32 [%r1], {FOUR};\n"
LOAD_ROW = f"ld.shared.v4.b32 {FOUR}, [%r1];\n"


def per_lane(body):
    """The elements in %r2 to %r5 after `body`, by lane, register and half.

    Before `body`, these registers contain 0, 1, 2, ... in this order. %r1 is the address of the
    lane's row of 8 elements, and %r6 is the address of the adjacent lane's row.
    """
    out, numbers = torch.zeros(32, 4, dtype=torch.int32), torch.arange(256, dtype=torch.int16)
    begin = f"""
mul.wide.u32 %rd9, %r0, 16;
add.s64 %rd0, %rd0, %rd9;
add.s64 %rd1, %rd1, %rd9;
ld.global.v4.b32 {FOUR}, [%rd1];
shl.b32 %r1, %r0, 4;
xor.b32 %r6, %r1, 16;
"""
    end = f"st.global.v4.b32 [%rd0], {FOUR};"
    run(begin + body + end, out, numbers.view(torch.int32), shared=512)
    return out.view(torch.int16).view(32, 4, 2)


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_load_and_store(trans):
    """A lane has two adjacent elements of row (or column) lane // 4 of each matrix."""
    loaded = per_lane(STORE_ROW + "bar.warp.sync -1;\n" + LOAD.replace(".x4", ".x4" + trans))
    matrices = torch.arange(256).view(4, 8, 8)  # matrix, row, column
    if trans:
        matrices = matrices.transpose(1, 2)
    assert torch.equal(loaded, matrices.reshape(4, 32, 2).transpose(0, 1))

    stored = per_lane(STORE.replace(".x4", ".x4" + trans) + "bar.warp.sync -1;\n" + LOAD_ROW)
    expected = torch.arange(256).view(32, 4, 2).transpose(0, 1).reshape(4, 8, 8)
    if trans:
        expected = expected.transpose(1, 2)
    assert torch.equal(stored.reshape(4, 8, 8), expected)


ERRORS = {
    "no barrier before a load": (STORE_ROW + LOAD.replace("%r1]", "%r6]"), "data race.*ldmatrix"),
    "no barrier after a store": (STORE + LOAD_ROW.replace("%r1]", "%r6]"), "data race"),
    "a misaligned row": ("add.s32 %r1, %r1, 8;\n" + LOAD, "16 bytes misaligned"),
    "a row after the end": ("add.s32 %r1, %r1, 16;\n" + LOAD, "thread 31.*ldmatrix"),
    "half a warp": (
        "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra END;\n" + LOAD + "END:\n",
        "not all lanes participate",
    ),
    "an unknown form": (LOAD.replace("x4", "x3"), "unknown opcode ldmatrix.*x3"),
    "three registers instead of four": (LOAD.replace(", %r5}", "}"), "wrong number of registers"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_reported(error):
    body, report = ERRORS[error]
    executor().configure(1)
    with pytest.raises(RuntimeError, match=f"(?s){report}"):
        per_lane(body)


def test_fewer_matrices():
    few = LOAD.replace("x4", "x2").replace(", %r4, %r5", "")
    loaded = per_lane(STORE_ROW + "bar.warp.sync -1;\n" + few)
    assert torch.equal(loaded[:, :2], torch.arange(128).view(2, 32, 2).transpose(0, 1))


def test_stores_of_the_same_matrix_are_replicas():
    """Two warps store to the same address; different values are a race."""
    body = "and.b32 %r1, %r0, 31;\nshl.b32 %r1, %r1, 4;\nmov.u32 %r2, {value};\n"
    body += STORE.replace("%r3, %r4, %r5", "%r2, %r2, %r2").replace("{", "{{").replace("}", "}}")
    executor().configure(1)
    run(body.format(value=7), threads=64, shared=512, replicas=True)
    for value, replicas in [("7", False), ("%r0", True)]:
        with pytest.raises(RuntimeError, match="data race"):
            run(body.format(value=value), threads=64, shared=512, replicas=replicas)
