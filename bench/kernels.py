"""Times every op against a copy of the bytes it must move, and against the eager backend.

    python bench/kernels.py [--sizes 16777216] [--density 0.01] [--threads 2] [--json FILE]

All candidates of a case run in turn, round by round, on buffers that rotate, so that neither the
machine's other load nor a warm cache favours one of them. A case is timed only after its results
have been found equal, bit for bit, to eager's. `x copy` is the time over that of a copy that moves
as many bytes (half of them read, half written), made by torch with as many threads; ops that
allocate their result are held against a copy that allocates (clone).
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dct_kernels import payload_layout, testing
from dct_kernels._rows import position_bytes

ROTATE = 3  # sets of buffers
F32, BF16 = torch.float32, torch.bfloat16


@dataclass
class Case:
    """One row of the table: `run(backend, i)` on buffer set i returns the tensors to compare."""

    name: str
    detail: str
    nbytes: int  # what must be read and written
    run: Callable
    reset: Callable = field(default=lambda i: None)  # restores what run wrote, not timed
    allocates: bool = False


def mask_pack_case(numel: int, density: float, value_dtype: torch.dtype, with_grad: bool) -> Case:
    clean = [torch.randn(numel) for _ in range(ROTATE)]
    residual = [tensor.clone() for tensor in clean]
    grad = [torch.randn(numel) for _ in range(ROTATE)]
    deviation = 2**0.5 if with_grad else 1.0
    tau = deviation * torch.distributions.Normal(0, 1).icdf(torch.tensor([1 - density / 2]))
    segments = torch.tensor([0, numel])
    capacity = max(1, int(1.25 * density * numel))
    nbytes = payload_layout(numel, capacity, value_dtype).nbytes
    payload = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(ROTATE)]
    seen = torch.zeros(1, dtype=torch.int32)

    def run(backend, i):
        args = (residual[i], grad[i] if with_grad else None, segments, tau, payload[i], seen)
        backend.mask_pack(*args, capacity, value_dtype)
        return residual[i], payload[i], seen

    entry = 2 + value_dtype.itemsize
    moved = 12 * numel + entry * density * numel
    if not with_grad:  # a cache line is written where an entry is kept, and only there
        moved = (4 + 64 / 16 * (1 - (1 - density) ** 16) + entry * density) * numel
    detail = f"{_name(value_dtype)} values, {'with' if with_grad else 'no'} grad"
    return Case("mask_pack", detail, int(moved), run, reset=lambda i: residual[i].copy_(clean[i]))


def scatter_unpack_case(numel: int, density: float, ranks: int) -> Case:
    cpp = testing.backends()["cpp"]
    capacity = max(1, int(1.25 * density * numel))
    nbytes = payload_layout(numel, capacity, BF16).nbytes
    tau = torch.distributions.Normal(0, 1).icdf(torch.tensor([1 - density / 2]))
    payloads = [torch.zeros(ranks, nbytes, dtype=torch.uint8) for _ in range(ROTATE)]
    out = [torch.zeros(numel) for _ in range(ROTATE)]
    seen = torch.zeros(1, dtype=torch.int32)
    for payload in (payload for batch in payloads for payload in batch):
        segments = torch.tensor([0, numel])
        cpp.mask_pack(torch.randn(numel), None, segments, tau, payload, seen, capacity, BF16)

    def run(backend, i):
        status = backend.scatter_unpack(payloads[i], out[i], capacity, BF16, 1 / ranks)
        return out[i], status

    moved = 4 * numel + ranks * 4 * density * numel
    return Case("scatter_unpack", f"P={ranks}, bfloat16 values", int(moved), run)


def sample_threshold_case(numel: int, density: float) -> Case:
    x = [torch.randn(numel) for _ in range(ROTATE)]
    residual = [torch.randn(numel) for _ in range(ROTATE)]
    segments = torch.tensor([0, numel])

    def run(backend, i):
        return (backend.sample_threshold(x[i], residual[i], segments, density, 65536, i),)

    samples = min(numel, 65536)
    # A cache line per sample of x and residual.
    return Case("sample_threshold", f"{samples} samples", 2 * 64 * samples, run)


def row_cases(numel: int, width: int, density: float) -> list[Case]:
    rows, k = numel // width, max(1, round(density * width))
    x = [torch.randn(rows, width) for _ in range(ROTATE)]
    cpp = testing.backends()["cpp"]
    packed = [cpp.row_pack(tensor, k, F32) for tensor in x]
    moved = rows * (4 * width + 4 * k + position_bytes(width, k))
    detail = f"[{rows}, {width}], k={k}"
    return [
        Case("row_pack", detail, moved, lambda b, i: b.row_pack(x[i], k, F32), allocates=True),
        Case(
            "row_unpack",
            detail,
            moved,
            lambda b, i: (b.row_unpack(*packed[i], width, F32),),
            allocates=True,
        ),
    ]


def copy_candidate(case: Case) -> Callable:
    words = max(1, case.nbytes // 8)
    source = [torch.zeros(words) for _ in range(ROTATE)]
    target = [torch.zeros(words) for _ in range(ROTATE)]
    if case.allocates:
        return lambda i: source[i].clone()
    return lambda i: target[i].copy_(source[i])


def check(case: Case, backends: dict) -> None:
    results = []
    for backend in backends.values():
        case.reset(0)
        results.append([tensor.clone() for tensor in case.run(backend, 0)])
    for expected, got in zip(*results, strict=True):
        if not torch.equal(expected.view(torch.uint8), got.view(torch.uint8)):
            raise SystemExit(f"{case.name} ({case.detail}): cpp differs from eager, not timed")


def measure(case: Case, backends: dict, rounds: int) -> dict:
    """Milliseconds of every candidate: median and the 20 % and 80 % quantiles."""
    candidates = {"copy": copy_candidate(case)}
    for name, backend in backends.items():
        candidates[name] = lambda i, backend=backend: case.run(backend, i)
    samples = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, candidate in candidates.items():
            if name == "eager" and turn > 3:
                continue  # tens of times slower: a few suffice
            case.reset(turn % ROTATE)
            start = time.perf_counter()
            candidate(turn % ROTATE)
            if turn > 0:
                samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: _quantiles(values) for name, values in samples.items()}


def _quantiles(values: list[float]) -> dict:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "q20": ordered[len(ordered) // 5],
        "q80": ordered[(4 * len(ordered)) // 5],
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**24])
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--row-widths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found = testing.backends()
    if "cpp" not in found:
        raise SystemExit("the cpp backend is not there: python -m dct_kernels says why")
    backends = {"eager": found["eager"], "cpp": found["cpp"]}

    print(f"torch {torch.__version__}, {args.threads} threads, {platform.machine()}\n")
    print("| op | case | MB | ms (20-80 %) | GB/s | copy ms | x copy | eager ms | x faster |")
    print("|---|---|---|---|---|---|---|---|---|")
    results = []
    for numel in args.sizes:
        makers = [
            lambda n=numel: [mask_pack_case(n, args.density, F32, True)],
            lambda n=numel: [mask_pack_case(n, args.density, BF16, True)],
            lambda n=numel: [mask_pack_case(n, args.density, BF16, False)],
            lambda n=numel: [sample_threshold_case(n, args.density)],
            lambda n=numel: [scatter_unpack_case(n, args.density, 2)],
            lambda n=numel: [scatter_unpack_case(n, args.density, 8)],
            # A quarter: malloc keeps blocks below 32 MiB, and the time is not that of page faults.
            *(lambda n=numel, w=width: row_cases(n // 4, w, 0.05) for width in args.row_widths),
        ]
        for case in (case for make in makers for case in make()):
            check(case, backends)
            timing = measure(case, backends, args.rounds)
            results.append(
                {"op": case.name, "case": case.detail, "numel": numel, "bytes": case.nbytes}
                | {"threads": args.threads, "ms": timing}
            )
            cpp, copy, eager = timing["cpp"], timing["copy"]["median"], timing["eager"]["median"]
            print(
                f"| {case.name} | {case.detail} | {case.nbytes / 1e6:.1f} | {cpp['median']:.2f} "
                f"({cpp['q20']:.2f}-{cpp['q80']:.2f}) | {case.nbytes / cpp['median'] / 1e6:.1f} | "
                f"{copy:.2f} | {cpp['median'] / copy:.2f} | {eager:.1f} | "
                f"{eager / cpp['median']:.1f} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
