"""AdaGrad with one accumulator per row, for embedding tables and their replicas."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dct_kernels import checks

from .loading import require_loadable


class RowWiseAdagrad(torch.optim.Optimizer):
    """AdaGrad with one accumulator per row of d columns, in 1 / d of AdaGrad's memory.

    For a row r with the gradient G of d entries, after summing duplicates:

        v[r] += mean(G ** 2)
        w[r] -= lr * G / (sqrt(v[r]) + eps)

    v accumulates the mean of squares, not the square of the mean. Sparse and dense gradients give
    the same weights. With sparse gradients, unused rows cost nothing. Results are deterministic if
    duplicates are summed deterministically, as on the CPU. Non-finite gradients enter weights and
    accumulators, as in torch's optimizers.

    Args:
        params: weights [rows, d] of nn.Embedding or nn.EmbeddingBag, float32 or float64, or
            parameter groups, as for any optimizer.
        lr: learning rate, above 0.
        eps: added to the square root, above 0.

    The state of each weight is `sum` (v above), [rows] in the weight's dtype. It exists from the
    start, so that replicas that have used different rows can average it. `step` mutates weights and
    state.

    Raises:
        ValueError, TypeError: an argument is out of range.

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
            ValueError, TypeError: the state does not match these weights, or a setting in it is out
                of range. Nothing is loaded.
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
        for saved, group in zip(groups, self.param_groups, strict=True):
            self._check({**saved, "params": group["params"]})
            for key, weight in zip(saved["params"], group["params"], strict=True):
                state = states.get(key, {})
                checks.require_type(op, f"state[{key}]", state, dict, "a dict")
                for name in ("sum", "pending") if saved.get("delayed") else ("sum",):
                    arg = f"state[{key}][{name!r}]"
                    require_loadable(op, arg, state.get(name), weight.dtype, (len(weight),))
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every weight that has a gradient. Return the loss of the closure, if given."""
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
        """Return the state of `weight` [rows] that replicas average at a sync. Not a copy.

        With `delayed`, the state is `pending`. Otherwise, it is `sum`.

        Raises:
            ValueError: `weight` is not one of params.
        """
        state = self._state_of(weight)
        return state.get("pending", state["sum"])

    def averaged(self, weight: Tensor, rows: Tensor) -> None:
        """Finish a sync, after `to_average(weight)` was overwritten with the mean of all replicas.

        With `delayed`, this adds `pending` to `sum` and resets `pending` to 0, in place.

        Args:
            weight: one of params.
            rows: the distinct rows [n] in which replicas may have differed.

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
        if weight not in self.state:  # indexing would add an entry
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
        """The divisor of gradients, given the accumulators [n] of their rows."""
        return accumulator.sqrt() + float(group["eps"])

    def _check(self, group: dict[str, Any]) -> None:
        op = type(self).__name__
        for name in [name for name in ("lr", "eps", "scale") if name in group]:
            checks.require_number(op, name, group[name])
            fits = group[name] >= 1 if name == "scale" else group[name] > 0  # false for NaN
            if not fits or group[name] == math.inf:
                bound = "at least 1" if name == "scale" else "above 0"
                checks.fail(op, name, f"finite and {bound}", group[name])
        for index, weight in enumerate(group["params"]):
            arg = f"params[{index}]"
            checks.require_dtype(op, arg, weight.dtype, (torch.float32, torch.float64))
            if weight.dim() != 2 or weight.shape[1] == 0:
                shape = tuple(weight.shape)
                checks.fail(op, arg, "shape [rows, d] with d >= 1", shape, verb="have")


class MomentumScaledRowWiseAdagrad(RowWiseAdagrad):
    """Row-wise AdaGrad for tables with M averaged replicas.

        v[r] += mean(G ** 2)
        w[r] -= lr * G / sqrt(v[r] / c + eps)

    Let g_i be the gradient of a row in replica i. A single group with all samples would accumulate
    mean(g_i) ** 2, with means over i, while averaged replicas accumulate mean(g_i ** 2). The second
    value is M times as large as the first if one replica at a time uses the row, or if gradients
    are independent noise. The values are equal if all g_i are equal. So use c = M for rare and
    noisy rows, such as most rows of a recommender, and c = 1 for frequent rows with little noise.
    c may change during training.

    With `delayed`, all replicas divide by v of the last sync, and keep newer squares in a second
    accumulator until the next sync. The averaged weights are then exactly the last synced weights
    minus lr * mean(sum of gradients) / sqrt(v / c + eps). For rows with v = 0,
    which were not used before the last sync, the second accumulator replaces v.

    Results are deterministic as in `RowWiseAdagrad`.

    Args:
        params, lr: see `RowWiseAdagrad`.
        eps: added inside the square root, above 0. The default is the square of the default of
            `RowWiseAdagrad`, so both optimizers take the same step if v is 0.
        scale: c above, at least 1; M for M replicas of a table.
        delayed: whether to divide by the accumulator of the last sync.

    The state of each weight is `sum` (v above) and, with `delayed`, `pending` (the newer squares),
    both [rows].

    Raises:
        ValueError, TypeError: an argument is out of range.

    Source: two-dimensional sparse parallelism (arXiv 2508.03854). This project derives scale and
    delay.
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
