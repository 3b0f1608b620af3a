"""Checks that CUDA graphs, concurrent streams and torch.compile do not change the results of ops.

Also checks that no op synchronizes with the device, and runs torch.library.opcheck.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from conformance.arguments import OPS, arguments
from torch import Tensor

import dct_kernels
from bench.gpu.common import BF16, F32, captured, forbid_syncs, gpu_backends, nodes, report
from bench.microbench import cases
from bench.microbench.cases import Case
from bench.microbench.command import results
from dct_kernels.layout import QUANTIZED_CODES
from dct_kernels.row_layout import FORMATS

ITERATIONS = 50
SLEEP_CYCLES = 100_000_000  # about 50 ms, in which all calls are queued, so that streams overlap


def chosen(device: str) -> Iterator[Case]:
    numel, rows, width = 2**20 + 3, 1000, 200
    yield cases.sample_threshold(device, numel, 0.01, ranges=5)
    yield cases.mask_pack(device, numel, 0.01, BF16, BF16, ranges=5)
    yield cases.mask_pack(device, numel, 0.01, F32, F32)
    yield cases.scatter_unpack(device, numel, 0.01, 3)
    for format in QUANTIZED_CODES:
        yield cases.quantize_pack(device, numel, BF16, format)
        yield cases.dequantize_sum(device, numel, format, 3)
    yield cases.diff_pack(device, numel, 0.03, True)
    yield cases.patch_apply(device, numel, 0.03)
    yield cases.row_pack(device, rows, width, 0.05)
    yield cases.row_unpack(device, rows, width, 0.05)
    for format in FORMATS:
        yield cases.row_quantize(device, rows, width, format)
        yield cases.row_dequantize(device, rows, width, format)
        yield cases.row_dequantize_sum(device, rows, width, format, 3)


def equal(actual: tuple[Tensor, ...], expected: list[Tensor]) -> bool:
    """Whether the tensors are bitwise equal."""
    pairs = zip(actual, expected, strict=True)
    return all(torch.equal(a.view(torch.uint8), e.view(torch.uint8)) for a, e in pairs)


def graph(case: Case, ops: SimpleNamespace) -> str:
    expected = results(case, ops)
    case.reset(0)
    with forbid_syncs():  # the capture below fails at synchronizations by the op itself
        case.run(ops, 0)
    made, static = captured(lambda: case.run(ops, 0))
    for _ in range(2):
        for tensor in static:
            tensor.zero_()
        case.reset(0)
        made.replay()
        if not equal(static, expected):
            raise RuntimeError("a replay differs from a direct call")
    return f"{nodes(made)} nodes in a graph"


def streams(pair: tuple[Case, Case], ops: SimpleNamespace) -> str:
    """Run two cases many times on two concurrent streams. Compare with separate calls."""
    expected = [results(case, ops) for case in pair]
    both = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for stream in both:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
    got = []
    for i in ITERATIONS * (0, 1):
        with torch.cuda.stream(both[i]):
            got.append(results(pair[i], ops))
    torch.cuda.synchronize()
    wrong = sum(not equal(tensors, expected[n % 2]) for n, tensors in enumerate(got))
    if wrong:
        raise RuntimeError(f"{wrong} of {len(got)} differ")
    return f"{len(got)} calls on two streams"


def compiled(case: Case) -> str:
    """Compile the public functions with Inductor, so that argument checks are also traced."""
    torch.compiler.reset()  # otherwise dynamo counts all ops as recompilations of one lambda
    expected = results(case, dct_kernels)
    case.reset(0)
    function = torch.compile(lambda: case.run(dct_kernels, 0), fullgraph=True, dynamic=True)
    if not equal(function(), expected):
        raise RuntimeError("the compiled call differs from a plain one")
    return "compiled"


def checked(op: str, device: str) -> str:
    args = arguments(op)
    placed = {n: a.to(device) if isinstance(a, Tensor) else a for n, a in args.items()}
    torch.library.opcheck(getattr(torch.ops.dct, op).default, (), placed)
    return "opcheck passed"


def main() -> None:
    backends, failures, done = gpu_backends(), [], 0
    todo = [(op, checked, (op, "cuda")) for op in OPS]
    for pair in zip(chosen("cuda"), chosen("cuda"), strict=True):
        name = f"{pair[0].op} {pair[0].detail}"
        todo.append((name, compiled, (pair[0],)))
        for backend, ops in backends.items():
            todo.append((f"{backend}'s {name}", graph, (pair[0], ops)))
            todo.append((f"{backend}'s {name}", streams, (pair, ops)))
    for name, check, given in todo:
        try:
            print(f"{name}: {check(*given)}", flush=True)
            done += 1
        except Exception as error:  # dynamo raises many types of errors
            print(f"{name}: {check.__name__}: {error}", flush=True)
            failures.append(f"{name} ({check.__name__})")
    report(failures, f"{done} checks passed: graphs, streams, torch.compile, opcheck, no host sync")


if __name__ == "__main__":
    main()
