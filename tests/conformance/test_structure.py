"""Rules of the source tree that no compiler checks."""

from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = (".h", ".cuh", ".cpp", ".cu")


@pytest.mark.parametrize("folder", ["common", "cpu", "cuda", "bindings"])
def test_source_files_are_short(folder):
    files = [path for path in (CSRC / folder).rglob("*") if path.suffix in SOURCES]
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    allowed = {"mask_pack.cu": 490}  # contains two kernels
    assert lengths
    assert {n: length for n, length in lengths.items() if length > allowed.get(n, 400)} == {}
