"""Where machine code waits for memory."""

import re
from collections import Counter

from .machine_code import Block, Instruction, MachineCode

_LOAD = re.compile(r"(?:LDG|LD|ATOMG|ATOM)(\.\S+) (?:U?PT?\d*, )?R(\d+),")


def waits(code: MachineCode) -> dict[int, float]:
    """By line of PTX: trips to memory that a warp waits for there.

    All that it has asked for by then is one trip. A register is waited for where any way through
    the blocks comes from its load, so that a load behind a branch may count once more: no fewer
    than there are.
    """
    blocks = code.blocks
    into: list[set[int]] = [set() for _ in blocks]  # registers that may not be there yet
    changed = set(range(len(blocks)))
    while changed:
        at = changed.pop()
        pending = _walk(blocks[at], into[at])
        for after in _successors(blocks, at):
            if not pending <= into[after]:
                into[after] |= pending
                changed.add(after)

    found: Counter = Counter()
    for block, pending in zip(blocks, into, strict=True):
        _walk(block, pending, lambda i: found.update({i.line: 1 / code.copies[i.line]}))
    return found


def _walk(block: Block, pending: set[int], waited=lambda i: None) -> set[int]:
    """The registers that may not be there yet behind the block."""
    pending = set(pending)
    for i in block.code:
        if pending & {int(register) for register in re.findall(r"\bR(\d+)\b", i.text)}:
            waited(i)
            pending = set()
        pending |= _loaded(i)
    return pending


def _loaded(i: Instruction) -> set[int]:
    load = _LOAD.match(i.plain)
    if not load:
        return set()
    words = next((n for width, n in ((".128", 4), (".64", 2)) if width in load[1]), 1)
    return set(range(int(load[2]), int(load[2]) + words))


def _successors(blocks: list[Block], at: int) -> list[int]:
    code = blocks[at].code
    last = code[-1] if code else None
    found = []
    if last is None or last.plain != last.text or not re.match(r"BRA |EXIT", last.text):
        found += range(at + 1, len(blocks))[:1]
    if last is not None and (target := re.match(r"BRA.*`\((\S+)\)", last.plain)):
        found += [n for n, block in enumerate(blocks) if block.label == target[1]]
    return found
