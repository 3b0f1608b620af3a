"""Tests opcodes whose definitions are easy to implement wrongly."""

import math
import random
import struct
from fractions import Fraction

import pytest
import torch

from ..backend import executor
from .snippets import per_thread, run

NAN, INF = math.nan, math.inf
NAN32 = 0x7FFFFFFF  # the NaN that arithmetic returns

# (opcode, its types, [(operands, result)]); a result is a number or the bits of a float
EXACT = [
    ("cvt.rzi.s32.f32", "f32 -> s32", [(1.9, 1), (-1.9, -1), (3e9, 2**31 - 1), (-3e9, -(2**31))]),
    ("cvt.rzi.s32.f32", "f32 -> s32", [(NAN, 0), (INF, 2**31 - 1), (-INF, -(2**31))]),
    ("cvt.rzi.u32.f64", "f64 -> u32", [(-0.9, 0), (4294967295.9, 2**32 - 1)]),
    ("cvt.rzi.u32.f64", "f64 -> u32", [(4294967296.0, 2**32 - 1)]),
    ("cvt.rzi.u32.f64", "f64 -> u32", [(NAN, 2**31), (-INF, 0), (INF, 2**32 - 1)]),
    ("cvt.rpi.f64.f64", "f64 -> f64", [(1.25, 2.0), (-1.25, -1.0), (-0.5, -0.0), (3.0, 3.0)]),
    ("cvt.rn.f64.s64", "s64 -> f64", [(-1, -1.0), (2**53 + 1, 2.0**53), (2**53 + 3, 2.0**53 + 4)]),
    ("cvt.rn.f32.s32", "s32 -> f32", [(-7, -7.0), (2**24 + 1, 2.0**24), (2**24 + 3, 2.0**24 + 4)]),
    ("cvt.s32.s8", "s16 -> s32", [(0x1280, -128), (0x007F, 127)]),
    ("abs.f32", "f32 -> f32", [(-0.0, 0.0), (0xFFC00001, 0x7FC00001), (-INF, INF)]),
    ("add.rn.f32", "f32, f32 -> f32", [(INF, -INF, NAN32), (1.0, 2.0**-24, 1.0)]),
    ("add.rn.f32", "f32, f32 -> f32", [(1, 1, 2), (0xFFC00123, 1.0, NAN32)]),
    ("add.rz.f32", "f32, f32 -> f32", [(INF, -INF, NAN32), (-0.0, -0.0, -0.0), (1.0, -1.0, 0.0)]),
    ("add.rz.f32", "f32, f32 -> f32", [(-1.0, 2.0**-30, 0xBF7FFFFF), (INF, 1.0, INF)]),
    ("sub.rn.f32", "f32, f32 -> f32", [(0.0, 0.0, 0.0), (-0.0, 0.0, -0.0)]),
    ("mul.rn.f32", "f32, f32 -> f32", [(2.0**-100, 2.0**-49, 1), (0.0, INF, NAN32)]),
    ("fma.rn.f32", "f32, f32, f32 -> f32", [(1 + 2.0**-23, 1 - 2.0**-23, -1.0, -(2.0**-46))]),
    ("fma.rn.f32", "f32, f32, f32 -> f32", [(0.0, INF, 1.0, NAN32), (2.0**127, 2.0, -INF, -INF)]),
    ("div.rn.f32", "f32, f32 -> f32", [(1.0, 3.0, 0x3EAAAAAB), (1.0, -0.0, -INF)]),
    ("div.rn.f32", "f32, f32 -> f32", [(0.0, 0.0, NAN32)]),
    ("max.f32", "f32, f32 -> f32", [(NAN, 1.0, 1.0), (1.0, NAN, 1.0), (NAN, NAN, NAN32)]),
    ("max.f32", "f32, f32 -> f32", [(-0.0, 0.0, 0.0), (0.0, -0.0, 0.0)]),
    ("min.f64", "f64, f64 -> f64", [(NAN, 1.0, 1.0), (-0.0, 0.0, -0.0), (0.0, -0.0, -0.0)]),
    ("mul.wide.s32", "s32, s32 -> s64", [(-2, 2**31 - 1, -(2**32) + 2)]),
    ("mul.wide.u32", "u32, u32 -> u64", [(-1, -1, (2**32 - 1) ** 2)]),
    ("div.s64", "s64, s64 -> s64", [(-7, 2, -3), (7, -2, -3)]),
    ("shl.b32", "u32, u32 -> u32", [(1, 31, 2**31), (1, 32, 0), (1, 33, 0), (1, -1, 0)]),
    ("shf.l.wrap.b32", "u32, u32, u32 -> u32", [(2**31, 3, 1, 7), (5, 6, 32, 6), (2**30, 1, 2, 5)]),
    ("shr.u32", "u32, u32 -> u32", [(2**31, 31, 1), (2**31, 32, 0)]),
    ("shr.s64", "s64, u32 -> s64", [(-8, 64, -1), (-8, 2, -2)]),
    ("shr.u16", "u16, u32 -> u16", [(0x8000, 15, 1), (0x8000, 16, 0)]),
    ("brev.b32", "u32 -> u32", [(1, 2**31), (0x0000F00D, 0xB00F0000)]),
    ("bfind.shiftamt.u32", "u32 -> u32", [(0, 0xFFFFFFFF), (1, 31), (2**31, 0), (0x00010000, 15)]),
    ("bfi.b32", "u32, u32, u32, u32 -> u32", [(0b101, 0, 4, 3, 0x50), (0, -1, 28, 8, 2**28 - 1)]),
    ("bfi.b32", "u32, u32, u32, u32 -> u32", [(1, 7, 32, 4, 7), (1, 6, 0, 0, 6)]),
    ("bfi.b64", "u64, u64, u32, u32 -> u64", [(0b101, 0, 36, 3, 5 << 36)]),
    ("bfi.b64", "u64, u64, u32, u32 -> u64", [(0, -1, 60, 8, 2**60 - 1)]),
    ("prmt.b32", "u32, u32, u32 -> u32", [(0x44332211, 0x88776655, 0x7610, 0x88772211)]),
    ("prmt.b32", "u32, u32, u32 -> u32", [(0x80, 0x7F, 0x8888, -1), (0x80, 0x7F, 0xCCCC, 0)]),
    ("prmt.b32", "u32, u32, u32 -> u32", [(0x44332211, 0, 0x3340, 0x44440011)]),
    ("bfe.u32", "u32, u32, u32 -> u32", [(0xDEADBEEF, 8, 8, 0xBE), (-1, 28, 8, 15)]),
    ("bfe.u32", "u32, u32, u32 -> u32", [(-1, 5, 0, 0), (-1, 0, 32, -1), (0x80, 256, 264, 0x80)]),
    ("add.s16x2", "u32, u32 -> u32", [(0x7FFF0001, 0x0001FFFF, 0x80000000)]),
    ("max.u16x2", "u32, u32 -> u32", [(0x0001FFFF, 0x80000002, 0x8000FFFF)]),
    ("min.s16x2.relu", "u32, u32 -> u32", [(0x00058000, 0x00010001, 0x00010000)]),
    ("min.s16x2.relu", "u32, u32 -> u32", [(0x00007FFF, 0xFFFF0001, 0x00000001)]),
    ("setp.lt.f32", "f32, f32 -> pred", [(1.0, 2.0, 1), (NAN, 2.0, 0), (-0.0, 0.0, 0)]),
    ("setp.ltu.f32", "f32, f32 -> pred", [(1.0, 2.0, 1), (NAN, 2.0, 1), (2.0, 1.0, 0)]),
    ("setp.geu.f32", "f32, f32 -> pred", [(NAN, NAN, 1), (1.0, 2.0, 0), (2.0, 2.0, 1)]),
    ("setp.neu.f32", "f32, f32 -> pred", [(NAN, 1.0, 1), (1.0, 1.0, 0)]),
    ("setp.nan.f32", "f32, f32 -> pred", [(NAN, 1.0, 1), (1.0, NAN, 1), (1.0, INF, 0)]),
]


@pytest.fixture(autouse=True)
def in_turn():
    executor().configure(0)


def bits(value, type):
    """The bits of a number of this type, as a non-negative integer."""
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<f" if type == "f32" else "<d", value), "little")
    return value % 2 ** (32 if type == "pred" else int(type[1:]))


def register(type, number):
    families = {"pred": "%p", "f32": "%f", "f64": "%fd", "16": "%rs", "32": "%r", "64": "%rd"}
    return families.get(type, families.get(type[1:])) + str(number)


def evaluate(opcode, types, to, cases):
    """Return the bits of an opcode's result for each case. Each lane computes one case."""
    padded = cases + cases[:1] * (32 - len(cases))
    rows = [[bits(case[i], type) for case in padded] for i, type in enumerate(types)]
    inputs = torch.tensor(rows, dtype=torch.uint64).view(torch.int64)
    out = torch.zeros(32, dtype=torch.int64)
    lines = ["mul.wide.u32 %rd9, %r0, 8;", "add.s64 %rd0, %rd0, %rd9;", "add.s64 %rd1, %rd1, %rd9;"]
    operands = [register(to, 2)]
    for i, type in enumerate(types):
        operands.append(register(type, i + 3))
        if type == "pred":
            lines += [
                f"ld.global.u32 %r9, [%rd1+{256 * i}];",
                f"setp.ne.s32 {operands[-1]}, %r9, 0;",
            ]
        else:
            lines.append(f"ld.global.b{type[1:]} {operands[-1]}, [%rd1+{256 * i}];")
    lines.append(f"{opcode} {', '.join(operands)};")
    if to == "pred":
        lines += ["selp.b32 %r9, 1, 0, %p2;", "st.global.u32 [%rd0], %r9;"]
    else:
        lines.append(f"st.global.b{to[1:]} [%rd0], {operands[0]};")
    run("\n".join(lines), out, inputs)
    return [value % 2**64 for value in out[: len(cases)].tolist()]


@pytest.mark.parametrize("opcode, types, cases", EXACT, ids=[case[0] for case in EXACT])
def test_exact(opcode, types, cases):
    operands, to = types.split(" -> ")
    actual = evaluate(opcode, operands.split(", "), to, cases)
    assert list(map(hex, actual)) == [hex(bits(case[-1], to)) for case in cases]


def test_a_sum_rounded_towards_zero():
    """Compare with integer sums in units of 2**-149, for random and for similar exponents."""
    draw = random.Random(0)
    for case in range(256):
        exponents = draw.choices(range(255), k=2) if case % 2 else [draw.randrange(230)] * 2
        exponents[1] += draw.randrange(26) if case % 2 == 0 else 0
        pair = [draw.getrandbits(1) << 31 | e << 23 | draw.getrandbits(23) for e in exponents]
        a, b = struct.unpack("<2f", struct.pack("<2I", *pair))
        units = int(Fraction(a) * 2**149) + int(Fraction(b) * 2**149)
        most = (2**24 - 1) << 253
        shift = max(min(abs(units), most).bit_length() - 24, 0)
        expected = math.ldexp(min(abs(units), most) >> shift, shift - 149)
        actual = evaluate("add.rz.f32", ["f32", "f32"], "f32", [(a, b)])
        assert actual == [bits(math.copysign(expected, units), "f32")]


SHUFFLES = {
    "up.b32 %r9|%p1, %r0, 1, 0, -1": [max(lane - 1, 0) for lane in range(32)],
    "up.b32 %r9|%p1, %r0, 4, 6144, -1": [
        lane - 4 if lane % 8 >= 4 else lane for lane in range(32)
    ],  # 6144: segments of 8
    "bfly.b32 %r9|%p1, %r0, 5, 31, -1": [lane ^ 5 for lane in range(32)],
    "idx.b32 %r9|%p1, %r0, 35, 31, -1": [3] * 32,
    "idx.b32 %r9|%p1, %r0, 3, 6175, -1": [lane // 8 * 8 + 3 for lane in range(32)],
}


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_shuffle(shuffle):
    assert per_thread(f"shfl.sync.{shuffle};") == SHUFFLES[shuffle]


def test_the_predicate_of_a_shuffle_tells_whether_the_source_exists():
    moved = per_thread("shfl.sync.up.b32 %r1|%p1, %r0, 3, 0, -1;\nselp.b32 %r9, 1, 0, %p1;")
    assert moved == [int(lane >= 3) for lane in range(32)]


def test_votes_and_reductions():
    odd = "and.b32 %r1, %r0, 1;\nsetp.ne.s32 %p1, %r1, 0;\n"
    assert per_thread(odd + "vote.sync.ballot.b32 %r9, %p1, -1;") == [0xAAAAAAAA - 2**32] * 32
    chosen = "selp.b32 %r9, 1, 0, %p2;"
    assert per_thread(odd + "vote.sync.any.pred %p2, %p1, -1;\n" + chosen) == [1] * 32
    assert per_thread("redux.sync.add.u32 %r9, %r0, -1;") == [31 * 32 // 2] * 32


def test_reductions_in_memory():
    """All threads of two blocks update memory with an instruction without a result register."""
    memory = torch.zeros(2, dtype=torch.int64)
    body = """
shl.b32 %r1, 1, %r0;
red.global.gpu.relaxed.or.b32 [ %rd0 + 0 ], %r1;
cvt.u64.u32 %rd1, %r0;
@%p1 red.global.gpu.relaxed.add.u64 [ %rd0 + 8 ], %rd1;"""
    run("setp.ne.s32 %p1, %r0, 31;\n" + body, memory, blocks=2)
    assert memory.tolist() == [2**32 - 1, 31 * 30]
