"""Functions that several stages use."""

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from dct_kernels import testing

F32, BF16 = torch.float32, torch.bfloat16
BUCKET = 25 * 2**20 // 4  # elements of a float32 bucket of DDP (25 MiB)
PICKS = 4096  # number of entries sampled per bucket and step


def gpu_backends() -> dict[str, SimpleNamespace]:
    """Print and return the backends for CUDA tensors, {name: ops}. Exits if "cuda" is missing."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is False")
    found = {name: ops for name, ops in testing.backends().items() if ops.device == "cuda"}
    if "cuda" not in found:
        raise SystemExit(f"no cuda backend: {testing.available()['cuda']}")
    print(f"Backends on cuda: {', '.join(found)}", flush=True)
    return found


@contextlib.contextmanager
def forbid_syncs() -> Iterator[None]:
    """Raise an error if torch synchronizes with the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """Capture a call. Return the CUDA graph and the tensors that a replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # load modules first, because a capture cannot load them
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        results = function()
    graph.instantiate()
    return graph, results


def nodes(graph: torch.cuda.CUDAGraph) -> int:
    """The number of nodes (kernels and memsets) in a graph."""
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    error = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count))
    if error:
        raise RuntimeError(f"cuGraphGetNodes returned {error}")
    return count.value


def report(failures: list[str], passed: str) -> None:
    """Print a one-line summary and exit."""
    print(f"{len(failures)} failed: {', '.join(failures)}" if failures else passed)
    raise SystemExit(bool(failures))
