"""Warnings at the first optimizer step about settings that silently lose gradients or quality."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._torch import calling_scaler
from ..user_warnings import warn_user
from .loss_scale import LossScale
from .settings import Settings

# Keys of optimizer states with running means of squared gradients (or a maximum, in Adamax):
# - exp_avg_sq: Adam, AdamW, NAdam, RAdam, LAMB
# - exp_inf: Adamax
# - square_avg: RMSprop, Adadelta
# - variance, row_var: Adafactor of torch
# - exp_avg_sq_row: Adafactor of transformers
# - state2: bitsandbytes
# AdaGrad's "sum" is not listed, because it is not a mean. With AdaGrad on the embedding tables of a
# DLRM, the sparse hook increased the loss by 0.001.
_SECOND_MOMENTS = {"exp_avg_sq", "exp_inf", "square_avg", "variance", "row_var", "exp_avg_sq_row"}
_SECOND_MOMENTS |= {"state2"}

_CALLS = {
    "DCTState": "DCTState(ddp, {})",
    "dct_fully_shard_hook": "dct_fully_shard_hook(model, mesh=mesh, {})",
}


class FirstStep:
    """Checks each optimizer of the averaged parameters at its first step.

    It registers an optimizer hook, which `close` removes. The hook does not keep this object alive.

    Args:
        op: the entry point, for warnings.
        parameters: the averaged parameters.
        settings: the user's settings.
        loss_scale: the scale of the user's GradScaler, or None.

    Attributes:
        seen: whether an optimizer has stepped.
        close: removes the hook. Do not call it from an optimizer hook, because torch iterates over
            the hooks.
    """

    def __init__(
        self,
        op: str,
        parameters: Iterable[Tensor],
        settings: Settings,
        loss_scale: LossScale | None,
    ) -> None:
        self._call, self._parameters = _CALLS[op], set(parameters)
        self._density, self._loss_scale = settings.density, loss_scale
        self._warned: set[str] = set()
        self.seen = False
        alive, check = weakref.ref(self), torch.compiler.disable(FirstStep._check)

        def hook(optimizer: Optimizer, *_: object) -> None:
            if (first := alive()) is not None:
                check(first, optimizer)

        self.close = register_optimizer_step_post_hook(hook).remove

    def _check(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        held = [p for group in groups for p in group["params"] if p in self._parameters]
        held = [p for p in held if p.grad is not None]
        if not held:
            return
        self.seen = True
        name = type(optimizer).__name__
        kept = {key for p in held for key in optimizer.state.get(p, ())}
        if self._density < 1 and kept & _SECOND_MOMENTS:
            self._warn(
                f"{name} divides by second moments of gradients, which the sparse hook (density "
                f"{self._density}) sends late. This raised a transformer's loss by 0.3 and a "
                "DLRM's by 0.001 (docs/guide/choosing.md). Unless you measured your loss, write "
                + self._call.format('format="int4"')
            )
        self._check_scaler(name, held, calling_scaler())

    def _check_scaler(self, name: str, held: list[Tensor], scaler: GradScaler | None) -> None:
        if scaler is None or not scaler.is_enabled():
            return
        given = self._loss_scale
        if given is None or given.scaler is not scaler:
            what, ask = "a GradScaler that was not passed as grad_scaler", "grad_scaler=scaler, "
            self._warn(
                f"{name} is stepped by {what}: gradients that were sent in a step that it skips "
                "are lost. Write " + self._call.format(ask + "optimizer=optimizer")
            )
        elif not given.holds(held):
            self._warn(
                f"{name} holds averaged parameters, but was not passed as optimizer: gradients "
                "that were sent in a step that the GradScaler skips may be lost. Write "
                + self._call.format("grad_scaler=scaler, optimizer=[...]")
                + ", with all optimizers of these parameters"
            )

    def _warn(self, text: str) -> None:
        kind = text.partition(" ")[2]
        if kind not in self._warned:
            self._warned.add(kind)
            warn_user(f"DCT: {text}.")
