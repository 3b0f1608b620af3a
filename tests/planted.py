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
    # mask_pack: the look-back
    "status and count in two relaxed words": Fault(
        "mask_pack",
        (
            (
                "detail/look_back.cuh",
                "  store_relaxed(word, count.count << 3 | Word{count.non_finite} << 2 | status);",
                "  store_relaxed(word + 4096 * status, count.count << 3 | count.non_finite * 4);\n"
                "  store_relaxed(word, status);",
            ),
            (
                "detail/look_back.cuh",
                "seen[w] = tile >= 0 ? load_relaxed(&words[tile]) : kInclusive;",
                "seen[w] = tile >= 0 ? load_relaxed(&words[tile]) : kInclusive;\n"
                "      if (tile >= 0 && seen[w] != kNotYet) {\n"
                "        seen[w] |= load_relaxed(&words[tile] + 4096 * seen[w]);\n"
                "      }",
            ),
            (
                "mask_pack.cu",
                "(tiles + args.num_segments + 1)",
                "(tiles + args.num_segments + 12288)",
            ),
        ),
    ),
    "status published before the count": _edit(
        "mask_pack",
        "detail/look_back.cuh",
        "  store_relaxed(word, ",
        "  store_relaxed(word, status);\n  store_relaxed(word, ",
    ),
    "inclusive status ignored": _edit(
        "mask_pack",
        "detail/look_back.cuh",
        "__ballot_sync(kFullWarp, status == kInclusive)",
        "__ballot_sync(kFullWarp, nearest - w * kWarpSize - lane < 0)",
    ),
    "look-back includes the tile beyond the nearest inclusive one": _edit(
        "mask_pack",
        "detail/look_back.cuh",
        "(inclusive & -inclusive) * 2 - 1",
        "(inclusive & -inclusive) * 4 - 1",
    ),
    "look-back leaves out a tile between two windows": _edit(
        "mask_pack",
        "detail/look_back.cuh",
        "nearest -= kWarpSize;",
        "nearest -= kWarpSize + 1;",
    ),
    "a tile never published": _edit(
        "mask_pack",
        "detail/look_back.cuh",
        "if (lane == 0) publish(&words[index], own, index == 0 ? kInclusive : kOwn);",
        "if (lane == 0 && index != 0) publish(&words[index], own, index == 0 ? kInclusive : kOwn);",
    ),
    # mask_pack: the rest
    "tile numbered by blockIdx instead of a ticket": _edit(
        "mask_pack",
        "detail/mask_pack_tile.cuh",
        "atomicAdd(ticket, 1u)",
        "blockIdx.x + 0 * *ticket",
    ),
    "a tile takes the segments of the tile that its block's index names": _edit(
        "mask_pack",
        "detail/mask_pack_tile.cuh",
        "segment[0] <= bounds.begin &&\n      bounds.end <= segment[1]",
        "segment[0] <= segment[1]",
    ),
    "off by one at the edge of a tile": _edit(
        "mask_pack",
        "detail/range_tiles.cuh",
        "found.last ? range_end : found.bounds.begin + tile;",
        "found.last ? range_end : found.bounds.begin + tile - 1;",
    ),
    "no barrier before the warps' counts are read": _edit(
        "mask_pack",
        "mask_pack.cu",
        "count << 1 | non_finite;\n  __syncthreads();",
        "count << 1 | non_finite;",
    ),
    "no barrier before pack": _edit(
        "mask_pack", "mask_pack.cu", "  __syncthreads();\n  pack(", "  pack("
    ),
    "no repair of the residual on overflow": _edit(
        "mask_pack", "mask_pack.cu", "args.residual[begin + offset] = acc;", ";"
    ),
    "scratch not cleared": _edit(
        "mask_pack",
        "mask_pack.cu",
        "cudaMemsetAsync(scratch, 0, mask_pack_scratch_bytes(args), stream)",
        "cudaMemsetAsync(scratch, 0, 8, stream)",
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
