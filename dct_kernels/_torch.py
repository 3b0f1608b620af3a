"""All private names of torch that this package uses. No other file of the package may use one.

Tested with torch 2.11 (the oldest supported version), 2.13.0 and 2.14.1.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import _C, _is_functional_tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

__all__ = ["is_fake"]

Op: TypeAlias = "OpOverload[..., Any]"
DispatchKeySet = _C.DispatchKeySet
AFTER_INPLACE = _C._after_ADInplaceOrView_keyset
BelowInplace = _C._AutoDispatchBelowADInplaceOrView
has_kernel = _C._dispatch_has_kernel_for_dispatch_key
increment_versions = _C._increment_version
is_functional = _is_functional_tensor
is_wrapped = _C._functorch.is_functorch_wrapped_tensor  # wrapped by a transform such as torch.vmap


def redispatch_of(op: Op) -> Callable[..., Any]:
    """Return the function that `op.redispatch` calls, to save the time of one Python call."""
    redispatch: Callable[..., Any] = op._handle.redispatch_boxed
    return redispatch


def forward_mode_is_on() -> bool:
    return forward_ad._current_level >= 0
