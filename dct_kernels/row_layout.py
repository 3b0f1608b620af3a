"""How a row's k positions travel: the smallest of three encodings, decided by (width, k) alone.

Both sides know width and k, so no message ever says which encoding it uses.
"""

import enum


class Encoding(enum.Enum):
    BITMAP = "bitmap"  # ceil(width / 8) bytes, least significant bit first
    UINT8 = "uint8"  # k columns of one byte, width <= 256
    UINT16 = "uint16"  # k columns of two bytes, little-endian, width <= 65,536


def position_encoding(width: int, k: int) -> Encoding:
    """The smallest encoding; the first of the list above on a tie."""
    best, best_bytes = Encoding.BITMAP, (width + 7) // 8
    if width <= 256 and k < best_bytes:
        best, best_bytes = Encoding.UINT8, k
    if width <= 65536 and 2 * k < best_bytes:
        best = Encoding.UINT16
    return best


def position_bytes(width: int, k: int) -> int:
    """Bytes of one row's positions."""
    encoding = position_encoding(width, k)
    if encoding is Encoding.BITMAP:
        return (width + 7) // 8
    return k if encoding is Encoding.UINT8 else 2 * k
