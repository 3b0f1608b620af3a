"""States of modules of which every rank has a part: one rank's may fit another's, in size."""

from collections.abc import Mapping

from torch import Tensor, nn

from dct_kernels import checks


def require_own_state(
    op: str, owner: str, module: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: object
) -> None:
    """Raise if the buffer `owner` of a state says otherwise than the module's, before it is loaded.

    With the first two arguments bound, a hook for `nn.Module.register_load_state_dict_pre_hook`. A
    state without the buffer is up to `strict`, as any missing key is.

    Raises:
        ValueError: the state is of another part.
    """
    here, saved = module.get_buffer(owner).tolist(), state.get(prefix + owner)
    there = saved.tolist() if isinstance(saved, Tensor) else saved
    if there is not None and there != here:
        checks.fail(op, f"{owner} of the state", f"{here} as here", there)
