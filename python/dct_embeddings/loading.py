"""Modules that load a state completely or not at all."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dct_kernels import checks


class CheckedModule(nn.Module):
    """A module that checks a state completely before it loads any of it.

    The checks cover submodules. If a larger module contains this one, `load_state_dict` of the
    larger module also runs the checks, but it may already have loaded other submodules. The larger
    module reports missing and unexpected names at the end.

    Attributes:
        identity: the name of the buffer that identifies the shard, because states of different
            shards may have equal sizes. None if there is no such buffer.
    """

    identity: str | None = None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        op = type(self).__name__
        checks.require_type(op, "state", state_dict, Mapping, "a state_dict()")
        if strict:
            require_names(op, self.state_dict(keep_vars=True), state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *more: Any) -> None:
        self._require_state(without_prefix(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *more)

    def _require_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless this module and its submodules can load their values in `state`."""
        op, current = type(self).__name__, self.state_dict(keep_vars=True)
        for name, module in self.named_modules():
            if module is not self and isinstance(module, CheckedModule):
                module._require_state(without_prefix(state, f"{name}."))
                current = {key: current[key] for key in current if not key.startswith(f"{name}.")}
        identity = self.identity
        if identity is not None and identity in state:
            checks.require_plain(op, f"state[{identity!r}]", state[identity])
            expected, found = current[identity].tolist(), state[identity].tolist()
            if expected != found:
                checks.fail(op, f"{identity} of the state", f"{expected}, as in this module", found)
        for name, tensor in current.items():
            if name in state and isinstance(tensor, Tensor):
                require_loadable(op, f"state[{name!r}]", state[name], tensor.dtype, tensor.shape)


def without_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Select the values whose names have this prefix, and remove the prefix from the names."""
    return {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}


def require_names(op: str, expected: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise unless `state` has exactly the names of `expected`."""
    missing = [f"no {name}" for name in expected if name not in state]
    unknown = [f"also {name}" for name in state if name not in expected]
    if missing or unknown:
        checks.fail(op, "state", ", ".join(expected), ", ".join(missing + unknown), verb="have")


def require_loadable(
    op: str, arg: str, value: object, dtype: torch.dtype, shape: Sequence[int]
) -> None:
    """Raise unless `value` is a tensor that can be copied into one with this dtype and shape."""
    checks.require_plain(op, arg, value)
    assert isinstance(value, Tensor)
    if value.is_complex() or value.is_floating_point() != dtype.is_floating_point:
        rule = f"numbers like {str(dtype).removeprefix('torch.')}"
        checks.fail(op, arg, rule, value.dtype, TypeError)
    if value.shape != torch.Size(shape):
        checks.fail(op, arg, f"shape {tuple(shape)}", tuple(value.shape), verb="have")
