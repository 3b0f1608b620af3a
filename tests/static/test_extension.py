"""The extension with CUDA kernels loads and registers its ops without a GPU.

`make cuda` builds the extension and runs these tests. Without CUDA kernels, they are skipped.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from ptx import toolkit

import dct_kernels
from dct_kernels._load import _is_for_cuda, available
from dct_kernels._ops import OPS

LIBRARY = next(Path(dct_kernels.__file__).parent.glob("_cuda*.so"), None)

pytestmark = pytest.mark.skipif(
    bool(available()["cuda"]), reason=f"no CUDA kernels here: {available()['cuda']}"
)


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_every_op_has_a_kernel(op, key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dct::{op}", key)


def test_the_library_uses_the_stable_abi_of_python():
    assert LIBRARY.name == "_cuda.abi3.so"


def test_only_the_cuda_library_needs_cuda():
    """The wheel must also work with a torch without CUDA, or with another version of CUDA."""
    (cpu,) = LIBRARY.parent.glob("_C*.so")
    assert not re.search(r"NEEDED.*cuda", output("readelf", "-d", str(cpu)))
    assert re.search(r"NEEDED.*libcudart", output("readelf", "-d", str(LIBRARY)))
    major = int(torch.version.cuda.partition(".")[0])
    assert _is_for_cuda(LIBRARY, f"{major}.1")
    assert not _is_for_cuda(LIBRARY, f"{major - 1}.8")
    assert not _is_for_cuda(LIBRARY, None)


def test_the_library_uses_only_the_stable_abi_of_torch():
    """A C++ symbol of c10, at or torch would tie the file to one version of torch."""
    symbols = output("nm", "-D", "--undefined-only", "-C", str(LIBRARY))
    assert "aoti_torch_" in symbols or "torch_call_dispatcher" in symbols
    assert re.findall(r"\b(?:c10|at|torch)::\S+", symbols) == []


def test_contains_code_for_the_requested_architectures():
    listed = output(str(toolkit.cuobjdump()), "--list-elf", str(LIBRARY))
    found = set(re.findall(r"sm_(\d+)", listed))
    asked = re.findall(r"(\d+)\.(\d+)", os.environ["TORCH_CUDA_ARCH_LIST"])
    assert found == {major + minor for major, minor in asked}


def test_contains_no_path_of_the_build_machine():
    content = LIBRARY.read_bytes()
    assert str(LIBRARY.parents[1]).encode() not in content
    assert str(Path(torch.__file__).parent).encode() not in content


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the conformance suite runs")
def test_the_cpu_kernels_work_without_a_gpu():
    assert set(dct_kernels.testing.backends()) >= {"eager", "cpp"}
    assert "cuda" not in dct_kernels.testing.backends()
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        torch.zeros(1, device="cuda")
