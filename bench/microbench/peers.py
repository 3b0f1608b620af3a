"""Methods that are timed beside our ops: exact top-k, and on a GPU CUB. They are checked first.

A compaction adds a gradient to a residual, moves selected entries out of the residual, and returns
(values, indices). Like mask_pack, it uses error feedback. A row selection returns the k entries
with the largest magnitudes in each row. A difference contains what turns a snapshot into new
weights, like the patch of diff_pack.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import native

EXACT = ("topk", "torch.topk")  # exact top-k for mask_pack and for row_pack
CUB = "cub::DeviceSelect"


@dataclass
class Peer:
    """`run(i)` uses buffer set i. `check(i)` calls it and raises ValueError on wrong results."""

    run: Callable[[int], object]
    check: Callable[[int], None]


def topk(residual: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compaction with exact top-k."""
    residual += grad
    index = torch.topk(residual.abs(), k, sorted=False).indices
    values = residual[index]
    residual[index] = 0
    return values, index


def compaction(
    residual: list[Tensor], grad: list[Tensor], tau: Tensor, density: float
) -> dict[str, Peer]:
    """Peers of mask_pack on these buffers."""
    k = max(1, round(density * residual[0].numel()))
    peers = {"topk": _compaction(lambda i: topk(residual[i], grad[i], k), residual, grad)}
    if residual[0].is_cuda and native.missing() is None and residual[0].numel() % 4 == 0:
        select = native.Select(residual[0].numel(), 2 * k + 1024)

        def run(i: int) -> tuple[Tensor, Tensor]:
            select(residual[i], grad[i], tau)
            return select.values, select.indices

        def run_and_trim(i: int) -> tuple[Tensor, Tensor]:
            values, indices = run(i)
            return values[: select.count], indices[: select.count].long()

        peers[CUB] = Peer(run, _compaction(run_and_trim, residual, grad).check)
    return peers


def row_selection(x: list[Tensor], k: int) -> dict[str, Peer]:
    """Peers of row_pack on these rows."""

    def torch_topk(i: int) -> tuple[Tensor, Tensor]:
        columns = torch.topk(x[i].abs(), k, dim=1, sorted=False).indices
        return x[i].gather(1, columns), columns

    def check(i: int) -> None:
        values, columns = torch_topk(i)
        if not torch.equal(x[i].gather(1, columns), values):
            raise ValueError("values and columns do not match")

    return {"torch.topk": Peer(torch_topk, check)}


def differences(weights: list[Tensor], snapshot: list[Tensor]) -> dict[str, Peer]:
    """Peers of diff_pack: the ways in which most programs pack changed weights."""

    def gather(i: int) -> tuple[Tensor, Tensor]:
        changed = weights[i].view(torch.int16) != snapshot[i].view(torch.int16)
        index = changed.nonzero().flatten()
        return index.to(torch.int32), weights[i][index]

    def check_gather(i: int) -> None:
        index, values = gather(i)
        _require_equal(snapshot[i].clone().index_copy_(0, index.long(), values), weights[i])

    found = {"ne, nonzero, gather": Peer(gather, check_gather)}
    if not weights[0].is_cuda and importlib.util.find_spec("zstandard") is not None:
        import zstandard

        def xor(i: int) -> bytes:
            words = [t.view(torch.int16).numpy() for t in (weights[i], snapshot[i])]
            return zstandard.ZstdCompressor(level=1).compress(words[0] ^ words[1])

        def check_xor(i: int) -> None:
            raw = bytearray(zstandard.ZstdDecompressor().decompress(xor(i)))
            words = torch.frombuffer(raw, dtype=torch.int16) ^ snapshot[i].view(torch.int16)
            _require_equal(words, weights[i].view(torch.int16))

        found["numpy xor, zstd 1"] = Peer(xor, check_xor)
    return found


def _require_equal(rebuilt: Tensor, weights: Tensor) -> None:
    if not torch.equal(rebuilt.view(torch.int16), weights.view(torch.int16)):
        raise ValueError("the difference does not give the new weights")


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
