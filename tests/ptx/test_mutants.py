"""Each of the mutants of the CUDA sources is caught.

What catches it is a run of its op under a few seeds: the executor's report, or a wrong answer.
"""

import itertools
import re

import mutants
import pytest

from dct_kernels._schemas import OPS

from . import build, runs
from .backend import BACKEND, Executor, executor
from .launchers import launchers

pytestmark = pytest.mark.skipif(
    build.missing() is not None, reason=f"not on this machine: {build.missing()}"
)
SEEDS = range(1, 6)

RACE, OUT_OF_BOUNDS, UNINITIALIZED = "data race", "out of bounds", "uninitialized"
ELSEWHERE = f"{RACE}|{OUT_OF_BOUNDS}"  # past its place, where other data may lie
MISALIGNED = "16 bytes misaligned"

# mutant: (run, what is found: the executor's words, or "wrong")
CAUGHT = {
    "off by one at the edge of a tile": (runs.mask_pack, "wrong"),
    "nothing given back on overflow": (runs.mask_pack, "wrong"),
    "part of a pass written before it is left out": (runs.mask_pack, "wrong"),
    "a tile's total without its last warps": (runs.mask_pack, "wrong|data race|out of bounds"),
    "no barrier before warps add to a tile's total": (runs.mask_pack, RACE),
    "128-bit accesses at an alignment of 8 bytes": (runs.mask_pack_at_8_bytes, MISALIGNED),
    "a tile's total not noted": (runs.mask_pack, UNINITIALIZED),
    "entries past the capacity": (runs.mask_pack, ELSEWHERE),
    "a mask that differs between lanes": (runs.scatter_unpack, "deadlock"),
    "lanes that vote at two places": (runs.scatter_unpack, "waits for it elsewhere"),
    "ranks not added in order": (runs.scatter_unpack, "wrong"),
    "no bar.warp.sync between one rank's entries and the next's": (runs.scatter_unpack, RACE),
    "half of the sums not cleared": (runs.scatter_unpack, UNINITIALIZED),
    "the last block written whole": (runs.scatter_unpack, ELSEWHERE),
    "last block does not acquire what the others counted": (runs.sample_threshold, RACE),
    "one pick more than there are": (runs.sample_threshold, OUT_OF_BOUNDS),
    "only the histograms cleared": (runs.sample_threshold, UNINITIALIZED),
    "an entry more than the range has": (runs.quantize_pack, OUT_OF_BOUNDS),
    "a row past the range's last": (runs.quantize_pack, OUT_OF_BOUNDS),
    "no bar.warp.sync before a row's bytes leave": (runs.quantize_pack, RACE),
    "the last byte of 64 codes not staged": (runs.quantize_pack, UNINITIALIZED),
    "the last step of a reduction left out": (runs.quantize_pack, "wrong"),
    "what is not finite not told": (runs.quantize_pack, "wrong"),
    "half of the lanes with another group's result": (runs.quantize_pack, "wrong"),
    "kept magnitudes counted with those up to the bound": (runs.quantize_pack, "wrong"),
    "no barrier before headers are known to be sound": (runs.dequantize_sum, RACE),
    "the last rank's header not looked at": (runs.dequantize_sum, UNINITIALIZED),
    "rows that the range does not have": (runs.dequantize_sum, OUT_OF_BOUNDS),
    "a payload with a wrong header added": (runs.dequantize_sum, "wrong"),
    "one payload of those in flight left out": (runs.dequantize_sum, "wrong"),
    "the status of the second block's headers": (runs.dequantize_sum, "wrong"),
    "a byte beyond 242 not cut": (runs.dequantize_sum, "wrong"),
    "no bar.warp.sync before codes are put over sums": (runs.dequantize_sum_pack, RACE),
    "the residual read past its end": (runs.dequantize_sum_pack, OUT_OF_BOUNDS),
    "half of the sums not handed over": (runs.dequantize_sum_pack, UNINITIALIZED),
    "the mean without its scale": (runs.dequantize_sum_pack, "wrong"),
    "one tie too many": (runs.row_pack, "wrong|out of bounds|data race"),
    "rows past the last packed": (runs.row_pack, OUT_OF_BOUNDS),
    "no barrier before a digit is used": (runs.row_pack, RACE),
    "half of the histogram not cleared": (runs.row_pack, UNINITIALIZED),
    "a column at the end of the row accepted": (runs.row_gather, OUT_OF_BOUNDS),
    "no barrier before other warps' totals are read": (runs.row_gather, RACE),
    "the first warp's total not noted": (runs.row_gather, UNINITIALIZED),
    "no bar.warp.sync between clearing a row and filling it": (runs.row_unpack, RACE),
    "rows past the last unpacked": (runs.row_unpack, OUT_OF_BOUNDS),
    "the end of a row not cleared": (runs.row_unpack, UNINITIALIZED),
    "a vector past the last row's end": (runs.row_quantize, OUT_OF_BOUNDS),
    "no barrier before rows leave": (runs.row_quantize, RACE),
    "half of a scale not written": (runs.row_quantize, UNINITIALIZED),
    "one row more than there are": (runs.row_dequantize, OUT_OF_BOUNDS),
    "no bar.warp.sync before codes are read": (runs.row_dequantize, RACE),
    "a byte's first code not stored": (runs.row_dequantize, UNINITIALIZED),
}
# Each is a build of its own: by default one of mask_pack, and those that build in seconds.
BY_DEFAULT = {
    "part of a pass written before it is left out",
    "last block does not acquire what the others counted",
    "a column at the end of the row accepted",
    "the first warp's total not noted",
    "no bar.warp.sync between clearing a row and filling it",
}


def test_every_mutant_can_be_made(tmp_path):
    for name in mutants.MUTANTS:
        mutants.mutate(name, tmp_path / name)


def test_every_op_has_mutants_of_every_kind():
    assert CAUGHT.keys() == mutants.MUTANTS.keys()
    kinds = {
        (mutants.MUTANTS[name].op, kind)
        for name, (_, found) in CAUGHT.items()
        for kind in found.split("|")
    }
    assert kinds >= set(itertools.product(OPS, (RACE, OUT_OF_BOUNDS, UNINITIALIZED)))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.large) for name in CAUGHT],
)
def test_mutant_is_caught(name, tmp_path):
    run, report = CAUGHT[name]
    csrc = mutants.mutate(name, tmp_path)
    mutant = Executor(build.build({mutants.MUTANTS[name].op: csrc}))
    backend = launchers(mutant.call)
    caught = next(filter(None, (runs.findings(run, backend, mutant, seed) for seed in SEEDS)), None)
    assert caught is not None and re.search(report, caught), caught


EVERY_RUN = [*(getattr(runs, op) for op in OPS), runs.mask_pack_at_8_bytes]


@pytest.mark.parametrize("run", EVERY_RUN)
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(100), marks=pytest.mark.large)])
def test_sound_sources_are_silent(run, seeds):
    assert {runs.findings(run, BACKEND, executor(), seed) for seed in seeds} == {""}
