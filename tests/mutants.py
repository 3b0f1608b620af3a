"""Mutants of the CUDA sources, one a mechanism: what the checkers of the kernels must catch.

The checkers: what nvcc makes of the sources, executed (`ptx/test_mutants.py`), and the sources
emulated (`emulation/test_mutants.py`). Each says by what it catches them, and which it misses.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"


@dataclass(frozen=True)
class Mutant:
    op: str
    file: str  # of csrc/cuda
    original: str  # what occurs once in it
    instead: str


def mutate(name: str, folder: Path) -> Path:
    """A copy of csrc, in `folder`, with the mutant."""
    csrc, mutant = folder / "csrc", MUTANTS[name]
    for part in ("common", "cuda"):
        shutil.copytree(CSRC / part, csrc / part)
    target = csrc / "cuda" / mutant.file
    text = target.read_text()
    assert text.count(mutant.original) == 1, f"{mutant.file} has changed: make this mutant anew"
    target.write_text(text.replace(mutant.original, mutant.instead))
    return csrc


MUTANTS = {
    "off by one at the edge of a tile": Mutant(
        "mask_pack",
        "detail/range_tiles.cuh",
        "found.last ? range_end : found.bounds.begin + tile;",
        "found.last ? range_end : found.bounds.begin + tile - 1;",
    ),
    "nothing given back on overflow": Mutant(
        "mask_pack",
        "detail/mask_pack_place.cuh",
        "left = restore(left, bits[a], args.value_dtype);",
        "",
    ),
    "part of a pass written before it is left out": Mutant(
        "mask_pack",
        "detail/mask_pack_stage.cuh",
        "kept + of_pass > staging.room) break;",
        "kept + of_pass > staging.room) {\n"
        "        if (kHasGrad<Grad>) stream_out(residual, sums[0]);\n"
        "        break;\n"
        "      }",
    ),
    "a tile's total without its last warps": Mutant(
        "mask_pack",
        "detail/mask_pack_stage.cuh",
        "(sum >> 16 & 255) == kWarps",
        "(sum >> 16 & 255) == 1",
    ),
    "counts of segments not cleared": Mutant(
        "mask_pack", "detail/mask_pack_stage.cuh", "args.seen[s] = 0;", ""
    ),
    "no barrier before warps add to a tile's total": Mutant(
        "mask_pack", "detail/mask_pack_stage.cuh", "  __syncthreads();\n", ""
    ),
    "128-bit accesses at an alignment of 8 bytes": Mutant(
        "mask_pack",
        "mask_pack.cu",
        "is_aligned(args.residual, kVectorElements * sizeof(float))",
        "is_aligned(args.residual, 8)",
    ),
    "a mask that differs between lanes": Mutant(
        "scatter_unpack",
        "detail/rank_block.cuh",
        "__any_sync(kFullWarp, bad)",
        "__any_sync(lane_index() < 16 ? 0xffffu : kFullWarp, bad)",
    ),
    "lanes that vote at two places": Mutant(
        "scatter_unpack",
        "detail/rank_block.cuh",
        "    if (__any_sync(kFullWarp, bad)) return false;",
        "    bool any;\n"
        "    if (lane < 16) {\n"
        "      any = __any_sync(kFullWarp, bad);\n"
        "    } else {\n"
        "      any = __any_sync(kFullWarp, bad);\n"
        "    }\n"
        "    if (any) return false;",
    ),
    "ranks not added in order": Mutant(
        "scatter_unpack",
        "scatter_unpack.cu",
        "const int64_t rank = begin + thread_index();",
        "const int64_t rank = begin + num_ranks - 1 - thread_index();",
    ),
    "last block does not acquire what the others counted": Mutant(
        "sample_threshold",
        "sample_threshold.cu",
        "add_acquire_release(&state.done[pass], 1)",
        "atomicAdd(&state.done[pass], 1u)",
    ),
    "one tie too many": Mutant(
        "row_pack", "row_pack.cu", "left > 0 && tied != 0", "left >= 0 && tied != 0"
    ),
    "a column at the end of the row accepted": Mutant(
        "row_gather", "detail/positions.cuh", "if (column >= width)", "if (column > width)"
    ),
    "no bar.warp.sync between clearing a row and filling it": Mutant(
        "row_unpack",
        "row_unpack.cu",
        "make_uint4(0, 0, 0, 0);\n  }\n  __syncwarp();",
        "make_uint4(0, 0, 0, 0);\n  }",
    ),
    "a vector past the last row's end": Mutant(
        "row_quantize",
        "row_quantize.cu",
        "if (i >= skip && i + 16 <= skip + count) {",
        "if (i >= skip && i < skip + count) {",
    ),
}
