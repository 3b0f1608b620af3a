"""The payload formats: little-endian messages of a fixed size.

The sparse payload of mask_pack and scatter_unpack holds the entries that pass a threshold:

    header (64 bytes) | u32 starts[blocks + 1] | u16 positions[capacity] | value[capacity]

Each section begins at a multiple of 16 bytes. `starts[b]` is the index of the first entry of block
b (16,384 elements), so a reader can locate any block without a search.

The dense payload of quantize_pack and dequantize_sum holds all entries:

    header (64 bytes) | rows of 1,024 entries: codes, then a bfloat16 scale per 64 entries
"""

import struct
from typing import Any, NamedTuple

import torch

from .checks import fail, require_choice, require_dtype, require_int, require_type

BLOCK = 16384
HEADER_BYTES = 64
MAGIC = 0x31544344  # "DCT1"
VERSION = 1
FLAG_OVERFLOW = 1
FLAG_NON_FINITE = 2
VALUE_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}

FLAGS_BYTE = 7  # offset of the flags in the header
HEADER = struct.Struct("<IHBBQII40s")  # magic, version, value dtype, flags, numel, capacity, count

# Dense payloads. Versions 2 and 3 are no longer supported.
QUANTIZED_VERSION = 4
QUANTIZED_CODES = {"float32": 0, "bfloat16": 1, "int8": 4, "int4": 5, "ternary": 6}
ROW = 1024  # elements; a block consists of whole rows
SCALED = 64  # elements of a group, which has one scale in the formats with scales
# The bytes of the codes of a group, for each format.
CODE_BYTES = {"float32": 256, "bfloat16": 128, "int8": 64, "int4": 32, "ternary": 13}
UNSCALED = ("float32", "bfloat16")


class PayloadLayout(NamedTuple):
    """The size of one range of a sparse payload and the offsets of its sections, in bytes.

    Attributes:
        nbytes: size, a multiple of 16.
        starts: offset of the block starts.
        positions: offset of the positions.
        values: offset of the values.
    """

    nbytes: int
    starts: int
    positions: int
    values: int


class PayloadInfo(NamedTuple):
    """The header of a payload, or of one of its ranges.

    Attributes:
        value_dtype: torch.float32 or torch.bfloat16; for a dense payload, its format as a string.
        numel: number of elements of the tensor or of the range.
        capacity: maximum number of entries.
        count: number of packed entries.
        overflow: whether more entries passed the threshold than the capacity allows.
        non_finite: whether at least one entry of the range is NaN or infinite.
    """

    value_dtype: torch.dtype | str
    numel: int
    capacity: int
    count: int  # type: ignore[assignment]  # replaces tuple.count
    overflow: bool
    non_finite: bool


def range_blocks(numel: int, ranges: int) -> int:
    """The number of blocks per range. The last ranges may have fewer blocks, or none."""
    blocks = (numel + BLOCK - 1) // BLOCK
    return (blocks + ranges - 1) // ranges


def range_length(tensor: torch.Tensor, ranges: int) -> int:
    """The elements of a full range of a dense payload: whole blocks, or a row of a 2-D tensor."""
    if tensor.dim() == 2 and ranges > 1:
        return tensor.shape[1]
    return range_blocks(tensor.numel(), ranges) * BLOCK


def range_bounds(numel: int, ranges: int, index: int) -> tuple[int, int]:
    """The first element of range `index`, and the element after its last one."""
    length = range_blocks(numel, ranges) * BLOCK
    return min(index * length, numel), min((index + 1) * length, numel)


def header_kind(value_dtype: torch.dtype) -> int:
    """The first 8 bytes of a header as a number: magic, version and value dtype, without flags."""
    return MAGIC | VERSION << 32 | VALUE_DTYPE_CODES[value_dtype] << 48


def payload_layout(
    numel: int, capacity: int, value_dtype: torch.dtype, ranges: int = 1
) -> PayloadLayout:
    """Return the size and the section offsets, in bytes, of a sparse payload.

    With `ranges` R > 1, the payload tensor has the shape [R, nbytes], and each row has this layout.

    Args:
        numel: number of elements of the tensor (of all ranges together), >= 0.
        capacity: maximum number of entries per range, 1 to 2**32 - 1.
        value_dtype: torch.float32 or torch.bfloat16.
        ranges: number of equal ranges that the tensor is split into, 1 to 2**31 - 1.

    Raises:
        ValueError, TypeError: an argument is invalid.

    >>> payload_layout(1_000_000, 6_250, torch.bfloat16)
    PayloadLayout(nbytes=25344, starts=64, positions=320, values=12832)
    """
    require_int("payload_layout", "numel", numel, 0, 2**63 - 1)
    require_int("payload_layout", "capacity", capacity, 1, 2**32 - 1)
    require_int("payload_layout", "ranges", ranges, 1, 2**31 - 1)
    require_dtype("payload_layout", "value_dtype", value_dtype, tuple(VALUE_DTYPE_CODES))
    positions = _align16(HEADER_BYTES + 4 * (range_blocks(numel, ranges) + 1))
    values = _align16(positions + 2 * capacity)
    nbytes = _align16(values + value_dtype.itemsize * capacity)
    return PayloadLayout(nbytes, HEADER_BYTES, positions, values)


def quantized_payload_bytes(numel: int, format: str, ranges: int = 1) -> int:
    """Return the size, in bytes, of a dense payload, or of each of its ranges.

    Args:
        numel: number of elements of the tensor (of all ranges together), >= 0.
        format: "float32", "bfloat16", "int8", "int4" or "ternary".
        ranges: number of equal ranges that the tensor is split into, 1 to 2**31 - 1.

    Raises:
        ValueError, TypeError: an argument is invalid.

    >>> quantized_payload_bytes(1_000_000, "int4")
    531552
    """
    require_int("quantized_payload_bytes", "numel", numel, 0, 2**63 - 1)
    require_choice("quantized_payload_bytes", "format", format, tuple(QUANTIZED_CODES))
    require_int("quantized_payload_bytes", "ranges", ranges, 1, 2**31 - 1)
    longest = min(numel, range_blocks(numel, ranges) * BLOCK)
    return HEADER_BYTES + (longest + ROW - 1) // ROW * quantized_row_bytes(format)


def quantized_row_bytes(format: str) -> int:
    """The bytes of a row of 1,024 entries, a multiple of 16."""
    return ROW // SCALED * (CODE_BYTES[format] + (0 if format in UNSCALED else 2))


def read_header(op: str, arg: str, payload: torch.Tensor) -> tuple[Any, ...]:
    """Return the fields of `HEADER` in a payload, uint8 [nbytes]. Synchronizes with the device."""
    require_type(op, arg, payload, torch.Tensor, "a tensor")
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() < HEADER_BYTES:
        got = f"{str(payload.dtype).removeprefix('torch.')} {list(payload.shape)}"
        fail(op, arg, f"uint8 [nbytes] with nbytes >= {HEADER_BYTES}", got)
    return HEADER.unpack(bytes(payload[:HEADER_BYTES].tolist()))


def payload_info(payload: torch.Tensor) -> PayloadInfo:
    """Return the contents of the header of one payload, uint8 [nbytes].

    This function copies 64 bytes to the host and synchronizes, so it cannot run in CUDA graphs or
    torch.compile.

    Raises:
        ValueError, TypeError: `payload` is not a payload of this library.
    """
    header = read_header("payload_info", "payload", payload)
    magic, version, code, flags, numel, capacity, count, _ = header
    kinds: dict[tuple[int, int], torch.dtype | str] = {
        (VERSION, code): dtype for dtype, code in VALUE_DTYPE_CODES.items()
    }
    kinds |= {(QUANTIZED_VERSION, code): format for format, code in QUANTIZED_CODES.items()}
    if magic != MAGIC or (version, code) not in kinds:
        got = f"magic {magic:#010x}, version {version}, value dtype code {code}"
        versions = f"{VERSION} or {QUANTIZED_VERSION} (patch_info reads 5; 2 and 3 are unsupported)"
        fail("payload_info", "payload", f"a DCT payload of version {versions}", got)
    overflow, non_finite = bool(flags & FLAG_OVERFLOW), bool(flags & FLAG_NON_FINITE)
    return PayloadInfo(kinds[version, code], numel, capacity, count, overflow, non_finite)


def _align16(offset: int) -> int:
    return (offset + 15) // 16 * 16
