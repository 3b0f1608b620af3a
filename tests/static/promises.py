"""Promises (requirements on the machine code of each kernel), and the check that they hold."""

from dataclasses import dataclass, field, replace

from ptx.kernels import Kernel

# Patterns of the names of load instructions.
LOADS = "LDG"
STREAMS = r"LDG\.E\.EF"
VECTORS = r"LDG\.E\.128"
WORDS = r"LDG\.E$"
HALVES = r"LDG\.E\.U16"


@dataclass(frozen=True)
class Promise:
    wide_loads: int = 0  # minimum number of 16-byte loads
    wide_stores: int = 0
    # {loads: minimum number of them before the first result is used}
    in_flight: dict[str, int] = field(default_factory=dict)
    # All instructions that update memory shared with other blocks
    between_blocks: tuple[str, ...] = ()
    # A correctly rounded division uses fused multiply-adds, and instructions that flush subnormals.
    divides: bool = False
    # Multiply-adds are fused only where the product is exact, so the result is the same.
    fuses: bool = False
    dynamic_shared_bytes: int = 0
    # {architecture: blocks per multiprocessor}, if fewer fit than __launch_bounds__ requests
    fewer_blocks: dict[int, int] = field(default_factory=dict)


MARKS = ("RED.E.OR.STRONG.GPU",)  # sets a bit that only later kernels read
ADDS = ("RED.E.ADD.64.STRONG.GPU",)  # adds hashes to a checksum, in any order
QUANTIZES = Promise(
    wide_loads=16, wide_stores=8, in_flight={STREAMS: 16}, between_blocks=MARKS, divides=True
)
SUMS = Promise(wide_loads=8, wide_stores=8, in_flight={STREAMS: 8}, between_blocks=MARKS)

SCATTERS = Promise(wide_stores=1, in_flight={STREAMS: 16}, between_blocks=MARKS)

# {prefix of the kernel's name: its promises}; the longest matching prefix applies.
PROMISES = {
    # Loads eight vectors each of residual and gradient. Vectors of 16-bit gradients have 8 bytes.
    "mask_pack_stage_kernel": Promise(wide_loads=8, wide_stores=8, in_flight={STREAMS: 8}),
    "mask_pack_stage_kernel<float>": Promise(wide_loads=16, wide_stores=8, in_flight={STREAMS: 16}),
    # Loads positions and values of six groups of entries.
    "mask_pack_scatter_kernel": Promise(in_flight={LOADS: 12}),
    # Loads all eight sampled entries of a thread.
    "gather_and_select_kernel<float>": Promise(in_flight={WORDS: 16}),
    "gather_and_select_kernel<BFloat16>": Promise(in_flight={HALVES: 8, WORDS: 8}),
    "gather_and_select_kernel<Float16>": Promise(in_flight={HALVES: 8, WORDS: 8}),
    "gather_keys_kernel": Promise(in_flight={LOADS: 2}),
    "select_gathered_kernel": Promise(wide_loads=4, in_flight={VECTORS: 4}),
    # Shared memory holds the sums of a payload block, 64 KB, or of half of one. The 164 KB of sm_80
    # hold two blocks. Eight positions and values are read before the first is added. A block can
    # set bits of a rank's status.
    "scatter_unpack_kernel": replace(
        SCATTERS, dynamic_shared_bytes=16384 * 4, fewer_blocks={80: 2}
    ),
    "scatter_unpack_kernel<BlockShape<16": replace(SCATTERS, dynamic_shared_bytes=8192 * 4),
    "quantized_headers_kernel": Promise(),
    # A warp reads 1,024 elements of residual and gradient, a whole row. A block that finds a
    # non-finite entry sets a bit of the header.
    "quantize_pack_kernel": QUANTIZES,
    "quantize_pack_kernel<(PayloadFormat)0>": replace(QUANTIZES, divides=False),
    "quantize_pack_kernel<(PayloadFormat)1>": replace(QUANTIZES, divides=False),
    # Loads codes and scales of several ranks. The first block of a range can set a status bit.
    # Lanes exchange sums through 4.5 KB per warp (ternary: 8.5 KB), except with float32.
    "dequantize_sum_kernel": replace(SUMS, dynamic_shared_bytes=8 * 4608, fuses=True),
    "dequantize_sum_kernel<(PayloadFormat)0>": SUMS,
    "dequantize_sum_kernel<(PayloadFormat)1>": replace(SUMS, dynamic_shared_bytes=8 * 4608),
    "dequantize_sum_kernel<(PayloadFormat)6>": replace(
        SUMS, in_flight={STREAMS: 4}, dynamic_shared_bytes=8 * 8704, fuses=True
    ),
    # Loads two or more vectors per lane if the width is a multiple of 16 bytes.
    "row_pack_narrow_kernel<float": Promise(wide_loads=4, in_flight={VECTORS: 3}),
    "row_pack_narrow_kernel": Promise(wide_loads=2, in_flight={VECTORS: 2}),
    # Loads up to 64 columns of 16 bits. The second load may follow the use of the first.
    "row_pack_narrow_kernel<BFloat16, 4, 8>": Promise(wide_loads=2, in_flight={VECTORS: 1}),
    "row_pack_narrow_kernel<Float16, 4, 8>": Promise(wide_loads=2, in_flight={VECTORS: 1}),
    "row_pack_wide_kernel": Promise(in_flight={LOADS: 4}),
    "row_gather_kernel": Promise(in_flight={LOADS: 2}),
    # Shared memory holds the rows of a block, up to 128 bytes per thread.
    "row_unpack_narrow_kernel": Promise(
        wide_stores=1, in_flight={LOADS: 2}, dynamic_shared_bytes=256 * 128
    ),
    "row_unpack_wide_kernel": Promise(in_flight={LOADS: 2}),
    # A lane reads its 8, 16 or 32 columns before it uses any.
    "row_quantize_narrow_kernel<float": Promise(
        wide_loads=4, wide_stores=1, in_flight={STREAMS: 4}, divides=True
    ),
    "row_quantize_narrow_kernel": Promise(
        wide_loads=2, wide_stores=1, in_flight={STREAMS: 2}, divides=True
    ),
    "row_quantize_narrow_kernel<float, 2, 8>": Promise(
        wide_loads=2, wide_stores=1, in_flight={STREAMS: 2}, divides=True
    ),
    "row_quantize_narrow_kernel<BFloat16, 2, 8>": Promise(
        wide_loads=1, wide_stores=1, in_flight={STREAMS: 1}, divides=True
    ),
    "row_quantize_narrow_kernel<Float16, 2, 8>": Promise(
        wide_loads=1, wide_stores=1, in_flight={STREAMS: 1}, divides=True
    ),
    "row_quantize_wide_kernel": Promise(in_flight={LOADS: 4}, divides=True),
    # A warp loads up to 1,304 bytes, so a lane loads three vectors.
    "row_dequantize_kernel": Promise(wide_loads=3, wide_stores=1, in_flight={STREAMS: 3}),
    # Loads a warp's rows of two messages, or of four if a lane loads one vector per message.
    "row_dequantize_sum_kernel": Promise(
        wide_loads=4, wide_stores=4, in_flight={STREAMS: 4}, fuses=True
    ),
    # Loads two vectors per lane of the weights and of the snapshot, or four of float32 weights.
    "diff_pack_stage_kernel": Promise(wide_loads=4, in_flight={STREAMS: 4}, between_blocks=ADDS),
    "diff_pack_place_kernel": Promise(wide_loads=4, in_flight={LOADS: 8}),
    # A block that is invalid sets a bit of the status.
    "patch_apply_kernel": Promise(wide_loads=4, in_flight={LOADS: 4}, between_blocks=MARKS),
    "checksum_kernel": Promise(wide_loads=2, in_flight={STREAMS: 2}, between_blocks=ADDS),
}


def promise_of(kernel: Kernel) -> Promise:
    return PROMISES[max(filter(kernel.name.startswith, PROMISES), key=len)]


def broken_promises(kernel: Kernel, promise: Promise) -> list[str]:
    """Descriptions of the promises that the kernel breaks."""
    none = {
        "local memory": kernel.count(r"LDL|STL"),
        "bytes of stack": kernel.stack_bytes,
        "spilled bytes": kernel.spill_bytes,
    }
    if not promise.divides and not promise.fuses:
        none["fused multiply-adds"] = kernel.fused
    if not promise.divides:
        none["subnormals to zero"] = kernel.count(r"F(ADD|MUL|SETP|MNMX)\S*\.FTZ")
    blocks = promise.fewer_blocks.get(kernel.architecture, kernel.min_blocks)
    at_least = {
        "wide loads": (kernel.count(r"LDG\S*\.128"), promise.wide_loads),
        "wide stores": (kernel.count(r"STG\S*\.128"), promise.wide_stores),
        "blocks": (kernel.blocks(promise.dynamic_shared_bytes), blocks),
    }
    at_least |= {
        f"{loads} in flight": (kernel.in_flight(loads), least)
        for loads, least in promise.in_flight.items()
    }
    faults = [f"{what}: {n}, not 0" for what, n in none.items() if n != 0]
    faults += [f"{what}: {n}, not {m} or more" for what, (n, m) in at_least.items() if n < m]
    found, expected = sorted(kernel.between_blocks), sorted(promise.between_blocks)
    if found != expected:
        faults.append(f"between blocks: {found}, not {expected}")
    return faults
