"""Faults to plant in a copy of the CUDA sources: what the nets under the kernels must catch.

The nets: the kernels emulated (`emulation/test_planted_faults.py`), and what nvcc makes of them,
executed (`ptx/test_planted_faults.py`). Each says which of these it catches, and how;
docs/kernels.md has the table.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"


@dataclass(frozen=True)
class Fault:
    op: str
    edits: tuple[
        tuple[str, str, str], ...
    ]  # file of csrc/cuda, what occurs once in it, what instead


def plant(name: str, folder: Path) -> Path:
    """A copy of csrc, in `folder`, with the fault."""
    csrc = folder / "csrc"
    for part in ("common", "cuda"):
        shutil.copytree(CSRC / part, csrc / part)
    for file, sound, faulty in FAULTS[name].edits:
        target = csrc / "cuda" / file
        text = target.read_text()
        assert text.count(sound) == 1, f"{file} has changed: plant this fault anew"
        target.write_text(text.replace(sound, faulty))
    return csrc


def _edit(op: str, *edit: str) -> Fault:
    return Fault(op, (edit,))


FAULTS = {
    # mask_pack
    "off by one at the edge of a tile": _edit(
        "mask_pack",
        "detail/range_tiles.cuh",
        "found.last ? range_end : found.bounds.begin + tile;",
        "found.last ? range_end : found.bounds.begin + tile - 1;",
    ),
    "a range's entries behind those of the range before": _edit(
        "mask_pack",
        "detail/mask_pack_place.cuh",
        "unsigned t = range_tile + thread_index()",
        "unsigned t = thread_index()",
    ),
    "nothing given back on overflow": _edit(
        "mask_pack",
        "detail/mask_pack_place.cuh",
        "restore(left, bits[a], args.value_dtype)",
        "restore(left, 0, args.value_dtype)",
    ),
    "part of a pass written before it is left out": _edit(
        "mask_pack",
        "detail/mask_pack_stage.cuh",
        "kept + of_pass > staging.room) break;",
        "kept + of_pass > staging.room) {\n"
        "        if (kHasGrad<Grad>) stream_out(residual + offset, sums[0]);\n"
        "        break;\n"
        "      }",
    ),
    "what is left out not counted": _edit(
        "mask_pack", "detail/mask_pack_stage.cuh", "      count(rows);\n", ""
    ),
    "a NaN in what is left out not told": _edit(
        "mask_pack",
        "detail/mask_pack_stage.cuh",
        "keeps && !is_finite(sum);",
        "keeps && sum == 0.0f;",
    ),
    "a NaN left in the residual": _edit(
        "mask_pack",
        "detail/mask_pack_stage.cuh",
        "finite ? taken.left : finite_or_zero(residual[e])",
        "taken.left",
    ),
    "entries of a row in reverse": _edit(
        "mask_pack",
        "detail/mask_pack_stage.cuh",
        "__popc(lanes & below)",
        "__popc(lanes & ~below) - 1",
    ),
    "part of a skipped segment staged": _edit(
        "mask_pack",
        "detail/mask_pack_stage.cuh",
        "if (shared && __any_sync(kFullWarp, skipped)) break;",
        "",
    ),
    "a tile's total without its last warps": _edit(
        "mask_pack",
        "detail/mask_pack_stage.cuh",
        "(sum >> 16 & 255) == kWarps",
        "(sum >> 16 & 255) == 1",
    ),
    "words of segments not cleared": _edit(
        "mask_pack", "detail/mask_pack_stage.cuh", "staging.segments[s] = 0;", ""
    ),
    "no barrier before warps add to a tile's total": _edit(
        "mask_pack", "detail/mask_pack_stage.cuh", "  __syncthreads();\n", ""
    ),
    "no bar.warp.sync before records are read": _edit(
        "mask_pack", "detail/mask_pack_stage.cuh", "    __syncwarp();\n    for (", "    for ("
    ),
    "no barrier before a block's totals are added": _edit(
        "mask_pack", "detail/mask_pack_place.cuh", "    __syncthreads();\n", ""
    ),
    "128-bit accesses at an alignment of 8 bytes": _edit(
        "mask_pack",
        "mask_pack.cu",
        "is_aligned(args.residual, kVectorElements * sizeof(float))",
        "is_aligned(args.residual, 8)",
    ),
    # scatter_unpack
    "no barrier between checking and adding": _edit(
        "scatter_unpack",
        "scatter_unpack.cu",
        "    __syncthreads();\n    add<Value>",
        "    add<Value>",
    ),
    "no bar.warp.sync between the ranks that are added": _edit(
        "scatter_unpack",
        "scatter_unpack.cu",
        "      }\n      __syncwarp();\n    }",
        "      }\n    }",
    ),
    "a mask that differs between lanes": _edit(
        "scatter_unpack",
        "scatter_unpack.cu",
        "__any_sync(kFullWarp, bad)",
        "__any_sync(lane_index() < 16 ? 0xffffu : kFullWarp, bad)",
    ),
    "lanes that vote at two places": _edit(
        "scatter_unpack",
        "scatter_unpack.cu",
        "    if (__any_sync(kFullWarp, bad)) return false;",
        "    bool any;\n"
        "    if (lane < 16) {\n"
        "      any = __any_sync(kFullWarp, bad);\n"
        "    } else {\n"
        "      any = __any_sync(kFullWarp, bad);\n"
        "    }\n"
        "    if (any) return false;",
    ),
    "a position at the end of the block accepted": _edit(
        "scatter_unpack", "scatter_unpack.cu", "position[q] >= length", "position[q] > length"
    ),
    "ranks not added in order": _edit(
        "scatter_unpack",
        "scatter_unpack.cu",
        "const int64_t rank = begin + thread_index();",
        "const int64_t rank = begin + num_ranks - 1 - thread_index();",
    ),
    "an address off by one element": _edit(
        "scatter_unpack", "scatter_unpack.cu", "    out[i] = finish(", "    out[i + 1] = finish("
    ),
    # sample_threshold, track_threshold
    "last block does not acquire what the others counted": _edit(
        "sample_threshold",
        "sample_threshold.cu",
        "add_acquire_release(&state.done[pass], 1)",
        "atomicAdd(&state.done[pass], 1u)",
    ),
    "one thread more than segments": _edit(
        "track_threshold",
        "track_threshold.cu",
        "if (s >= args.num_segments) return;",
        "if (s > args.num_segments) return;",
    ),
    # Rows
    "one tie too many": _edit(
        "row_pack", "row_pack.cu", "left > 0 && tied != 0", "left >= 0 && tied != 0"
    ),
    "the search begins where fewer than k keys reach": _edit(
        "row_pack", "row_pack.cu", "if (k < groups * kLanes) {", "if (k < 8 * groups * kLanes) {"
    ),
    "no barrier before the histogram's digit is looked for": _edit(
        "row_pack",
        "detail/radix_select.cuh",
        "    });\n    __syncthreads();\n    Selected selected;",
        "    });\n    Selected selected;",
    ),
    "a column at the end of the row accepted": _edit(
        "row_gather", "detail/positions.cuh", "if (column >= width)", "if (column > width)"
    ),
    "no bar.warp.sync between clearing a row and filling it": _edit(
        "row_unpack",
        "row_unpack.cu",
        "make_uint4(0, 0, 0, 0);\n  }\n  __syncwarp();",
        "make_uint4(0, 0, 0, 0);\n  }",
    ),
    "no bar.warp.sync between codes and bytes": _edit(
        "row_quantize",
        "row_quantize.cu",
        "  __syncwarp();\n  const int bytes",
        "  const int bytes",
    ),
    "no barrier before a block's rows leave": _edit(
        "row_quantize",
        "row_quantize.cu",
        "  __syncthreads();\n  store_bytes",
        "  store_bytes",
    ),
    "a vector past the last row's end": _edit(
        "row_quantize",
        "row_quantize.cu",
        "if (i >= skip && i + 16 <= skip + count) {",
        "if (i >= skip && i < skip + count) {",
    ),
    "no bar.warp.sync before the next codes": _edit(
        "row_dequantize",
        "row_dequantize.cu",
        "      }\n    }\n    __syncwarp();\n  }",
        "      }\n    }\n  }",
    ),
    "128-bit stores at any alignment": _edit(
        "row_dequantize",
        "row_dequantize.cu",
        "is_aligned(args.out, Policy::kVectorBytes) && bytes",
        "bytes",
    ),
}
