"""Tests that mutants of the kernels cause an error of the executor, or a wrong result.

A mutant is the PTX of a kernel with one instruction changed. Mutants need no compilation, and still
apply to a rewritten kernel if it contains such an instruction.
"""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from .. import build
from ..backend import BACKEND, executor
from . import runs

SEEDS = range(1, 6)
RACE, OUT_OF_BOUNDS, UNINITIALIZED, WRONG = "data race", "out of bounds", "uninitialized", "wrong"

pytestmark = pytest.mark.skipif(
    build.missing() is not None, reason=f"not on this machine: {build.missing()}"
)
Run = Callable[[SimpleNamespace], object]


class Mutant(NamedTuple):
    run: Run
    instruction: str  # a pattern for one or more lines
    replacement: str
    found: str


MUTANTS = {
    "no block barrier": Mutant(runs.row_gather, r"bar\.sync .*;", "", RACE),
    "no warp barrier": Mutant(runs.row_unpack, r"bar\.warp\.sync .*;", "", RACE),
    "an index that can be one too large": Mutant(
        runs.row_gather, r"setp\.ge\.s64(.*;)", r"setp.gt.s64\1", OUT_OF_BOUNDS
    ),
    "no store to shared memory": Mutant(runs.row_unpack, r"st\.shared\.v4.*;", "", UNINITIALIZED),
    "a fused multiply-add": Mutant(
        runs.sample_threshold,
        r"mul\.rn\.f32 (%f\d+), (.*);\nadd\.rn\.f32 (%f\d+), (%f\d+), \1;",
        r"fma.rn.f32 \3, \2, \4;",
        WRONG,
    ),
    "positions with a wrong offset": Mutant(
        runs.row_pack, r"(shfl\.sync\.up.*, )\S+(, \S+, \S+;)", r"\g<1>0\2", WRONG
    ),
    "a vote without the own lane": Mutant(
        runs.scatter_unpack, r"(vote\.sync.*), \S+;", r"\1, 65535;", "mask does not contain its own"
    ),
    "a misaligned vector": Mutant(
        runs.scatter_unpack,
        r"(st\.global\S*\.v4\S* )\[(%rd\d+)\]",
        r"\1[\2+8]",
        "16 bytes misaligned",
    ),
    "no update of a histogram": Mutant(runs.sample_threshold, r"atom\.shared\.add.*;", "", WRONG),
}


def kernels(run: Run) -> dict[str, str]:
    """The PTX of each kernel that a run launches, by name."""
    executor().configure(0)
    run(BACKEND)
    _, *reports = executor().counts().split("\n\n")
    names = [report.split()[0] for report in reports]
    return {name: executor().text(name) for name in names}


def mutants(run: Run, instruction: str, replacement: str) -> Iterator[str]:
    """Yield the finding for each mutant; '' if the mutant was not detected."""
    assert runs.findings(run, BACKEND, executor(), 1) == "", "an error of the kernel itself"
    for name, text in kernels(run).items():
        begin = text.index(f".entry {name}(")
        end = text.find(".entry", begin + 1) % (len(text) + 1)  # or up to the end of the module
        for match in re.finditer(instruction, text[begin:end]):
            changed = text[begin:end][: match.start()] + match.expand(replacement)
            executor().load(text[:begin] + changed + text[begin + match.end() :])
            try:
                found = (runs.findings(run, BACKEND, executor(), seed) for seed in SEEDS)
                yield next(filter(None, found), "")
            finally:
                executor().load(text)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    """One detected mutant is enough, because a run does not execute all instructions."""
    run, instruction, replacement, expected = MUTANTS[name]
    found = []
    for report in mutants(run, instruction, replacement):
        if expected in report:
            return
        found.append(report)
    pytest.fail(f"a mutant of {run.__name__} is not caught; found: {found or 'no such line'}")
