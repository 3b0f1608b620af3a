"""The net holds: each of these faults, planted in a copy of the kernels, is caught.

What catches it is a native test, under the same seeds as in `test_native.py`: by a wrong result, a
hang or a misused collective that the emulator reports, or an access that a sanitizer reports.
"""

import planted
import pytest

from . import build
from .test_native import PROGRAMS, SEEDS, run

# fault: (program, sanitizer, what stderr must say)
CAUGHT = {
    "off by one at the edge of a tile": ("mask_pack", "none", "FAILED"),
    "a range's entries behind those of the range before": ("mask_pack", "none", "FAILED"),
    "nothing given back on overflow": ("mask_pack", "none", "FAILED"),
    "part of a pass written before it is left out": ("mask_pack", "none", "FAILED"),
    "what is left out not counted": ("mask_pack", "none", "FAILED"),
    "a NaN in what is left out not told": ("mask_pack", "none", "FAILED"),
    "a NaN left in the residual": ("mask_pack", "none", "FAILED"),
    "entries of a row in reverse": ("mask_pack", "none", "FAILED"),
    "part of a skipped segment staged": ("mask_pack", "none", "FAILED"),
    "a tile's total without its last warps": ("mask_pack", "none", "FAILED"),
    "words of segments not cleared": ("mask_pack", "none", "FAILED"),
    "no barrier before warps add to a tile's total": ("mask_pack", "thread", "ThreadSanitizer"),
    "no bar.warp.sync before records are read": ("mask_pack", "thread", "ThreadSanitizer"),
    "no barrier before a block's totals are added": ("mask_pack", "thread", "ThreadSanitizer"),
    "no barrier between checking and adding": ("scatter_unpack", "thread", "ThreadSanitizer"),
    "no bar.warp.sync between the ranks that are added": ("scatter_unpack", "thread", "data race"),
    "a mask that differs between lanes": ("scatter_unpack", "none", "waits for lanes"),
    "lanes that vote at two places": ("scatter_unpack", "none", "different collectives"),
    "a position at the end of the block accepted": ("scatter_unpack", "none", "FAILED"),
    "ranks not added in order": ("scatter_unpack", "none", "FAILED"),
    "an address off by one element": ("scatter_unpack", "none", "FAILED"),
    "last block does not acquire what the others counted": ("thresholds", "thread", "data race"),
    "one thread more than segments": ("thresholds", "address", "AddressSanitizer"),
    "one tie too many": ("rows", "none", "FAILED"),
    "the search begins where fewer than k keys reach": ("rows", "none", "FAILED"),
    "no barrier before the histogram's digit is looked for": ("rows", "thread", "data race"),
    "no bar.warp.sync between clearing a row and filling it": ("rows", "thread", "data race"),
    "no bar.warp.sync between codes and bytes": ("quantized_rows", "thread", "data race"),
    "no barrier before a block's rows leave": ("quantized_rows", "thread", "data race"),
    "a vector past the last row's end": ("quantized_rows", "none", "FAILED"),
    "no bar.warp.sync before the next codes": ("quantized_rows", "thread", "data race"),
    "128-bit stores at any alignment": ("quantized_rows", "address", "misaligned"),
}
# Each is a build of its own: by default those that build in seconds and say most.
BY_DEFAULT = {
    "part of a pass written before it is left out",
    "nothing given back on overflow",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.large) for name in CAUGHT],
)
def test_fault_is_caught(name, tmp_path):
    program, sanitizer, report = CAUGHT[name]
    csrc = planted.plant(name, tmp_path)
    binary = build.build(f"native/{program}.cpp", PROGRAMS[program], sanitizer=sanitizer, csrc=csrc)
    result = run(binary, sanitizer, SEEDS[sanitizer])
    assert result.returncode != 0 and report in result.stderr, result.stderr
