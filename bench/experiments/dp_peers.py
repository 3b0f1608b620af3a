"""Optimizers of other libraries, which exchange data themselves, for dp_groups.py.

Dion (arXiv 2504.05295) is installed from https://github.com/microsoft/dion. DeMo (arXiv 2411.19870)
is the file demo.py of https://github.com/bloc97/DeMo, which must be on the PYTHONPATH.
"""

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dct_parallel.collectives import all_reduce_bytes

DION = {"dion4": 1 / 4, "dion8": 1 / 8}  # the rank as a fraction of the smaller side
NAMES = (*DION, "demo")
ADAMW_RATE = 8e-3  # of the parameters that Dion does not take: the best rate of AdamW alone


def optimizer(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Make an optimizer in a process of a rank, whose gradients are not averaged."""
    torch.compiler.set_stance("force_eager")  # Dion would compile a function for every shape
    if name == "demo":
        from demo import DeMo

        return DeMo(model.parameters(), lr=rate)
    from dion.dion_reference import Dion

    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    taken = set(matrices)
    others = [p for p in model.parameters() if p not in taken]
    adamw = {"params": others, "algorithm": "adamw", "lr": ADAMW_RATE, "beta2": 0.999}
    groups, ranks = [{"params": matrices}, adamw], torch.distributed.group.WORLD
    return Dion(groups, ranks, rank_fraction=DION[name], lr=rate, qr_method="qr")


class Traffic(TorchDispatchMode):
    """Counts the bytes that a rank sends in all-reduces (by a ring), all-gathers and broadcasts."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent = ranks, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.rpartition("::")[2].rstrip("_")
        if name in ("all_reduce", "allreduce"):
            self.sent += all_reduce_bytes(_nbytes(args[0]), self.ranks)
        elif name in ("allgather", "broadcast"):
            self.sent += (self.ranks - 1) * _nbytes(args[name == "allgather"])
        return func(*args, **(kwargs or {}))


def _nbytes(sent: Tensor | list[Tensor]) -> int:
    return sum(each.nbytes for each in ([sent] if isinstance(sent, Tensor) else sent))
