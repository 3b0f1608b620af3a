"""AdaGrad with one accumulator per row, for embedding tables and replicas of them."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dct_kernels import checks

from .loading import require_loadable


class RowWiseAdagrad(torch.optim.Optimizer):
    """AdaGrad whose accumulator is one number per row: 1 / d of AdaGrad's memory.

    For a row r whose gradient, duplicates summed first, is G of d entries:

        v[r] += mean(G ** 2)
        w[r] -= lr * G / (sqrt(v[r]) + eps)

    This is the mean of squares, not the square of the mean. Sparse and dense gradients give the
    same weights; rows without a sparse gradient cost nothing. Deterministic if the sum of
    duplicates is, as on the CPU. A non-finite gradient reaches weights and accumulators, as in
    torch's own optimizers.

    Args:
        params: weights [rows, d] of nn.Embedding or nn.EmbeddingBag, float32 or float64, or groups
            of them, as for any optimizer.
        lr: learning rate, above 0.
        eps: added to the root, above 0.

    State per weight: `sum`, v above, [rows] of the weight's dtype. It exists from the start, so
    that replicas which have seen different rows can average it. `step` mutates weights and state.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.

    Source: facebookresearch/dlrm, and FBGEMM's EXACT_ROWWISE_ADAGRAD.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(self._iterable(params), {"lr": lr, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add weights with their own settings, as torch.optim.Optimizer does."""
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()` of this class, as torch.optim.Optimizer does.

        Raises:
            ValueError, TypeError: the state does not fit these weights, or a setting in it is out
                of its range. Nothing is loaded then.
        """
        op = type(self).__name__
        _require_keys(op, "state", state_dict, {"state", "param_groups"})
        groups, states = state_dict["param_groups"], state_dict["state"]
        checks.require_type(op, "state['state']", states, dict, "a dict")
        checks.require_type(op, "param_groups", groups, list, "a list of dicts")
        for index, saved in enumerate(groups):
            arg = f"param_groups[{index}]"
            _require_keys(op, arg, saved, {"params", *self.defaults})
            params = saved["params"]
            if type(params) is not list or any(type(key) is not int for key in params):
                checks.fail(op, f"{arg}['params']", "a list of integers", params, TypeError)
        sizes, found = ([len(group["params"]) for group in g] for g in (self.param_groups, groups))
        if found != sizes:
            checks.fail(op, "state", f"groups of {sizes} weights", found, verb="have")
        for saved, own in zip(groups, self.param_groups, strict=True):
            self._check({**saved, "params": own["params"]})
            for key, weight in zip(saved["params"], own["params"], strict=True):
                state = states.get(key, {})
                checks.require_type(op, f"state[{key}]", state, dict, "a dict")
                for name in ("sum", "pending") if saved.get("delayed") else ("sum",):
                    arg = f"state[{key}][{name!r}]"
                    require_loadable(op, arg, state.get(name), weight.dtype, (len(weight),))
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
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
        """The state of `weight`, [rows], that replicas replace with their mean at a sync.

        It is `pending` if delayed, else `sum`. Not a copy.

        Raises:
            ValueError: `weight` is not one of params.
        """
        state = self._state_of(weight)
        return state.get("pending", state["sum"])

    def averaged(self, weight: Tensor, rows: Tensor) -> None:
        """Call it when `to_average(weight)` holds the mean of all replicas.

        If delayed, adds `pending` to `sum` and sets it to 0, in place.

        Args:
            weight: one of params.
            rows: distinct rows [n] in which replicas may have differed.

        Raises:
            ValueError: `weight` is not one of params.
        """
        state = self._state_of(weight)
        checks.require_tensor(type(self).__name__, "rows", rows, (torch.int32, torch.int64))
        if "pending" in state:
            state["sum"][rows] += state["pending"][rows]
            state["pending"][rows] = 0

    def _iterable(self, params: Iterable[Any]) -> Iterable[Any]:
        op = type(self).__name__
        checks.require_type(op, "params", params, Iterable, "tensors or parameter groups")
        return params

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        op = type(self).__name__
        checks.require_type(op, "weight", weight, Tensor, "one of params")
        if weight not in self.state:  # indexing would add it
            checks.fail(op, "weight", "one of params", "a different tensor")
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
                shape = tuple(weight.shape)
                raise ValueError(
                    f"dct::{op}: {arg} must have shape [rows, d] with d >= 1, got {shape}"
                )


class MomentumScaledRowWiseAdagrad(RowWiseAdagrad):
    """Row-wise AdaGrad for tables with M averaged replicas: our reconstruction.

        v[r] += mean(G ** 2)
        w[r] -= lr * G / sqrt(v[r] / c + eps)

    Let g_i be the gradient of a row in replica i. One group with all samples would accumulate
    mean(g_i) ** 2; averaged replicas accumulate mean(g_i ** 2). That is M times as much if one
    replica at a time uses the row, or if gradients are independent noise; it is the same if all g_i
    are equal. So c = M is right for rare and noisy rows, which most rows of a recommender are, and
    1 for frequent clean rows. c may change in training, because only the division uses it.

    With `delayed`, all replicas divide by v as of the last sync, and keep newer squares in a second
    accumulator until the next sync. Averaged weights are then exactly the last synced ones minus
    lr * mean(sum of gradients) / sqrt(v / c + eps). The second accumulator divides rows whose v is
    0, which were not used before the last sync.

    Deterministic like `RowWiseAdagrad`.

    Args:
        params, lr: as of `RowWiseAdagrad`.
        eps: inside the root, above 0. The default, the square of that of `RowWiseAdagrad`, gives
            the same step if v is 0.
        scale: c above, from 1 up; M for M replicas of a table.
        delayed: divide by the accumulator of the last sync.

    State per weight: `sum`, v above, and, if delayed, `pending`, the newer squares: [rows] each.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.

    Source: two-dimensional sparse parallelism (arXiv 2508.03854); scale and delay are derived here.
    """

    @checks.names_keywords
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        eps: float = 1e-16,
        *,
        scale: float,
        delayed: bool = False,
    ) -> None:
        checks.require_type(type(self).__name__, "delayed", delayed, bool, "a bool")
        settings = {"lr": lr, "eps": eps, "scale": scale, "delayed": delayed}
        torch.optim.Optimizer.__init__(self, self._iterable(params), settings)

    def _divisor(self, accumulator: Tensor, group: dict[str, Any]) -> Tensor:
        return (accumulator / float(group["scale"]) + float(group["eps"])).sqrt()


def _require_keys(op: str, arg: str, values: dict[str, Any], keys: set[str]) -> None:
    checks.require_type(op, arg, values, dict, "a dict, as in a state_dict()")
    if missing := sorted(keys - values.keys()):
        checks.fail(op, arg, ", ".join(sorted(keys)), f"no {', '.join(missing)}", verb="have")
