"""Fuzzing of ops that read untrusted bytes.

Each CPU op that reads messages is called with valid and mutated messages, under ASan and UBSan.
Inputs that reach new branches are kept and mutated further. No call may access memory outside its
arguments, have undefined behavior, or hang. Results and status must match decoders that are written
from the format's description. The entry point `payload_info` reads random headers in Python.

The fuzzer is tests/native/fuzz.cpp. Successive batches run on different instruction sets. If an
input fails, the fuzzer prints it. To run the input again: build/fuzz/fuzz OP HEX.
"""

import functools
import json
import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import dct_kernels

from . import ROOT

OPS = (
    *("scatter_unpack", "dequantize_sum"),
    *("row_unpack", "row_gather", "row_dequantize", "row_dequantize_sum"),
    *("patch_check", "patch_apply"),
)
COUNTS = dict.fromkeys([*OPS, "payload_info"], 10**7)
BATCH = 500_000
QUICK = ("payload_info",)  # ctest runs a thousandth of the cases of the ops
ISAS = ("avx512", "avx2", "default")
BUILD = ROOT / "build" / "fuzz"


@functools.cache
def program() -> Path:
    """Build the fuzzer with sanitizers and coverage; return its path."""
    cmake = Path(sys.executable).with_name("cmake")
    options = ["-DDCT_SANITIZE=address,undefined", "-DDCT_COVERAGE=ON", "--log-level=WARNING"]
    for command in (["-S", ROOT, "-B", BUILD, *options], ["--build", BUILD, "--target", "fuzz"]):
        subprocess.run([cmake, *command], check=True, stdout=subprocess.DEVNULL)
    return BUILD / "fuzz"


def run(entry_point: str, first: int, count: int, seed: int) -> dict[str, Any]:
    if entry_point == "payload_info":
        return _headers(first, count, seed)
    return fuzz(program(), entry_point, first, count, seed)


def fuzz(
    program: Path, op: str, first: int, count: int, seed: int, most: int = 10
) -> dict[str, Any]:
    """Run `count` inputs of an op, but stop after `most` failures."""
    isa = ISAS[first // BATCH % len(ISAS)]
    found: dict[str, Any] = {"failures": []}
    end = first + count
    while first < end and len(found["failures"]) < most:
        command = [program, op, str(seed), str(first), str(end - first)]
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": isa}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode == 0:
            counts = json.loads(done.stdout)
            return found | {name: counts[name] for name in ("sound", "kept", "max_branches")}
        number, bytes_sent = re.search(r"^input (\d+): (\w*)$", done.stderr, re.M).groups()
        what = next(line for line in done.stderr.splitlines() if line.strip(" ="))
        text = f"{what.rpartition('/')[2]} ({isa}): fuzz {op} {bytes_sent}"
        found["failures"].append({"case": int(number), "what": text})
        first = int(number) + 1
    return found


_HEADER = struct.Struct("<IHBBQII40s")
_DTYPES = {(1, 0): torch.float32, (1, 1): torch.bfloat16}
_DTYPES |= {(4, n): name for n, name in enumerate(["float32", "bfloat16"])}
_DTYPES |= {(4, n + 4): name for n, name in enumerate(["int8", "int4", "ternary"])}


def _headers(first: int, count: int, seed: int) -> dict[str, Any]:
    failures, sound = [], 0
    for number in range(first, first + count):
        raw = _header(random.Random(seed * 0x9E3779B1 + number))
        magic, version, code, flags, numel, capacity, entries, _ = _HEADER.unpack(raw)
        kind = _DTYPES.get((version, code)) if magic == 0x31544344 else None
        try:
            info = dct_kernels.payload_info(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        except ValueError as error:
            right = kind is None and "dct::payload_info: payload must be" in str(error)
        else:
            sound += 1
            bits = (bool(flags & 1), bool(flags & 2))
            right = (info.value_dtype, info.numel, info.capacity, info.count) == (
                *(kind, numel, capacity, entries),
            ) and (info.overflow, info.non_finite) == bits
        if not right:
            failures.append({"case": number, "what": f"payload_info of {raw.hex()}"})
    return {"failures": failures, "sound": sound}


def _header(choose: random.Random) -> bytes:
    """Return a valid header of 64 bytes with up to three random bytes."""
    version, code = choose.choice(list(_DTYPES))
    numel = choose.getrandbits(choose.choice([4, 16, 40, 64]))
    count = choose.getrandbits(choose.choice([3, 32]))
    header = _HEADER.pack(0x31544344, version, code, choose.randrange(8), numel, count, count, b"")
    raw = bytearray(header)
    for _ in range(choose.choice([0, 1, 1, 3])):
        raw[choose.randrange(choose.choice([8, 64]))] = choose.getrandbits(8)
    return bytes(raw)
