"""Tests interleaving of threads, visibility of stores, and reported errors."""

import re

import pytest
import torch

from ..backend import executor, poisoned
from .snippets import per_thread, run


@pytest.mark.parametrize("seed", range(4))
def test_lanes_of_a_mask_meet_without_the_others(seed):
    """Each half of a warp votes with its own mask, and does not wait for exited lanes."""
    executor().configure(seed)
    body = """
setp.lt.u32 %p1, %r0, 16;
selp.b32 %r1, 65535, -65536, %p1;
vote.sync.ballot.b32 %r9, %p1, %r1;
setp.eq.s32 %p2, %r0, 5;
@%p2 bra LEAVE;
vote.sync.ballot.b32 %r9, %p1, %r1;
LEAVE:
"""
    assert per_thread(body) == [
        0xFFFF if lane == 5 else 0xFFDF if lane < 16 else 0 for lane in range(32)
    ]


EXCHANGE = """
shl.b32 %r1, %r0, 2;
st.shared.u32 [%r1], %r0;
{barrier}
xor.b32 %r2, %r1, {partner};
ld.shared.u32 %r9, [%r2];
"""


@pytest.mark.parametrize("barrier, partner", [("bar.warp.sync -1;", 4), ("bar.sync 0;", 252)])
@pytest.mark.parametrize("seed", range(3))
def test_barriers_order_shared_memory(seed, barrier, partner):
    executor().configure(seed)
    out = per_thread(EXCHANGE.format(barrier=barrier, partner=partner), threads=64, shared=256)
    assert out == [thread ^ partner // 4 for thread in range(64)]


# Block 0 writes a message and then a flag. Block 1 reads the message if it sees the flag.
MESSAGE = """
mov.u32 %r1, %ctaid.x;
setp.ne.s32 %p2, %r1, 0;
mov.u64 %rd5, 7;
setp.eq.s32 %p1, %r0, 40;
@%p2 bra WRITTEN;
@%p1 st.global.u64 [%rd0+8], %rd5;
WRITTEN:
bar.sync 0;
setp.ne.s32 %p1, %r0, 0;
@%p1 bra DONE;
xor.b32 %r2, %r1, 1;
atom.{order}global.add.u32 %r3, [%rd0], %r2;
setp.ne.s32 %p3, %r3, 0;
and.pred %p3, %p2, %p3;
@%p3 ld.global.u64 %rd6, [%rd0+8];
@%p3 st.global.u64 [%rd0+16], %rd6;
DONE:
"""


def received(order, seed):
    executor().configure(seed)
    memory = torch.zeros(3, dtype=torch.int64)
    run(MESSAGE.format(order=order), memory, blocks=2, threads=64)
    return memory[2].item()


def test_release_and_acquire_order_memory():
    assert {received("acq_rel.gpu.", seed) for seed in range(1, 21)} == {0, 7}
    with pytest.raises(RuntimeError, match="data race"):
        for seed in range(1, 21):
            received("", seed)


# (body, reported error); a tensor of 32 int32 is at %rd0
ERRORS = {
    "after the end": ("ld.global.u32 %r1, [%rd0+128];", "4 bytes out of bounds.*128 bytes after"),
    "before the start": ("st.global.u32 [%rd0+-4], %r0;", "out of bounds"),
    "after shared memory": ("st.shared.u32 [memory+256], %r0;", "out of bounds at address 256"),
    "an unsupported second result": (
        "setp.lt.u32 %p1|%p2, %r0, 8;",
        "a second result is not supported",
    ),
    "misaligned": ("ld.global.u32 %r1, [%rd0+2];", "4 bytes misaligned"),
    "a misaligned vector": (
        "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0+8];",
        "16 bytes misaligned.*thread.*PTX line.*ld.global.v4",
    ),
    "an unknown opcode": ("sin.approx.f32 %f1, %f1;", "unknown opcode sin.approx.f32"),
    "an unknown modifier": ("ld.weird.u32 %r1, [%rd0];", "unknown opcode ld.weird.u32"),
    "a mask without the lane": ("bar.warp.sync 65535;", "not contain its own lane.*thread 16"),
    "masks that differ": (
        "setp.eq.s32 %p1, %r0, 3;\nselp.b32 %r1, 15, -1, %p1;\nbar.warp.sync %r1;",
        "mask 0x.* against 0x",
    ),
    "lanes at different instructions": (
        "setp.eq.s32 %p1, %r0, 3;\n@%p1 bra A;\nbar.warp.sync -1;\nbra B;\nA:\n"
        "bar.warp.sync -1;\nB:",
        "waits for it at another instruction",
    ),
    "a barrier that some lanes do not reach": (
        "setp.lt.u32 %p1, %r0, 8;\n@%p1 bra A;\nbar.sync 0;\nA:\nbar.warp.sync -1;",
        "deadlock.*24 threads at a barrier.*8 threads in a collective",
    ),
    "a barrier at two instructions": (
        "setp.lt.u32 %p1, %r0, 8;\n@%p1 bra A;\nbar.sync 0;\nbra B;\nA:\nbar.sync 0;\nB:",
        "other lanes of its warp are at another barrier",
    ),
    "a loop without an end": ("A:\nbra A;", "hang"),
    "lanes race for a word": ("st.shared.u32 [memory], %r0;", "data race.*store"),
    "no barrier of the warp": (EXCHANGE.format(barrier="", partner=4), "data race"),
    "unwritten shared memory": (
        "ld.shared.u32 %r1, [memory];",
        "4 bytes uninitialized at address 0: block 0, thread.*PTX line.*ld.shared.u32",
    ),
    "half written": (
        "shl.b32 %r1, %r0, 2;\nst.shared.b16 [%r1], %rs1;\nld.shared.u32 %r2, [%r1];",
        "4 bytes uninitialized",
    ),
    "an update of unwritten memory": (
        "atom.shared.add.u32 %r1, [memory], %r0;",
        "4 bytes uninitialized",
    ),
    "read before it is written": (
        "setp.ne.s32 %p1, %r0, 0;\n@%p1 bra A;\nld.shared.u32 %r1, [memory];\nA:\n"
        "setp.ne.s32 %p1, %r0, 1;\n@%p1 bra B;\nst.shared.u32 [memory], %r0;\nB:",
        "data race",  # reported even if the load comes first
    ),
    "threads of two blocks race": (
        "mov.u32 %r1, %ctaid.x;\nst.global.u32 [%rd0], %r1;",
        "data race",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_error_is_reported(error, seed):
    body, report = ERRORS[error]
    executor().configure(seed)
    with pytest.raises(RuntimeError) as raised:
        run(body, torch.zeros(32, dtype=torch.int32), shared=256)
    assert re.search(report, str(raised.value), re.DOTALL), raised.value


def test_a_result_is_initialized_by_a_store():
    read, store = "ld.global.u32 %r1, [%rd2];", "st.global.u32 [%rd2], %r0;\n"
    address = "mul.wide.u32 %rd1, %r0, 4;\nadd.s64 %rd2, %rd0, %rd1;\n"
    run(address + store + read, poisoned(32, dtype=torch.int32))
    result = poisoned(32, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="4 bytes uninitialized"):
        run(address + read, result)
    run(address + read, result)  # in later calls it is an ordinary argument


def test_warps_without_a_barrier_race():
    with pytest.raises(RuntimeError, match="data race"):
        per_thread(
            EXCHANGE.format(barrier="bar.warp.sync -1;", partner=252), threads=64, shared=256
        )
