"""AdaGrad with one accumulator per row, for embedding tables and replicas of them."""

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from dct_kernels import checks


class RowWiseAdagrad(torch.optim.Optimizer):
    """AdaGrad whose accumulator is one number per row: 1 / d of AdaGrad's memory.

    For a row r whose gradient, duplicates summed first, is G of d entries:

        v[r] += mean(G ** 2)
        w[r] -= lr * G / (sqrt(v[r]) + eps)

    the rule that recommenders train their tables with (facebookresearch/dlrm, and FBGEMM's
    EXACT_ROWWISE_ADAGRAD): the mean of squares, not the square of the mean. Rows that a sparse
    gradient does not name cost nothing, and a dense gradient of zeros leaves them as they are:
    either kind gives the same weights. Deterministic if summing duplicates is: always on the CPU. A
    non-finite gradient gets into weights and accumulators, as in torch's own optimizers.

    Args:
        params: weights [rows, d] of nn.Embedding or nn.EmbeddingBag, float32 or float64, with dense
            or sparse gradients; or groups of them, as for any optimizer.
        lr: learning rate, above 0.
        eps: added to the root, above 0.

    State per weight: `sum`, v above, [rows] of the weight's dtype. It exists from the start, so
    that replicas which have seen different rows can average it. `step` mutates weights and state.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(self._iterable(params), {"lr": lr, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add weights with settings of their own, as torch.optim.Optimizer does."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for weight in group["params"]:
            for name in ("sum", "pending") if group.get("delayed") else ("sum",):
                self.state[weight][name] = weight.detach().new_zeros(len(weight))

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every weight that has a gradient. Returns the loss of the closure, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def to_average(self, weight: Tensor) -> Tensor:
        """The state of `weight`, [rows], that its replicas replace with their mean at a sync.

        Every step adds to it: `pending` if delayed, else `sum`. Not a copy.

        Raises:
            ValueError: `weight` is not one of params.
        """
        state = self._state_of(weight)
        return state.get("pending", state["sum"])

    def averaged(self, weight: Tensor, rows: Tensor) -> None:
        """Call it once `to_average(weight)` holds the mean of all replicas. If delayed, `pending`
        is added to `sum`, and becomes 0, in place.

        Args:
            weight: one of params.
            rows: [n], each once, in which replicas may have differed.

        Raises:
            ValueError: `weight` is not one of params.
        """
        state = self._state_of(weight)
        if "pending" in state:
            state["sum"][rows] += state["pending"][rows]
            state["pending"][rows] = 0

    def _iterable(self, params: Iterable[Any]) -> Iterable[Any]:
        op = type(self).__name__
        checks.require_type(op, "params", params, Iterable, "tensors or parameter groups")
        return params

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        if weight not in self.state:  # a look would add it
            checks.fail(type(self).__name__, "weight", "one of params", "a different tensor")
        state: dict[str, Tensor] = self.state[weight]
        return state

    def _update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        rows: Tensor | slice = slice(None)
        if grad.is_sparse:
            grad = grad.coalesce()
            grad, rows = grad.values(), grad.indices()[0]
        accumulator, synced = self.to_average(weight), self.state[weight]["sum"]
        accumulator[rows] += grad.square().mean(1)
        used = torch.where(synced[rows] > 0, synced[rows], accumulator[rows])
        weight[rows] -= group["lr"] * grad / self._divisor(used, group).unsqueeze(1)

    def _divisor(self, accumulator: Tensor, group: dict[str, Any]) -> Tensor:
        """The divisor of gradients, for these rows' accumulators [n]."""
        return accumulator.sqrt() + float(group["eps"])

    def _check(self, group: dict[str, Any]) -> None:
        op = type(self).__name__
        for name in [name for name in ("lr", "eps", "scale") if name in group]:
            checks.require_number(op, name, group[name])
            fits = group[name] >= 1 if name == "scale" else group[name] > 0  # false of a NaN
            if not fits or group[name] == math.inf:
                bound = "at least 1" if name == "scale" else "above 0"
                checks.fail(op, name, f"finite and {bound}", group[name])
        for index, weight in enumerate(group["params"]):
            arg = f"params[{index}]"
            checks.require_dtype(op, arg, weight.dtype, (torch.float32, torch.float64))
            if weight.dim() != 2 or weight.shape[1] == 0:
                rule = "shape [rows, d] with d >= 1"
                checks.fail(op, arg, rule, tuple(weight.shape), verb="have")


class MomentumScaledRowWiseAdagrad(RowWiseAdagrad):
    """Row-wise AdaGrad for tables with M averaged replicas: our reconstruction.

    Two-dimensional sparse parallelism (arXiv 2508.03854) trains M groups, each with a replica of
    all tables, and averages weights and accumulators. Its momentum-scaled row-wise AdaGrad is, in
    our reconstruction, after a review,

        v[r] += mean(G ** 2)
        w[r] -= lr * G / sqrt(v[r] / c + eps)

    with c the number of replicas. The accumulator is a `RowWiseAdagrad`'s, and c is applied where
    it is used: it may change in training, and from there on steps are those of a run that always
    had it. Scale and delay are derived here from the effect of averaging.

    *The scale.* Let g_i be group i's mean gradient of a row, 0 where it did not use the row. One
    group with all samples would have G = mean(g_i) and accumulate mean(G ** 2); replicas accumulate
    g_i ** 2 each, and share the mean of that. The row's gradients

    - come from one group at a time: G ** 2 = g ** 2 / M ** 2, shared g ** 2 / M: M times as much,
      so that steps are sqrt(M) times too small;
    - are independent noise in every group: E[G ** 2] = s ** 2 / M, shared s ** 2: M times as well;
    - are the same in every group: both g ** 2.

    So c is between M, right for rare and for noisy rows, which most rows of a recommender are, and
    1, right for frequent clean ones: at c = M those take steps sqrt(M) times too large. A constant
    c does just what multiplying lr by sqrt(c), and eps by c, does.

    *The delay.* Replicas that divide by accumulators of their own do not average to a step by their
    averaged gradient. So with `delayed` a row is divided by the root of v as of the last sync, the
    same on every replica; newer squares are kept in a second accumulator until the next sync.
    (TorchRec's authors write of a momentum "behind by one sync step" for AdaGrad.) Averaged weights
    are then the last synced ones minus lr * mean(sum of gradients) / sqrt(v / c + eps), exactly. A
    row whose v is 0, not used before the last sync, is divided by the second accumulator.

    Deterministic as `RowWiseAdagrad`.

    Args:
        params: as of `RowWiseAdagrad`.
        lr: as of `RowWiseAdagrad`.
        eps: inside the root, above 0. The default is the square of `RowWiseAdagrad`'s: the same
            step if v is 0.
        scale: c above, from 1 up; M for M replicas of a table.
        delayed: divide by the accumulator of the last sync.

    State per weight: `sum`, v above, and, if delayed, `pending`, the newer squares: [rows] each.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        eps: float = 1e-16,
        *,
        scale: float,
        delayed: bool = False,
    ) -> None:
        settings = {"lr": lr, "eps": eps, "scale": scale, "delayed": delayed}
        torch.optim.Optimizer.__init__(self, self._iterable(params), settings)

    def _divisor(self, accumulator: Tensor, group: dict[str, Any]) -> Tensor:
        return (accumulator / float(group["scale"]) + float(group["eps"])).sqrt()
