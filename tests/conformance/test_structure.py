"""Rules of the source tree that no compiler checks."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = (".h", ".cuh", ".cpp", ".cu")
TORCH = re.compile(r'^\s*#\s*include\s*[<"](?:torch|ATen|c10|caffe2)/', re.MULTILINE)
CUDA = re.compile(r'^\s*#\s*include\s*[<"](?:cuda|cub/|thrust/)', re.MULTILINE)
KERNEL_FOLDERS = [name for name in ("common", "cpu", "cuda") if (CSRC / name).is_dir()]


def sources(folder):
    return [path for path in sorted((CSRC / folder).rglob("*")) if path.suffix in SOURCES]


def including(pattern, folder):
    return [path.name for path in sources(folder) if pattern.search(path.read_text())]


def test_the_rules_can_see_the_tree():
    """Where torch may be included it is: the pattern and the paths are right."""
    assert including(TORCH, "bindings")
    assert sources("common")
    assert sources("cpu")


@pytest.mark.parametrize("folder", KERNEL_FOLDERS)
def test_kernels_include_no_torch(folder):
    assert including(TORCH, folder) == []


@pytest.mark.parametrize("folder", ["common", "cpu"])
def test_shared_and_cpu_code_include_no_cuda(folder):
    assert including(CUDA, folder) == []


@pytest.mark.parametrize("folder", [*KERNEL_FOLDERS, "bindings"])
def test_files_can_be_read_in_one_sitting(folder):
    lengths = {path.name: len(path.read_text().splitlines()) for path in sources(folder)}
    allowed = {"mask_pack.cu": 450}  # both kernels, from top to bottom
    assert {n: length for n, length in lengths.items() if length > allowed.get(n, 400)} == {}
