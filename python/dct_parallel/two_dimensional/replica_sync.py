"""Replicas of embedding tables, averaged every few steps."""

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks

from ..collectives import dense_mean
from .embedding_bags import ShardedEmbeddingBags
from .mesh import require_mesh, require_same_in_mesh
from .row_wise_adagrad import RowWiseAdagrad

_OP = "ReplicaSync"


class ReplicaSync:
    """Averages the tables of all replicas, and their row-wise AdaGrad state, every `every` steps.

    Uncompressed: a sync sends the whole shard and a number a row, as ring all-reduces in the
    weights' dtype, one of each; it needs as much memory again as the shard. Afterwards replicas are
    bitwise equal in weights and accumulators. In a mesh of one row it changes no bit.

    Between syncs replicas differ. `sync()` before evaluation and before a checkpoint: a
    ReplicaSync has nothing to save then, as it counts the steps since the last sync, and the ranks
    of one replica have all there is to save of bags and optimizer.

    Args:
        bags: whose weight is averaged.
        optimizer: that trains it: torch.optim.SGD without momentum, which has no state, or
            RowWiseAdagrad or MomentumScaledRowWiseAdagrad.
        every: steps from one sync to the next.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
        ValueError: ranks of the mesh differ in `every` or the kind of optimizer; on all of them.
    """

    def __init__(
        self, bags: ShardedEmbeddingBags, optimizer: torch.optim.Optimizer, every: int = 1
    ) -> None:
        if not isinstance(bags, ShardedEmbeddingBags):
            checks.fail(_OP, "bags", "ShardedEmbeddingBags", type(bags).__name__, TypeError)
        checks.require_int(_OP, "every", every, 1, 2**63 - 1)
        _require_optimizer(optimizer, bags.weight)
        told = {"every": every, "optimizer": type(optimizer).__name__}
        require_same_in_mesh(_OP, bags.mesh, told)
        self._bags, self._optimizer, self._every = bags, optimizer, every
        self._steps = 0

    def step(self) -> None:
        """To be called after every step of the optimizer; a sync when it is time."""
        self._steps += 1
        if self._steps == self._every:
            self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Average now: every rank of the mesh calls this, after the same step."""
        group, _ = require_mesh(_OP, self._bags.mesh)
        _average(self._bags.weight, group)
        if isinstance(self._optimizer, RowWiseAdagrad):
            _average(self._optimizer.to_average(self._bags.weight), group)
            self._optimizer.averaged(self._bags.weight)
        self._steps = 0


def _average(tensor: Tensor, group: dist.ProcessGroup) -> None:
    tensor.copy_(dense_mean(tensor, tensor.dtype, group))


def _require_optimizer(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    stateless = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    )
    if not (stateless or isinstance(optimizer, RowWiseAdagrad)):
        rule = "SGD without momentum, RowWiseAdagrad or MomentumScaledRowWiseAdagrad"
        checks.fail(_OP, "optimizer", rule, type(optimizer).__name__, TypeError)
    if not any(weight is p for group in optimizer.param_groups for p in group["params"]):
        checks.fail(_OP, "optimizer", "one that trains the weight of bags", "one that does not")
