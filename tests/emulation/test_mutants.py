"""Mutants of the kernels are caught, but for some.

What catches it is a native test, under the same seeds as in `test_native.py`: by a wrong result, a
hang or a misused collective that the emulator reports, or an access that a sanitizer reports.
"""

import mutants
import pytest

from . import build
from .test_native import PROGRAMS, SEEDS, run

# mutant: (program, sanitizer, what stderr must say)
CAUGHT = {
    "off by one at the edge of a tile": ("mask_pack", "none", "FAILED"),
    "nothing given back on overflow": ("mask_pack", "none", "FAILED"),
    "part of a pass written before it is left out": ("mask_pack", "none", "FAILED"),
    "a tile's total without its last warps": ("mask_pack", "none", "FAILED"),
    "counts of segments not cleared": ("mask_pack", "none", "FAILED"),
    "no barrier before warps add to a tile's total": ("mask_pack", "thread", "ThreadSanitizer"),
    "a mask that differs between lanes": ("scatter_unpack", "none", "waits for lanes"),
    "lanes that vote at two places": ("scatter_unpack", "none", "different collectives"),
    "ranks not added in order": ("scatter_unpack", "none", "FAILED"),
    "last block does not acquire what the others counted": ("thresholds", "thread", "data race"),
    "one tie too many": ("rows", "none", "FAILED"),
    "no bar.warp.sync between clearing a row and filling it": ("rows", "thread", "data race"),
    "a vector past the last row's end": ("quantized_rows", "none", "FAILED"),
}
# Run, and not seen.
MISSED = {
    "128-bit accesses at an alignment of 8 bytes",  # mask_pack's tensors are aligned there
    "a column at the end of the row accepted",  # seed 34 draws one, and the first six are run
}
BY_DEFAULT = {"nothing given back on overflow"}  # each is a build of its own


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.large) for name in CAUGHT],
)
def test_mutant_is_caught(name, tmp_path):
    program, sanitizer, report = CAUGHT[name]
    csrc = mutants.mutate(name, tmp_path)
    binary = build.build(f"native/{program}.cpp", PROGRAMS[program], sanitizer=sanitizer, csrc=csrc)
    result = run(binary, sanitizer, SEEDS[sanitizer])
    assert result.returncode != 0 and report in result.stderr, result.stderr
