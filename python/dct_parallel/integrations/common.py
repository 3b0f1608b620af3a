"""What the adapters of all frameworks share."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from .. import DCTState, dct_hook
from .._torch import comm_hooks
from ..collectives import all_reduce_bytes
from ..user_warnings import logger, warn_user


class HookCallback:
    """A callback that registers `dct_hook` with the DDP module of a framework.

    Attributes:
        state: the `DCTState` of the last training, or None with one process.
    """

    state: DCTState | None = None
    _logged = False

    def _register(self, ddp: Any, **settings: Any) -> DCTState:
        """Create a new state, and use it in the hook of a DDP module, which may be compiled."""
        if getattr(ddp, "find_unused_parameters", False):
            warn_user(
                "DCT: with find_unused_parameters=True, DDP discards the entries that the hook "
                "sent for a parameter that no rank used. Set it to False. For the HF Trainer, set "
                "ddp_find_unused_parameters in the TrainingArguments."
            )
        self.state = DCTState(ddp, **settings)
        # The framework may have trained with this DDP before.
        hooks = [found for _, found in comm_hooks(ddp) if isinstance(found, _Current)]
        current = hooks[0] if hooks else _Current()
        current.state = self.state
        if not hooks:
            ddp.register_comm_hook(current, _Current.hook)
        return self.state

    def _log_once(self, model: nn.Module) -> None:
        """Log the format and the bytes after the first compressed step. Call it after each step."""
        state = self.state
        if self._logged or state is None or state.step <= state.start_step or dist.get_rank() > 0:
            return
        self._logged = True
        local = state.node_group.size() if state.node_group else 1
        numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        dense = all_reduce_bytes(4 * numel // local, dist.get_world_size() // local)
        fewer = dense / (state.stats()["wire_bytes"] or dense)
        density = f", density {state.settings.density}" if state.settings.density < 1 else ""
        # A warning, because Python shows no other messages by default.
        logger.warning(
            f"DCT: {state.settings.format}{density}, {fewer:.1f}x fewer bytes per step than an "
            f"all-reduce in float32, {fewer / 2:.1f}x fewer than in bfloat16"
        )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.state is not None:
            self.state.close()


class _Current:
    """The state of the hook of a DDP module, which accepts only one hook in its lifetime."""

    state: DCTState

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        return dct_hook(self.state, bucket)


def is_alone(processes: int) -> bool:
    """Whether there is only one process. In this case, also warn."""
    if processes == 1:
        warn_user("DCT: there is only one process, so nothing is sent and nothing is compressed.")
    return processes == 1


def save_parts(path: str, **parts: Any) -> None:
    """Save the state of each part to a file of this rank."""
    os.makedirs(os.path.dirname(path), exist_ok=True)  # rank 0 may create the folder later
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def load_parts(path: str, **parts: Any) -> None:
    """Load the result of `save_parts`. Warn and load nothing if the run did not save it."""
    saved = torch.load(path, weights_only=True) if os.path.exists(path) else {}
    if parts.keys() <= saved.keys():
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    else:
        warn_not_saved(path)


def warn_not_saved(path: object) -> None:
    warn_user(
        f"DCT: {path} has no state of this adapter, so training starts without pending changes. If "
        "the saved run used the adapter, copy the files of all its ranks."
    )
