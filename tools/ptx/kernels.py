"""Reads properties that determine the speed of a kernel from its machine code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .toolkit import Compiled, demangle

# Per multiprocessor: compute capabilities in https://docs.nvidia.com/cuda/cuda-c-programming-guide
REGISTERS = 65536
THREADS = 2048
BLOCKS = 32
SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
RESERVED_BYTES = 1024  # shared memory that CUDA reserves for each block
REGISTER_UNIT = 8  # registers are allocated to a thread in units of this size

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel for one architecture."""

    name: str  # with its template arguments
    architecture: int
    registers: int
    stack_bytes: int  # a thread's local memory
    spill_bytes: int  # stores and loads
    static_shared_bytes: int
    threads: int  # per block, from __launch_bounds__
    min_blocks: int  # per multiprocessor, from __launch_bounds__; 1 if it is not given
    instructions: tuple[str, ...]

    def count(self, pattern: str) -> int:
        """The number of instructions whose name matches `pattern` at its start."""
        return sum(bool(re.match(pattern, opcode(i))) for i in self.instructions)

    @property
    def fused(self) -> int:
        """The number of fused multiply-adds, except those that load a constant (two RZ)."""
        fused = (i for i in self.instructions if re.match(r"[FDH]FMA|HFMA2", opcode(i)))
        return sum(not re.search(r"-?RZ, -?RZ", i) for i in fused)

    def in_flight(self, loads: str) -> int:
        """The largest number of matching loads that are issued before one of them is used."""
        most, pending = 0, []
        for instruction in self.instructions:
            used = {int(register) for register in re.findall(r"\bR(\d+)\b", instruction)}
            # If a load is used, this load and all earlier loads are no longer in flight.
            while any(used & registers for registers in pending):
                del pending[0]
            load = re.match(r"(LDG\S*) R(\d+),", unpredicated(instruction))
            if load and re.match(loads, load[1]):
                bits = re.search(r"\.(64|128)\b", load[1])
                registers = int(bits[1]) // 32 if bits else 1
                pending.append(set(range(int(load[2]), int(load[2]) + registers)))
            most = max(most, len(pending))
        return most

    @property
    def between_blocks(self) -> list[str]:
        """Distinct instructions that order or update memory shared with other blocks."""
        # Since sm_90, reductions are called REDG.
        names = (re.sub("^REDG", "RED", opcode(i)) for i in self.instructions)
        ordered = re.compile(r"(LDG|STG)\S*STRONG|ATOMG|RED\.|MEMBAR|FENCE|CCTL\.IV")
        return list(dict.fromkeys(filter(ordered.match, names)))

    def blocks(self, dynamic_shared_bytes: int) -> int:
        """The number of blocks that fit on one multiprocessor."""
        registers = -(-self.registers // REGISTER_UNIT) * REGISTER_UNIT
        shared = self.static_shared_bytes + dynamic_shared_bytes + RESERVED_BYTES
        return min(
            REGISTERS // (registers * self.threads),
            SHARED_BYTES[self.architecture] // shared,
            THREADS // self.threads,
            BLOCKS,
        )


def opcode(instruction: str) -> str:
    return unpredicated(instruction).split()[0]


def kernels(compiled: Compiled, architecture: int) -> Iterator[Kernel]:
    """All kernels of a source."""
    for symbol, code in _sections(r"Function : (\S+)", compiled.sass):
        ptx = dict(_sections(r"\.entry (\w+)\(", compiled.ptx))[symbol].partition("{")[0]
        report = dict(_sections(r"Compiling entry function '(\w+)'", compiled.report))[symbol]
        spills = [_number(rf"(\d+) bytes spill {kind}", report) for kind in ("stores", "loads")]
        yield Kernel(
            name=demangle(symbol),
            architecture=architecture,
            registers=_number(r"Used (\d+) registers", report),
            stack_bytes=_number(r"(\d+) bytes stack frame", report),
            spill_bytes=sum(spills),
            static_shared_bytes=_number(r"(\d+) bytes smem", report, absent=0),
            threads=_number(r"\.maxntid (\d+)", ptx),
            min_blocks=_number(r"\.minnctapersm (\d+)", ptx, absent=1),
            instructions=tuple(_INSTRUCTION.findall(code)),
        )


def _sections(heading: str, text: str) -> list[tuple[str, str]]:
    parts = re.split(heading, text)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _number(pattern: str, text: str, absent: int | None = None) -> int:
    found = re.search(pattern, text)
    if found is None and absent is not None:
        return absent
    return int(found[1])


def unpredicated(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+ ", "", instruction)
