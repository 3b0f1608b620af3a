"""Encodings of a row in a message: the positions of k entries, or all entries quantized.

Positions use the smallest of three encodings, which depends on (width, k) only. The size of a
quantized row depends on (width, format) only. So messages do not contain encodings or sizes.
"""

import enum


class Encoding(enum.Enum):
    BITMAP = "bitmap"  # ceil(width / 8) bytes, least significant bit first
    UINT8 = "uint8"  # k column indices of one byte each, if width <= 256
    UINT16 = "uint16"  # k column indices, little-endian, if width <= 65,536


def position_encoding(width: int, k: int) -> Encoding:
    """The smallest encoding; on a tie, the first one in `Encoding`."""
    best, best_bytes = Encoding.BITMAP, (width + 7) // 8
    if width <= 256 and k < best_bytes:
        best, best_bytes = Encoding.UINT8, k
    if width <= 65536 and 2 * k < best_bytes:
        best = Encoding.UINT16
    return best


def position_bytes(width: int, k: int) -> int:
    """The bytes of the positions of one row."""
    sizes = {Encoding.BITMAP: (width + 7) // 8, Encoding.UINT8: k, Encoding.UINT16: 2 * k}
    return sizes[position_encoding(width, k)]


FORMATS = ("int8", "int4", "sign")  # a row has codes, then one bfloat16 scale

# "ternary" encodes only the groups of 64 entries in dense payloads.
CODES_PER_BYTE = {"int8": 1, "int4": 2, "sign": 8, "ternary": 5}


def code_bytes(width: int, format: str) -> int:
    """The bytes of the codes of one quantized row. The scale follows them."""
    return (width - 1) // CODES_PER_BYTE[format] + 1


def row_bytes(width: int, format: str) -> int:
    """The bytes of one quantized row."""
    return code_bytes(width, format) + 2
