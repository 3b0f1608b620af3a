"""One backend against eager on the CPU, bit for bit, where the test suite cannot be run.

    python bench/gpu/comparison.py --backend cuda

`pytest tests/conformance -k cuda` asks far more, but needs pytest and hypothesis. Here: all
ops over sizes around every boundary, dtypes, densities from nothing to everything, ties, NaN,
infinity, subnormals, overflow, ranges and misaligned views.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from common import BF16, F32, Call, call, report, same
from torch import Tensor

from dct_kernels import payload_layout, testing
from dct_kernels.row_layout import SCALED_BY_ROW

F16 = torch.float16
SIZES = (0, 1, 31, 32, 33, 4095, 4096, 4097, 16383, 16384, 16385, 50_021)
LARGE = (10**6 + 3, 2**24 + 1)
TAUS = (0.0, 0.5, 2.5, torch.inf, torch.nan, -1.0)  # everything, ..., nothing; skipped
HARD = (0.0, -0.0, 1e-45, -1e-40, 1.0, -1.0, 3.4e38, torch.inf, -torch.inf, torch.nan)
SHAPES = ((1, 1), (8, 1), (33, 5), (40, 20), (64, 7), (256, 31), (257, 17), (1000, 3), (1024, 100))
SHAPES += ((4096, 400), (65537, 3))


@functools.cache
def values(numel: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Normal numbers, a third of them rounded to ties, a tenth of them hard."""
    draw = torch.Generator().manual_seed(1000 * numel + seed)
    x = torch.randn(numel, generator=draw)
    x = torch.where(torch.rand(numel, generator=draw) < 0.33, (x * 4).round() / 4, x)
    hard = torch.tensor(HARD)[torch.randint(len(HARD), (numel,), generator=draw)]
    return torch.where(torch.rand(numel, generator=draw) < 0.1, hard, x).to(dtype)


def segments(numel: int, count: int) -> Tensor:
    inner = torch.randint(numel + 1, (count - 1,), generator=torch.Generator().manual_seed(numel))
    return torch.tensor([0, *sorted(inner.tolist()), numel])


def mask_pack(numel, grad, value_dtype, tau, density=1.0, ranges=1, count=4, scale=None) -> Call:
    capacity = max(1, int(density * numel))
    nbytes = payload_layout(numel, capacity, value_dtype, ranges).nbytes
    return call(
        "mask_pack",
        residual=values(numel),
        grad=None if grad is None else values(numel, grad, 1),
        segments=segments(numel, count),
        threshold=torch.tensor([tau, 1.5, tau, 0.25])[:count],
        payload=torch.full((ranges, nbytes), 0x5A, dtype=torch.uint8),
        seen=torch.full((count,), -7, dtype=torch.int32),
        capacity=capacity,
        value_dtype=value_dtype,
        inv_scale=None if scale is None else torch.tensor(scale),
    )


def scatter_unpack(eager, packs: list[Call], out: torch.dtype, accumulate, scale=None) -> Call:
    """Of what these calls pack, and of one payload with a wrong header."""
    payloads = [pack.on("cpu").run(eager)[1] for pack in packs]
    broken = payloads[0].clone()
    broken[:, 4] = 9
    args = packs[0].args
    return call(
        "scatter_unpack",
        payloads=torch.stack([*payloads, broken]),
        out=values(args["residual"].numel(), out, 5),
        capacity=args["capacity"],
        value_dtype=args["value_dtype"],
        scale=1 / 3,
        accumulate=accumulate,
        out_scale=None if scale is None else torch.tensor(scale),
    )


def dense_calls(eager) -> Iterator[Call]:
    for numel in LARGE:
        yield mask_pack(numel, BF16, BF16, 2.5, 0.02)
    dtypes = itertools.product((None, F32, BF16, F16), (F32, BF16))
    for numel, (grad, value_dtype), tau in itertools.product(SIZES, dtypes, TAUS):
        yield mask_pack(numel, grad, value_dtype, tau)
        if tau == 0.5:
            for ranges in (1, 2, 5):
                yield mask_pack(numel, grad, value_dtype, tau, 0.01, ranges)
    for numel, out, value_dtype in itertools.product(
        (*SIZES, LARGE[0]), (F32, BF16, F16), (F32, BF16)
    ):
        for ranges, accumulate in ((1, False), (2, True), (5, False)):
            packs = [mask_pack(numel, F32, value_dtype, tau, 0.1, ranges) for tau in (0.5, 2.5)]
            yield scatter_unpack(eager, packs, out, accumulate, 0.7 if accumulate else None)
    yield mask_pack(50_021, F16, BF16, 0.5, 0.2, 2, 4, 2.0**-7)
    for numel, dtype in itertools.product((*SIZES, *LARGE), (F32, BF16, F16)):
        for residual, samples, scale in ((None, 65536, None), (values(numel, F32, 2), 1000, 0.3)):
            yield call(
                "sample_threshold",
                x=values(numel, dtype),
                residual=residual,
                segments=segments(numel, 4),
                density=0.01,
                max_samples=samples,
                seed=numel,
                inv_scale=None if scale is None else torch.tensor(scale),
            )
    for numel in SIZES:
        yield call(
            "track_threshold",
            threshold=values(numel),
            seen=torch.arange(numel, dtype=torch.int32) * 7,
            target=values(numel, seed=1).abs() * 1000,
            reference=values(numel, seed=2).abs(),
        )


def row_calls(eager) -> Iterator[Call]:
    for (width, k), x_dtype, out in itertools.product(SHAPES, (F32, BF16, F16), (F32, BF16)):
        for rows in (0, 1, 33) if width > 4096 else (0, 1, 33, 1000):
            x = values(rows * width, x_dtype).view(rows, width)
            yield call("row_pack", x=x, k=k, value_dtype=out)
            packed, positions = eager.row_pack(x, k, x_dtype)
            garbage = torch.randint(256, positions.shape, dtype=torch.uint8)
            for at in (positions, garbage):
                yield call("row_gather", x=x, positions=at, k=k, value_dtype=out)
                yield call("row_unpack", values=packed, positions=at, width=width, dtype=out)
    widths = sorted({width for width, _ in SHAPES})
    for width, dtype, format in itertools.product(widths, (F32, BF16, F16), SCALED_BY_ROW):
        for rows in (0, 1, 33):
            x = values(rows * width, dtype).view(rows, width)
            yield call("row_quantize", x=x, format=format)
            sound = eager.row_quantize(x, format)
            garbage = torch.randint(256, sound.shape, dtype=torch.uint8)
            for of in (sound, garbage):
                yield call("row_dequantize", rows=of, width=width, format=format, dtype=dtype)


def placed(one: Call, device: str, offset: int) -> Call:
    """The call on copies that begin so many elements off alignment; payloads must be aligned."""

    def copy(name: str, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        start = 0 if name in ("payload", "payloads") else offset
        memory = torch.zeros(start + value.numel(), dtype=value.dtype, device=device)
        return memory[start:].view(value.shape).copy_(value)

    return replace(one, args={name: copy(name, value) for name, value in one.args.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    name = parser.parse_args().backend
    backends, eager = testing.backends(), testing.backends()["eager"]
    if name not in backends:
        raise SystemExit(f"no {name} backend: {testing.available()[name] or 'no GPU'}")
    torch.manual_seed(0)
    device = backends[name].device
    failures, count = [], 0
    for one in itertools.chain(dense_calls(eager), row_calls(eager)):
        count += 1
        expected = one.on("cpu").run(eager)
        runs = [placed(one, device, offset).run(backends[name]) for offset in (0, 1)]
        if not all(same(results, expected) for results in runs):
            shown = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in one.args.items()}
            print(f"{one.name} differs: {shown}", flush=True)
            failures.append(one.name)
    report(failures, f"{count} calls of {name} equal eager's, bit for bit")


if __name__ == "__main__":
    main()
