"""Variants of the CUDA kernels against each other, in one process and in turns on the same buffers.

    python bench/gpu/variants.py OUT [--seconds 90]

What a variant is says variant_builds.py; bench/gpu/build.py has built them. The ops that any of
them changes are timed on the cases below, of which each is compared with eager first, bit for bit:
who differs is timed no more.

variants.json and variants.md hold medians, 20 and 80 % quantiles, and shares of a copy of the same
bytes; variants/ holds each one's sources and what ptxas said of them.
"""

import argparse
import ctypes
import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from common import BF16, BUCKET, F32, PICKS, gpu_backends, report, same
from torch import Tensor
from variant_builds import AS_IS, BUILD, CSRC, DEFINITIONS, OPS, variants

from dct_bench import provenance
from dct_bench.kernels import cases
from dct_bench.kernels import command as kernels
from dct_bench.kernels.cases import Case
from dct_bench.kernels.timing import take_turns
from dct_kernels.row_layout import position_bytes

ROUNDS, MOST_GRAPHS = 9, 16
DTYPES = {F32: 0, BF16: 1, torch.float16: 2}  # dct::DType


def load(path: Path, op: str) -> SimpleNamespace:
    """The op of a library, called as torch.ops.dct's is, in the cases below."""
    function = getattr(ctypes.CDLL(str(path)), op)
    function.restype = ctypes.c_int64
    call = functools.partial(_call, function)
    return SimpleNamespace(**{op: functools.partial(globals()[f"_{op}"], call)})


def _call(function: Callable[..., int], *arguments: Tensor | torch.dtype | float | None) -> int:
    return function(*map(_to_c, arguments), _Pointer(torch.cuda.current_stream().cuda_stream))


_Pointer, _Integer, _Double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def _to_c(argument: Tensor | torch.dtype | float | None) -> object:
    if isinstance(argument, Tensor):
        return _Pointer(argument.data_ptr())
    if isinstance(argument, torch.dtype):
        return _Integer(DTYPES[argument])
    if argument is None:
        return _Pointer(None)
    return _Double(argument) if isinstance(argument, float) else _Integer(argument)


def _checked(error: int) -> None:
    if error:
        raise RuntimeError(f"the launcher returned cudaError_t {error}")


def _with_scratch(call, device: torch.device, *arguments) -> None:
    nbytes = call(*arguments, None)
    scratch = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)  # never at 0
    _checked(call(*arguments, scratch))


def _mask_pack(
    call, residual, grad, segments, threshold, payload, seen, capacity, value_dtype
) -> None:
    of_grad = (grad, F32 if grad is None else grad.dtype)
    of_segments = (segments, threshold, seen, threshold.numel())
    arguments = (residual, *of_grad, residual.numel(), *of_segments, payload, capacity, value_dtype)
    _with_scratch(call, residual.device, *arguments)


def _sample_threshold(call, x, residual, segments, density, max_samples, seed) -> Tensor:
    threshold = segments.new_empty(segments.numel() - 1, dtype=F32)
    given = (x, x.dtype, x.numel(), residual, segments, threshold.numel(), float(density))
    _with_scratch(call, x.device, *given, max_samples, seed, threshold)
    return threshold


def _scatter_unpack(call, payloads, out, capacity, value_dtype, scale) -> Tensor:
    status = payloads.new_empty(len(payloads), dtype=torch.int32)
    given = (payloads, len(payloads), capacity, value_dtype, out, out.dtype, out.numel())
    _checked(call(*given, float(scale), status))
    return status


def _row_pack(call, x, k, value_dtype) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    values = x.new_empty(rows, k, dtype=value_dtype)
    positions = x.new_empty(rows, position_bytes(width, k), dtype=torch.uint8)
    _checked(call(x, x.dtype, rows, width, k, values, value_dtype, positions))
    return values, positions


GRADS = ((F32, F32), (BF16, BF16), (None, F32))


def timed(ops: set[str], scale: int = 1, device: str = "cuda") -> Iterator[tuple[Case, bool]]:
    """(case, whether it is replayed from a CUDA graph), the most telling first."""
    largest, sweep, bucket = 2**28 // scale, 2**26 // scale, BUCKET // scale
    pack = functools.partial(cases.mask_pack, device, with_peers=False)
    if "mask_pack" in ops:
        for numel in (largest, 2**24 // scale):
            for grad, values in GRADS:
                yield pack(numel, 0.01, grad, values), False
        for numel in (bucket, 2**20 // scale):
            for grad, values in GRADS:
                yield pack(numel, 0.01, grad, values), True
        yield pack(bucket, 0.01, F32, BF16, num_segments=cases.SEGMENTS), True
        for density in (1e-12, 0.001, 0.1, 1.0):
            yield pack(sweep, density, F32, F32), False
        yield pack(sweep, 0.01, F32, F32, num_segments=cases.SEGMENTS), False
        yield pack(sweep, 0.01, F32, F32, clustered=True), False
        yield pack(sweep, 0.01, F32, F32, misaligned=True), False
    if "row_pack" in ops:
        for dtype in (F32, BF16):
            for width in (64, 256, 1024):
                yield cases.row_pack(device, 65536 // scale, width, 0.05, False, dtype), False
        for width in (64, 256, 1024):
            yield cases.row_pack(device, 65536 // scale, width, 0.1, False), False
    if "scatter_unpack" in ops:
        for ranks in (2, 8, 64):
            yield cases.scatter_unpack(device, 2**24 // scale, 0.01, ranks), False
        yield cases.scatter_unpack(device, bucket, 0.01, 8), True
    if "sample_threshold" in ops:
        for most in (PICKS, cases.SAMPLES):
            yield cases.sample_threshold(device, bucket, 0.01, most=most), True
            yield cases.sample_threshold(device, largest, 0.01, most=most), False


def measure(case: Case, found: dict[str, SimpleNamespace], graph: bool, device: str) -> dict | None:
    """Times of those that are right; the others leave `found`. None if nobody is left."""
    eager = cases.backends(device)["eager"]
    expected = kernels.results(case, eager)
    for name, ops in list(found.items()):
        try:
            right = same(kernels.results(case, ops), expected)
        except RuntimeError as error:
            right = False
            print(f"{name} {case.op}: {error}", flush=True)
        if not right:
            print(f"{name} differs from eager: {case.op} {case.detail}", flush=True)
            del found[name]
            for tensor in case.run(eager, 0):  # what it wrote behind a payload's last entry
                if tensor.dtype == torch.uint8:
                    tensor.zero_()
    del expected
    if not found:
        return None
    calls = kernels.copies(case, device)
    calls |= {name: functools.partial(case.run, ops) for name, ops in found.items()}
    most = min(case.sets, MOST_GRAPHS) if graph else case.sets
    sets, rounds = dict.fromkeys(calls, most), dict.fromkeys(calls, ROUNDS)
    graphs = list(calls) if graph else []
    return {
        "op": case.op,
        "case": case.detail,
        "numel": case.numel,
        "density": case.density,
        "bytes": case.nbytes,
        "graphs": graph,
        "ms": take_turns(calls, case.reset, sets, rounds, device, graphs),
    }


def table(results: list[dict], names: list[str]) -> list[str]:
    """A line a case, a column a variant: microseconds (20-80 %), and the share of a copy."""
    lines = [f"| op | case | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for result in results:
        copy = result["ms"][kernels.COPY]["median"]
        density = "" if result["density"] is None else f", {100 * result['density']:g} %"
        graph = ", in a graph" if result["graphs"] else ""
        cells = [result["op"], f"{result['numel']:,}: {result['case']}{density}{graph}"]
        for name in names:
            ms = result["ms"].get(name)
            if ms is None:
                cells.append("")
                continue
            median, least, most = (f"{1e3 * ms[key]:,.1f}" for key in ("median", "q20", "q80"))
            cells.append(f"{median} ({least}-{most}) {copy / ms['median']:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def keep_sources(out: Path) -> None:
    """And what was said of them, without the libraries."""
    for variant in variants():
        to = out / "variants" / variant.name
        shutil.copytree(variant.folder or CSRC / "cuda", to / "cuda", dirs_exist_ok=True)
        (to / DEFINITIONS).write_text("\n".join(variant.defined) + "\n")
        for log in variant.built.glob("*.log"):
            shutil.copyfile(log, to / log.name)


def unbuilt() -> Iterator[str]:
    for variant in variants():
        asked = {path.stem for path in variant.built.glob("*.log")}
        libraries = {path.stem for path in variant.built.glob("*.so")}
        yield from (f"{variant.name} {op} is not built" for op in sorted(asked - libraries))
        if not asked and variant.name != AS_IS:
            yield f"{variant.name} was not built, or changes no op"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=90, help="begin no case after so long")
    args = parser.parse_args()
    gpu_backends()
    torch.manual_seed(0)
    start, about = time.monotonic(), provenance.describe()
    keep_sources(args.out)
    built = {path.parent.name for path in BUILD.glob("*/*.so")}
    names = [variant.name for variant in variants() if variant.name in built]
    libraries = {op: {name: BUILD / name / f"{op}.so" for name in names} for op in OPS}
    found = {
        op: {name: load(path, op) for name, path in of_op.items() if path.exists()}
        for op, of_op in libraries.items()
    }
    competing = {op: set(of_op) for op, of_op in found.items() if len(of_op) > 1}
    results, said = [], ""
    for case, graph in timed(set(competing)):
        if time.monotonic() - start > args.seconds:
            said = f"; stopped after {args.seconds:.0f} s, the rest is not measured"
            break
        result = measure(case, found[case.op], graph, "cuda")
        if result is not None:
            results.append(result)
            print(table([result], names)[-1], flush=True)
        content = {"provenance": about, "variants": results}
        (args.out / "variants.json").write_text(json.dumps(content, indent=1))
        (args.out / "variants.md").write_text("\n".join(table(results, names)) + "\n")
    wrong = [
        f"{name} {op} differs" for op, names in competing.items() for name in names - set(found[op])
    ]
    report([*unbuilt(), *wrong], f"{len(names)} variants, {len(results)} cases{said}")


if __name__ == "__main__":
    main()
