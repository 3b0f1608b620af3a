"""Methods that are timed beside our ops: exact top-k, and on a GPU CUB. They are checked first.

A compaction adds a gradient to a residual, moves selected entries out of the residual, and returns
(values, indices). Like mask_pack, it uses error feedback. A row selection returns the k entries
with the largest magnitudes in each row.
"""

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
