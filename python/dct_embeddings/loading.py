"""Modules that load a whole state or none of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dct_kernels import checks


class CheckedModule(nn.Module):
    """A module that checks a state as a whole before it loads any of it.

    The checks cover the modules inside it, and run in `load_state_dict` of a larger module as well.
    A larger module may have loaded other parts by then. It reports missing and unexpected names
    after it has loaded the rest, as usual.

    Attributes:
        identity: the buffer that says which shard this is; states of different shards may have
            equal sizes. None if there is no such buffer.
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
        self._require_state(part_of(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *more)

    def _require_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless this module and those inside it can load what `state` has for them."""
        op, own = type(self).__name__, self.state_dict(keep_vars=True)
        for name, module in self.named_modules():
            if module is not self and isinstance(module, CheckedModule):
                module._require_state(part_of(state, f"{name}."))
                own = {key: own[key] for key in own if not key.startswith(f"{name}.")}
        identity = self.identity
        if identity is not None and identity in state:
            checks.require_plain(op, f"state[{identity!r}]", state[identity])
            here, there = own[identity].tolist(), state[identity].tolist()
            if here != there:
                checks.fail(op, f"{identity} of the state", f"{here}, as in this module", there)
        for name, tensor in own.items():
            if name in state and isinstance(tensor, Tensor):
                require_loadable(op, f"state[{name!r}]", state[name], tensor.dtype, tensor.shape)


def part_of(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values whose names have this prefix, by their names without it."""
    return {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}


def require_names(op: str, expected: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise unless `state` has exactly the names of `expected`."""
    lacking = [f"no {name}" for name in expected if name not in state]
    unknown = [f"also {name}" for name in state if name not in expected]
    if lacking or unknown:
        checks.fail(op, "state", ", ".join(expected), ", ".join(lacking + unknown), verb="have")


def require_loadable(
    op: str, arg: str, value: object, dtype: torch.dtype, shape: Sequence[int]
) -> None:
    """Raise unless `value` is a tensor that can be copied into one of this dtype and shape."""
    checks.require_plain(op, arg, value)
    assert isinstance(value, Tensor)
    if value.is_complex() or value.is_floating_point() != dtype.is_floating_point:
        rule = f"numbers like {str(dtype).removeprefix('torch.')}"
        checks.fail(op, arg, rule, value.dtype, TypeError)
    if value.shape != torch.Size(shape):
        checks.fail(op, arg, f"shape {tuple(shape)}", tuple(value.shape), verb="have")
