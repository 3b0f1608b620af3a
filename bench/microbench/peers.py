"""Compact implementations of other methods. Most are checked before they are timed.

A compaction adds a gradient to a residual, moves selected entries out of the residual, and returns
(values, indices). Like mask_pack, it uses error feedback. A row selection returns the k entries
with the largest magnitudes in each row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import native

EXACT = ("topk", "torch.topk")  # exact top-k for mask_pack and for row_pack


@dataclass
class Peer:
    """`run(i)` uses buffer set i. `check(i)` calls it and raises ValueError on wrong results."""

    run: Callable[[int], object]
    check: Callable[[int], None]


def take(residual: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Move the entries at `index` out of the residual, and return (values, indices)."""
    values = residual[index]
    residual[index] = 0
    return values, index


def topk(residual: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compaction with exact top-k."""
    residual += grad
    return take(residual, torch.topk(residual.abs(), k, sorted=False).indices)


def random_k(residual: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compaction of k random entries, drawn with replacement. Drops duplicates."""
    residual += grad
    index = torch.randint(residual.numel(), (k,), device=residual.device).unique()
    return take(residual, index)


def dgc(residual: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Deep Gradient Compression's sampled top-k with its adaptation loop.

    Based on dgc/compression.py in github.com/synxlin/deep-gradient-compression, without momentum
    correction. The threshold is the magnitude that a fraction k / numel of a strided 1 % sample
    reaches. While fewer than 0.8 * k entries pass, up to 10 rounds lower the threshold to 80 %. If
    more than 1.3 * k entries pass, a second top-k selects k of them. On a GPU, every round waits
    for the device.
    """
    residual += grad
    importance = residual.abs()
    numel = residual.numel()
    sample_size = max(math.ceil(numel * 0.01), min(numel, 1000))
    stride = max(math.ceil(numel / sample_size / 32) * 32 + 1, 1) if numel > sample_size else 1
    start = int(torch.randint(stride, (1,)))
    samples = importance[start::stride]
    sample_k = max(math.ceil(k / numel * samples.numel()), 1)
    threshold = torch.topk(samples, sample_k, sorted=False).values.min()
    index = (importance >= threshold).nonzero().flatten()
    for _ in range(10):
        if index.numel() >= 0.8 * k:
            break
        threshold = threshold * 0.8
        index = (importance >= threshold).nonzero().flatten()
    if index.numel() > 1.3 * k:
        index = index[torch.topk(importance[index], k, sorted=False).indices]
    return take(residual, index)


def bf16_cast(grad: list[Tensor]) -> dict[str, Peer]:
    """A peer that casts like torch's bf16_compress_hook; none if gradients are bfloat16."""
    if grad[0].dtype == torch.bfloat16:
        return {}
    return {"bf16 cast": Peer(lambda i: grad[i].to(torch.bfloat16), lambda i: None)}


def compaction(
    residual: list[Tensor], grad: list[Tensor], tau: Tensor, density: float
) -> dict[str, Peer]:
    """Peers of mask_pack on these buffers."""
    k = max(1, round(density * residual[0].numel()))
    peers = {
        name: _compaction(lambda i, f=function: f(residual[i], grad[i], k), residual, grad)
        for name, function in (("topk", topk), ("dgc", dgc), ("random-k", random_k))
    }
    peers |= bf16_cast(grad)
    if residual[0].is_cuda and native.missing() is None and residual[0].numel() % 4 == 0:
        select = native.Select(residual[0].numel(), 2 * k + 1024)

        def run(i: int) -> tuple[Tensor, Tensor]:
            select(residual[i], grad[i], tau)
            return select.values, select.indices

        def run_and_trim(i: int) -> tuple[Tensor, Tensor]:
            values, indices = run(i)
            return values[: select.count], indices[: select.count].long()

        peers["cub::DeviceSelect"] = Peer(run, _compaction(run_and_trim, residual, grad).check)
    return peers


def every_entry(residual: list[Tensor], grad: list[Tensor], format: str) -> dict[str, Peer]:
    """Peers of quantize_pack: FBGEMM's rows of 64 and PowerSGD with rank 1, both with error
    feedback, and the cast of torch's bfloat16 hook, which has no residual."""
    peers = bf16_cast(grad)
    numel = residual[0].numel()
    side = 2 ** (numel.bit_length() // 2)
    if numel % side == 0:
        q = torch.randn(side, device=residual[0].device)

        def power_sgd(i: int) -> tuple[Tensor, Tensor]:
            matrix = residual[i].add_(grad[i]).view(-1, side)
            p = matrix @ q
            p /= p.norm()
            q_new = matrix.t() @ p
            matrix.addr_(p, q_new, alpha=-1)
            return p, q_new

        peers["PowerSGD"] = Peer(power_sgd, lambda i: None)
    if not residual[0].is_cuda and format in _FBGEMM and numel % 64 == 0:
        pack, unpack, _ = _fbgemm(format)

        def fbgemm(i: int) -> Tensor:
            rows = residual[i].add_(grad[i]).view(-1, 64)
            packed = pack(rows)
            rows -= unpack(packed)
            return packed

        def check(i: int) -> None:
            accumulated = residual[i] + grad[i]
            sent = unpack(fbgemm(i)).flatten()
            if not torch.allclose(sent + residual[i], accumulated, atol=1e-5):
                raise ValueError("sent entries and the residual do not add up to their input")

        peers["FBGEMM"] = Peer(fbgemm, check)
    return peers


def row_selection(x: list[Tensor], k: int) -> dict[str, Peer]:
    """Peers of row_pack on these rows."""

    def torch_topk(i: int) -> tuple[Tensor, Tensor]:
        columns = torch.topk(x[i].abs(), k, dim=1, sorted=False).indices
        return x[i].gather(1, columns), columns

    peers = {"torch.topk": _selection(torch_topk, x, k)}
    if x[0].is_cuda and native.missing() is None and x[0].shape[1] <= 4096:
        peers["rtopk"] = _selection(lambda i: native.rtopk(x[i], k), x, k)
    return peers


# {format: (part of the op name, quantization steps)}. torch contains a copy of the FBGEMM ops that
# TorchRec uses. A row has a scale and an offset, in float32 (8 bits) or float16 (4 bits).
_FBGEMM = {"int8": ("byte", 255), "int4": ("4bit", 15)}


def row_quantization(x: list[Tensor], format: str) -> dict[str, Peer]:
    """Peers of row_quantize on these rows."""
    if x[0].is_cuda or format not in _FBGEMM:
        return {}
    pack, unpack, steps = _fbgemm(format)

    def check(i: int) -> None:
        step = (x[i].amax(1, keepdim=True) - x[i].amin(1, keepdim=True)) / steps
        if ((unpack(pack(x[i])) - x[i]).abs() > 0.6 * step).any():
            raise ValueError("an entry is wrong by more than half a step")

    return {"FBGEMM": Peer(lambda i: pack(x[i]), check)}


def row_dequantization(x: list[Tensor], format: str) -> dict[str, Peer]:
    """Peers of row_dequantize on the quantized rows."""
    if x[0].is_cuda or format not in _FBGEMM:
        return {}
    pack, unpack, _ = _fbgemm(format)
    rows = [pack(tensor) for tensor in x]
    return {"FBGEMM": Peer(lambda i: unpack(rows[i]), row_quantization(x, format)["FBGEMM"].check)}


def _fbgemm(format: str) -> tuple[Callable, Callable, int]:
    bits, steps = _FBGEMM[format]
    ops = torch.ops.quantized
    names = (f"embedding_bag_{bits}_{way}" for way in ("prepack", "unpack"))
    return *(getattr(ops, name) for name in names), steps


def _compaction(run: Callable, residual: list[Tensor], grad: list[Tensor]) -> Peer:
    def check(i: int) -> None:
        accumulated = residual[i] + grad[i]
        values, index = run(i)
        if index.numel() == 0 or index.unique().numel() != index.numel():
            raise ValueError("an entry was selected twice, or none was selected")
        rebuilt = residual[i].clone()
        rebuilt[index] += values
        if not torch.equal(rebuilt, accumulated):
            raise ValueError("selected entries and the residual do not add up to their input")

    return Peer(run, check)


def _selection(run: Callable, x: list[Tensor], k: int) -> Peer:
    def check(i: int) -> None:
        values, columns = run(i)
        expected = torch.topk(x[i].abs(), k, dim=1).values
        got = values.abs().sort(1, descending=True).values
        if not torch.equal(got, expected):
            raise ValueError("the selected entries are not the k largest")
        if not torch.equal(x[i].gather(1, columns.long()), values):
            raise ValueError("values and columns do not match")

    return Peer(run, check)
