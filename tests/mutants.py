"""Mutants of the CUDA sources, one a mechanism: the executor of PTX must catch them.

`ptx/test_mutants.py` says by what it does.
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
        "mask_pack.cu",
        "const int end = min(length, (lane + 1)",
        "const int end = min(length - 1, (lane + 1)",
    ),
    "nothing given back on overflow": Mutant(
        "mask_pack",
        "mask_pack.cu",
        "left = restore(left, bits[a], args.value_dtype);",
        "",
    ),
    "part of a pass written before it is left out": Mutant(
        "mask_pack",
        "mask_pack.cu",
        "kept + kept_in_pass > slot.capacity) break;",
        "kept + kept_in_pass > slot.capacity) {\n"
        "        stream_out(residual, sums[0]);\n"
        "        break;\n"
        "      }",
    ),
    "a tile's total without its last warps": Mutant(
        "mask_pack",
        "mask_pack.cu",
        "(sum >> 16 & 255) == kWarps",
        "(sum >> 16 & 255) == 1",
    ),
    "no barrier before warps add to a tile's total": Mutant(
        "mask_pack", "mask_pack.cu", "block_sum = 0;\n  __syncthreads();\n", "block_sum = 0;\n"
    ),
    "128-bit accesses at an alignment of 8 bytes": Mutant(
        "mask_pack",
        "mask_pack.cu",
        "is_aligned(args.residual, kVectorElements * sizeof(float))",
        "is_aligned(args.residual, 8)",
    ),
    "a tile's total not noted": Mutant(
        "mask_pack",
        "mask_pack.cu",
        "(sum >> 16 & 255) == kWarps",
        "(sum >> 16 & 255) > kWarps",
    ),
    "entries past the capacity": Mutant(
        "mask_pack", "mask_pack.cu", "if (at[a] + i < output.capacity) {", "if (true) {"
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
    "no bar.warp.sync between one rank's entries and the next's": Mutant(
        "scatter_unpack", "scatter_unpack.cu", "      }\n      __syncwarp();\n", "      }\n"
    ),
    "half of the sums not cleared": Mutant(
        "scatter_unpack", "scatter_unpack.cu", "i < kWarpElements / 4;", "i < kWarpElements / 8;"
    ),
    "the last block written whole": Mutant(
        "scatter_unpack",
        "scatter_unpack.cu",
        "min(block.bounds.end - begin, int64_t{kWarpElements})",
        "int64_t{kWarpElements}",
    ),
    "last block does not acquire what the others counted": Mutant(
        "sample_threshold",
        "sample_threshold.cu",
        "add_acquire_release(&state.done[pass], 1)",
        "atomicAdd(&state.done[pass], 1u)",
    ),
    "one pick more than there are": Mutant(
        "sample_threshold",
        "sample_threshold.cu",
        "if (pick >= picks.count)",
        "if (pick > picks.count)",
    ),
    "only the histograms cleared": Mutant(
        "sample_threshold",
        "sample_threshold.cu",
        "0, sizeof(RangeState) * args.ranges",
        "0, sizeof(states->histogram) * args.ranges",
    ),
    "an entry more than the range has": Mutant(
        "quantize_pack",
        "detail/entry_rows.cuh",
        "+ e < length - lane_index()",
        "+ e <= length - lane_index()",
    ),
    "a row past the range's last": Mutant(
        "quantize_pack", "quantize_pack.cu", "  if (begin >= tile.bounds.end) return;\n", ""
    ),
    "no bar.warp.sync before a row's bytes leave": Mutant(
        "quantize_pack",
        "detail/quantize_entries.cuh",
        "    __syncwarp();\n    for (int i = lane",
        "    for (int i = lane",
    ),
    "the last byte of 64 codes not staged": Mutant(
        "quantize_pack",
        "detail/quantize_entries.cuh",
        "if (lane < kGroupBytes)",
        "if (lane < kGroupBytes - 1)",
    ),
    "the last step of a reduction left out": Mutant(
        "quantize_pack",
        "detail/quantize_entries.cuh",
        "return operation(values[0], __shfl_xor_sync(kFullWarp, values[0], 1));",
        "return values[0];",
    ),
    "what is not finite not told": Mutant(
        "quantize_pack", "detail/quantize_entries.cuh", "kFlagNonFinite} << 24", "0} << 24"
    ),
    "half of the lanes with another group's result": Mutant(
        "quantize_pack",
        "detail/quantize_entries.cuh",
        "return __shfl_sync(kFullWarp, value, 2 * vector, kHalfWarp);",
        "return __shfl_sync(kFullWarp, value, 2 * vector);",
    ),
    "kept magnitudes counted with those up to the bound": Mutant(
        "quantize_pack",
        "detail/quantize_entries.cuh",
        "kept[v] += magnitude > bound_of_vector;",
        "kept[v] += magnitude >= 0;",
    ),
    "no barrier before headers are known to be sound": Mutant(
        "dequantize_sum",
        "detail/sum_payloads.cuh",
        "count, shared);\n        __syncthreads();",
        "count, shared);",
    ),
    "the last rank's header not looked at": Mutant(
        "dequantize_sum",
        "detail/sum_payloads.cuh",
        "if (index >= count) return;",
        "if (index + 1 >= count) return;",
    ),
    "rows that the range does not have": Mutant(
        "dequantize_sum",
        "detail/sum_payloads.cuh",
        "const int rows = min(in_block - first, kRows);",
        "const int rows = kRows;",
    ),
    "a payload with a wrong header added": Mutant(
        "dequantize_sum", "detail/sum_payloads.cuh", " || !sound[p + k]) continue", ") continue"
    ),
    "one payload of those in flight left out": Mutant(
        "dequantize_sum", "detail/sum_payloads.cuh", "used |= 1u << k;", "used |= 2u >> k;"
    ),
    "the status of the second block's headers": Mutant(
        "dequantize_sum", "detail/sum_payloads.cuh", "block.index == 0", "block.index == 1"
    ),
    "a byte beyond 242 not cut": Mutant(
        "dequantize_sum",
        "detail/sum_codes.cuh",
        "8388608.0f + 121.0f), 121.0f)",
        "8388608.0f + 121.0f), 127.0f)",
    ),
    "no bar.warp.sync before codes are put over sums": Mutant(
        "dequantize_sum_pack",
        "detail/sum_payloads.cuh",
        "      __syncwarp();  // until all have what is written over\n",
        "",
    ),
    "the residual read past its end": Mutant(
        "dequantize_sum_pack", "dequantize_sum_pack.cu", "is_within(v, e, length) ?", "true ?"
    ),
    "half of the sums not handed over": Mutant(
        "dequantize_sum_pack",
        "detail/sum_codes.cuh",
        "for (int e = 0; e < kEach; e += kVectorElements)",
        "for (int e = 0; e < kEach / 2; e += kVectorElements)",
    ),
    "the mean without its scale": Mutant(
        "dequantize_sum_pack",
        "dequantize_sum_pack.cu",
        "accumulate(old[v][e], x[v][e], scale)",
        "accumulate(old[v][e], x[v][e], 1.0f)",
    ),
    "one tie too many": Mutant(
        "row_pack", "row_pack.cu", "left > 0 && tied != 0", "left >= 0 && tied != 0"
    ),
    "rows past the last packed": Mutant("row_pack", "row_pack.cu", "  if (!active) return;\n", ""),
    "no barrier before a digit is used": Mutant(
        "row_pack",
        "detail/radix_select.cuh",
        "shared.selected = selected;\n    __syncthreads();",
        "shared.selected = selected;",
    ),
    "half of the histogram not cleared": Mutant(
        "row_pack",
        "detail/radix_select.cuh",
        "b < kBins; b += kThreads)",
        "b < kBins / 2; b += kThreads)",
    ),
    "a column at the end of the row accepted": Mutant(
        "row_gather", "detail/positions.cuh", "if (column >= width)", "if (column > width)"
    ),
    "no barrier before other warps' totals are read": Mutant(
        "row_gather",
        "detail/scan.cuh",
        "= result.aggregate;\n    __syncthreads();",
        "= result.aggregate;",
    ),
    "the first warp's total not noted": Mutant(
        "row_gather",
        "detail/scan.cuh",
        "if (lane == 0) storage",
        "if (lane == 0 && warp_index() > 0) storage",
    ),
    "no bar.warp.sync between clearing a row and filling it": Mutant(
        "row_unpack",
        "row_unpack.cu",
        "make_uint4(0, 0, 0, 0);\n  }\n  __syncwarp();",
        "make_uint4(0, 0, 0, 0);\n  }",
    ),
    "rows past the last unpacked": Mutant(
        "row_unpack", "row_unpack.cu", "  if (!active) return;\n", ""
    ),
    "the end of a row not cleared": Mutant(
        "row_unpack",
        "row_unpack.cu",
        "kElementsPerVector) {\n    *reinterpret_cast<uint4*>(stage + i) =",
        "kElementsPerVector) {\n"
        "    if (i + kElementsPerVector > width) break;\n"
        "    *reinterpret_cast<uint4*>(stage + i) =",
    ),
    "a vector past the last row's end": Mutant(
        "row_quantize",
        "row_quantize.cu",
        "if (i >= skip && i + 16 <= skip + count) {",
        "if (i >= skip && i < skip + count) {",
    ),
    "no barrier before rows leave": Mutant(
        "row_quantize", "row_quantize.cu", "  __syncthreads();\n  store_bytes", "  store_bytes"
    ),
    "half of a scale not written": Mutant(
        "row_quantize",
        "row_quantize.cu",
        "    out[bytes + 1] = static_cast<uint8_t>(quantizer.scale.bits >> 8);\n",
        "",
    ),
    "one row more than there are": Mutant(
        "row_dequantize", "row_dequantize.cu", "index < args.rows;", "index <= args.rows;"
    ),
    "no bar.warp.sync before codes are read": Mutant(
        "row_dequantize",
        "row_dequantize.cu",
        "    __syncwarp();\n    for (int c = lane",
        "    for (int c = lane",
    ),
    "a byte's first code not stored": Mutant(
        "row_dequantize",
        "detail/row_codes.cuh",
        "for (int i = 0; i < codes_per_byte(kFormat); ++i)",
        "for (int i = 1; i < codes_per_byte(kFormat); ++i)",
    ),
}
