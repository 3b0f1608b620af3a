"""Replicas of embedding tables, averaged every few steps."""

from itertools import accumulate

import torch
from torch import Tensor

from dct_kernels import checks

from ..mesh import require_same_in_mesh
from .averages import Average, MeanOfLargestDeltas, MeanOfRoundedDeltas, MeanOfRows
from .embedding_bags import ShardedEmbeddingBags
from .row_wise_adagrad import RowWiseAdagrad

_OP = "ReplicaSync"


class ReplicaSync:
    """Averages the tables of all replicas, and their row-wise AdaGrad state, every `every` steps.

    Rows that were looked up since the last sync take part, those of all replicas together; others
    cost nothing, neither bytes nor memory passes. Afterwards replicas are bitwise equal in weights
    and accumulators. In a mesh of one row a sync changes no bit, whatever the settings.

    - By default rows cross as they are, by an all-reduce: their mean.
    - With `dtype`, what changed since the last sync crosses, rounded to it; accumulators as they
      are. What rounding loses is lost.
    - With `density`, DCT (arXiv 2010.08899): the largest entries of what changed, a threshold for
      each shard, as bfloat16. Weights are then those of the last sync and the mean of what was
      delivered; the rest leaves the weights and waits in the residual (error feedback). A row with
      a residual counts as changed, so the rows of one sync take part in the next, until `flush()`.
      Accumulators are not thresholded: what they gained crosses, for rows looked up since the last
      sync. Compressing what changed across replicas, not gradients, is our reconstruction.

    Between syncs replicas differ, and with a density something waits. `flush()` before evaluation
    and before a checkpoint: a ReplicaSync has nothing to save then, as it counts the steps since
    the last sync, and the ranks of one replica have all there is to save of bags and optimizer.

    A step costs a gather of the rows that are looked up for the first time since the last sync, and
    the host waits for how many they are. Deterministic on the CPU.

    Args:
        bags: whose weight is averaged. From here on the ReplicaSync is told what they look up:
            make it before training, once what is saved is loaded, and one for a model's life.
        optimizer: that trains it: torch.optim.SGD without momentum and weight decay, or
            RowWiseAdagrad or MomentumScaledRowWiseAdagrad.
        every: steps from one sync to the next.
        dtype: torch.float16 or torch.bfloat16, of what changed; default uncompressed.
        density: instead of a dtype, fraction of each shard's changed entries to send at a sync, in
            (0, 1]; for float32 weights.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
        ValueError: ranks of the mesh differ in a setting or the kind of optimizer; on all of them.
    """

    def __init__(
        self,
        bags: ShardedEmbeddingBags,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        *,
        dtype: torch.dtype | None = None,
        density: float | None = None,
    ) -> None:
        if not isinstance(bags, ShardedEmbeddingBags):
            checks.fail(_OP, "bags", "ShardedEmbeddingBags", type(bags).__name__, TypeError)
        checks.require_int(_OP, "every", every, 1, 2**63 - 1)
        _require_format(dtype, density, bags.weight)
        _require_optimizer(optimizer, bags.weight)
        if bags.on_lookup is not None:  # what waits in its residual would be lost
            checks.fail(_OP, "bags", "of one ReplicaSync", "a second")
        told = {"every": every, "dtype": str(dtype), "density": density}
        require_same_in_mesh(_OP, bags.mesh, told | {"optimizer": type(optimizer).__name__})
        self._bags, self._optimizer, self._every = bags, optimizer, every
        self._average = _average(bags, dtype, density)
        self._steps = 0
        bags.on_lookup = self._touch

    def step(self) -> None:
        """To be called after every step of the optimizer; a sync when it is time."""
        self._steps += 1
        if self._steps == self._every:
            self.sync()

    def sync(self) -> None:
        """Average now: every rank of the mesh calls this, after the same step.

        Raises:
            RuntimeError: a replica is gone, or what it sent was damaged. Load a checkpoint then.
        """
        self._meet(everything=False)

    def flush(self) -> None:
        """A sync after which nothing waits: what does crosses as it is, for every such row."""
        self._meet(everything=True)

    @torch.no_grad()
    def _meet(self, everything: bool) -> None:
        weight = self._bags.weight
        rows = self._average.meet(weight, self._state(), everything)
        if isinstance(self._optimizer, RowWiseAdagrad):
            self._optimizer.averaged(weight, rows)
        self._steps = 0

    @torch.no_grad()
    def _touch(self, rows: Tensor) -> None:
        self._average.touch(rows, self._bags.weight, self._state())

    def _state(self) -> Tensor | None:
        if isinstance(self._optimizer, RowWiseAdagrad):
            return self._optimizer.to_average(self._bags.weight)
        return None


def _average(
    bags: ShardedEmbeddingBags, dtype: torch.dtype | None, density: float | None
) -> Average:
    group = bags.mesh.get_group("replicate")
    weight = bags.weight.detach()
    if group.size() == 1 or (dtype is None and density is None):
        return MeanOfRows(weight, group)
    if density is None:
        return MeanOfRoundedDeltas(weight, group, dtype)
    bounds = [0, *accumulate(len(rows) for rows in bags.shards().values())]
    return MeanOfLargestDeltas(weight, group, density, bounds)


def _require_format(dtype: torch.dtype | None, density: float | None, weight: Tensor) -> None:
    if density is not None:
        checks.require_density(_OP, density)
        if dtype is not None:
            checks.fail(_OP, "density", "given without dtype", f"{density} and {dtype}")
        checks.require_dtype(_OP, "weight of bags, with a density,", weight.dtype, (torch.float32,))
    if dtype is not None:
        checks.require_dtype(_OP, "dtype", dtype, (torch.float16, torch.bfloat16))


def _require_optimizer(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    # Either changes rows that nobody looked up.
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] or group["weight_decay"] for group in optimizer.param_groups
    )
    if not (plain or isinstance(optimizer, RowWiseAdagrad)):
        rule = "plain SGD, RowWiseAdagrad or MomentumScaledRowWiseAdagrad"
        checks.fail(_OP, "optimizer", rule, type(optimizer).__name__, TypeError)
    if not any(weight is p for group in optimizer.param_groups for p in group["params"]):
        checks.fail(_OP, "optimizer", "one that trains the weight of bags", "one that does not")
