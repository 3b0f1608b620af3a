"""A buffer that says which shard a module holds: states of different ranks may have equal sizes."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from dct_kernels import checks


def register_identity(op: str, module: nn.Module, name: str, identity: Tensor) -> None:
    """Keep the integers of `identity` as a buffer of the module, which its states contain.

    Loading a state with different integers raises a ValueError before anything else is loaded.
    `strict` decides on a state without the buffer, as for any missing key. This also holds for
    copies and pickles of the module.

    Args:
        op: the module, for the error.
        name: of the buffer.
    """
    module.register_buffer(name, identity)
    hook = partial(_require_same, op, name)
    module.register_load_state_dict_pre_hook(hook)


def _require_same(
    op: str, name: str, module: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: object
) -> None:
    expected, saved = module.get_buffer(name).tolist(), state.get(prefix + name)
    found = saved.tolist() if isinstance(saved, Tensor) and checks.is_plain(saved) else saved
    if found is not None and found != expected:
        rule = f"{expected}, as in this module"
        raise ValueError(f"dct::{op}: {name} of the state must be {rule}, got {found}")
