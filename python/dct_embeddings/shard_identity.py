"""The part of a whole that a module holds: states of different ranks may have equal sizes."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from dct_kernels import checks


def register_identity(op: str, module: nn.Module, name: str, identity: Tensor) -> None:
    """Keep the integers of `identity`, on any device, as a buffer of the module, and so in states.

    A state in which they differ is refused (ValueError) before anything is read from it. `strict`
    decides on a state without the buffer, as for any missing key. Copies and pickles of the module
    refuse the same states.

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
    here, saved = module.get_buffer(name).tolist(), state.get(prefix + name)
    there = saved.tolist() if isinstance(saved, Tensor) else saved
    if there is not None and there != here:
        checks.fail(op, f"{name} of the state", f"{here}, as in this module", there)
