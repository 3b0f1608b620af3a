"""Maps the machine code that ptxas generates to the executed PTX.

`ptxas -lineinfo` records the line of PTX for each instruction and does not change the instructions.
Therefore, counts of PTX can be converted to counts of machine code.
"""

import functools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from . import kernels, toolkit

ARCHITECTURE = 90

_LINE = re.compile(r"//## File .*, line (\d+)")
_LABEL = re.compile(r"(\S+):$")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
# Instructions of a pipe that takes 64 lanes per clock. So each of the four schedulers issues one
# every other clock. Sums and products of floats, and IMAD, use other pipes.
_HALF_RATE = re.compile(
    r"(IADD3?|V?IADDMNMX|VIADD|V?IMNMX3?|LEA|LOP3?|SHF|SHL|SHR|PRMT|BMSK|SGXT|IABS|VABSDIFF|[IFH]SETP2?"
    r"|[FH]SET2?|[FH]MNMX2?|F?SEL|PLOP3|P2R|R2P|MOV|CS2R|VOTE|I2FP|F2FP)\b"
)
_ENDS_BLOCK = re.compile(r"BRA|BRX|EXIT|RET")
# Each of these is one instruction in PTX and one in machine code, so copies reveal loop unrolling.
_ONE_FOR_ONE = re.compile(r"(LDG|STG|LD|ST|LDS|STS|SHFL|VOTE|REDUX|BAR)\b")


class Instruction(NamedTuple):
    text: str
    line: int  # of the PTX

    @property
    def plain(self) -> str:
        return kernels.unpredicated(self.text)


@dataclass
class Block:
    """A basic block, with one entry at its start and one exit at its end."""

    label: str | None
    code: list[Instruction]


@dataclass(frozen=True)
class MachineCode:
    """A kernel's code, without the code for diverged warps and divisions of subnormal numbers."""

    blocks: list[Block]
    subroutines: dict[str, list[Instruction]]  # by name
    copies: Counter  # {line: number of copies in the machine code, from unrolled loops}

    def slots(self, issues: Mapping[int, int]) -> float:
        """The number of issue slots. `issues` counts how often warps issued each line of PTX."""
        return self._issued(issues, len)

    def half_rate_slots(self, issues: Mapping[int, int]) -> float:
        """The number of issue slots of instructions that are issued only every other clock."""
        return self._issued(issues, lambda code: sum(bool(_HALF_RATE.match(i.plain)) for i in code))

    def _issued(
        self, issues: Mapping[int, int], count: Callable[[list[Instruction]], int]
    ) -> float:
        """The execution count of a block is the median over its lines, because ptxas moves some
        instructions between blocks, and replaces some branches by predicates."""
        total = 0.0
        for code in filter(None, (block.code for block in self.blocks)):
            runs = statistics.median(issues.get(i.line, 0) / self.copies[i.line] for i in code)
            called = (name for i in code for name in self.subroutines if f"`({name})" in i.text)
            total += runs * (count(code) + sum(count(self.subroutines[name]) for name in called))
        return total


@functools.cache
def machine_code(ptx: str, symbol: str) -> MachineCode:
    """The machine code of one kernel of a PTX text."""
    listing = toolkit.assemble(ptx, ARCHITECTURE).listing
    start = listing.index(f".text.{symbol}:\n")
    blocks, subroutines = _blocks(listing[start : listing.find("\n//-----", start)])
    return MachineCode(blocks, subroutines, _copies(ptx, blocks))


def _blocks(listing: str) -> tuple[list[Block], dict[str, list[Instruction]]]:
    """The blocks of a kernel (see `MachineCode`), and its subroutines."""
    blocks = [Block(None, [])]
    subroutines: dict[str, list[Instruction]] = {}
    line = 0
    for text in listing.splitlines():
        if found := _LINE.search(text):
            line = int(found[1])
        elif found := _LABEL.match(text.strip()):
            if found[1].startswith("$__internal"):
                subroutines[found[1]] = []
            blocks.append(Block(found[1], []))
        elif found := _INSTRUCTION.search(text):
            if found[1] == f"BRA `({blocks[-1].label})":
                break  # the padding after the code is a branch to itself
            instruction = Instruction(found[1], line)
            if subroutines:  # they come last
                subroutines[list(subroutines)[-1]].append(instruction)
                continue
            blocks[-1].code.append(instruction)
            if _ENDS_BLOCK.match(blocks[-1].code[-1].plain):
                blocks.append(Block(None, []))
    return _run_in_lock_step(blocks), subroutines


def _run_in_lock_step(blocks: list[Block]) -> list[Block]:
    """Remove the code for diverged warps and for divisions of subnormal numbers."""
    text = "\n".join(i.text for block in blocks for i in block.code)
    divergent = set(re.findall(r"BRA\.DIV \S+ `\((\S+)\)", text))
    kept, skipping = [], False
    for block in blocks:
        skipping |= block.label in divergent
        slow = skipping or any("slowpath" in i.text for i in block.code)
        if block.code and re.match(r"BRA |EXIT", block.code[-1].text):
            skipping = False
        kept.append(Block(block.label, [] if slow else block.code))
    return [block for block in kept if block.label or block.code]


def _copies(ptx: str, blocks: list[Block]) -> Counter:
    counts = Counter(i.line for b in blocks for i in b.code if _ONE_FOR_ONE.match(i.plain))
    copies, together = Counter({0: 1}), []
    for number, text in enumerate([*ptx.splitlines(), "bra"], 1):
        statement = re.sub(r"^@\S+\s+", "", text.strip())
        together.append(number)
        if statement.endswith(":") or statement.startswith(("bra", "ret")):
            copies.update(dict.fromkeys(together, max(1, *(counts[n] for n in together))))
            together = []
    return copies
