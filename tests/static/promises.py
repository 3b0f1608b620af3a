"""What the sources promise about each kernel, and how a kernel can break it."""

from dataclasses import dataclass, field

from .kernels import Kernel


@dataclass(frozen=True)
class Promise:
    wide_loads: int = 0  # at least so many of 16 bytes
    wide_stores: int = 0
    streams_in_flight: int = 0  # at least so many streaming loads before the first is used
    halves_in_flight: int = 0  # the same, of plain loads of 16 bits
    # A correctly rounded division is made of fused multiply-adds, and flushes where it makes NaNs.
    divides: bool = False
    dynamic_shared_bytes: int = 0
    # Architectures on which fewer blocks fit than __launch_bounds__ asks for.
    fewer_blocks: dict[int, int] = field(default_factory=dict)


# By the beginning of a kernel's name; the longest that fits counts.
PROMISES = {
    # Four vectors of residual and four of gradient, all read before any is used; 16-bit gradients
    # are read by 8 bytes. Without a gradient only what is kept is written.
    "mask_pack_kernel<float>": Promise(wide_loads=8, wide_stores=4, streams_in_flight=8),
    "mask_pack_kernel<BFloat16>": Promise(wide_loads=4, wide_stores=4, streams_in_flight=8),
    "mask_pack_kernel<Float16>": Promise(wide_loads=4, wide_stores=4, streams_in_flight=8),
    "mask_pack_kernel<NoGrad>": Promise(wide_loads=4, streams_in_flight=4),
    # Four picks of x and of the residual; other loads of 32 bits hide what reads float32.
    "sample_threshold_kernel<float>": Promise(),
    "sample_threshold_kernel<BFloat16>": Promise(halves_in_flight=4),
    "sample_threshold_kernel<Float16>": Promise(halves_in_flight=4),
    "track_threshold_kernel": Promise(divides=True),
    # The sums of a payload block, 64 KB, of which the 164 KB of sm_80 hold two.
    # Eight positions and their values are read before the first is added.
    "scatter_unpack_kernel": Promise(
        wide_loads=1,
        wide_stores=1,
        streams_in_flight=16,
        dynamic_shared_bytes=16384 * 4,
        fewer_blocks={80: 2},
    ),
    # Two vectors of a lane or more; those of a row whose width is no multiple of 16 bytes are not.
    "row_pack_narrow_kernel": Promise(wide_loads=2),
    "row_pack_wide_kernel": Promise(),
    "row_gather_kernel": Promise(),
    "row_unpack_narrow_kernel": Promise(wide_stores=1),
    "row_unpack_wide_kernel": Promise(),
    # A lane's 16 columns, 32 of them in the widest rows, are read before any is used.
    "row_quantize_narrow_kernel<float": Promise(
        wide_loads=4, wide_stores=1, streams_in_flight=4, divides=True
    ),
    "row_quantize_narrow_kernel": Promise(
        wide_loads=2, wide_stores=1, streams_in_flight=2, divides=True
    ),
    "row_quantize_wide_kernel": Promise(divides=True),
    "row_dequantize_kernel": Promise(wide_stores=1),
}


def promise_of(kernel: Kernel) -> Promise:
    return PROMISES[max(filter(kernel.name.startswith, PROMISES), key=len)]


def broken(kernel: Kernel, promise: Promise) -> list[str]:
    """What the kernel does not keep, in words; empty if it keeps all."""
    none = {
        "local memory": kernel.count(r"LDL|STL"),
        "bytes of stack": kernel.stack_bytes,
        "spilled bytes": kernel.spill_bytes,
    }
    if not promise.divides:
        none["fused multiply-adds"] = kernel.fused
        none["subnormals to zero"] = kernel.count(r"F(ADD|MUL|SETP|MNMX)\S*\.FTZ")
    blocks = promise.fewer_blocks.get(kernel.architecture, kernel.min_blocks)
    at_least = {
        "wide loads": (kernel.count(r"LDG\S*\.128"), promise.wide_loads),
        "wide stores": (kernel.count(r"STG\S*\.128"), promise.wide_stores),
        "streams in flight": (kernel.streams_in_flight, promise.streams_in_flight),
        "halves in flight": (kernel.halves_in_flight, promise.halves_in_flight),
        "blocks": (kernel.blocks(promise.dynamic_shared_bytes), blocks),
    }
    return [f"{what}: {n}, not 0" for what, n in none.items() if n != 0] + [
        f"{what}: {n}, not {least} or more" for what, (n, least) in at_least.items() if n < least
    ]
