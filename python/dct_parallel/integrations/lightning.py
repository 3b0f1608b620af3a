"""A callback and a strategy for Lightning (docs/guide/recipes.md). Each rank saves files."""

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from .. import DCTAverager, DCTState, dct_hook


class DCTCallback(Callback):
    """Registers `dct_hook` on the DDP of Lightning's strategy. `state` is the `DCTState`.

    Args:
        settings: arguments of `DCTState`. The callback adds the GradScaler and the optimizer.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def on_train_start(self, trainer: Any, module: Any) -> None:
        ddp, optimizers = trainer.strategy.model, trainer.optimizers
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # with "16-mixed"
        self.state = DCTState(ddp, grad_scaler=scaler, optimizer=optimizers, **self._settings)
        ddp.register_comm_hook(self.state, dct_hook)
        if trainer.ckpt_path:
            self.state.load_state_dict(torch.load(self._path(trainer), weights_only=True))

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        torch.save(self.state.state_dict(), self._path(trainer))  # on every rank

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.state.close()

    def _path(self, trainer: Any) -> str:
        return f"{trainer.default_root_dir}/step{trainer.global_step}-dct{trainer.global_rank}.pt"


class LocalStepsStrategy(DDPStrategy):
    """Averages Lightning's weights every few steps. `averager` is the `DCTAverager`.

    Args:
        settings: arguments of `DCTAverager`, such as `period`.
    """

    restore_checkpoint_after_setup = True  # a new averager broadcasts the weights of rank 0

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = settings

    def configure_ddp(self) -> None:  # the averager replaces DDP
        self.averager = DCTAverager(self.model, **self._settings)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self.averager.average_parameters()
        return output

    def on_train_end(self) -> None:
        self.averager.flush()  # so that all ranks have the same weights

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        checkpoint["averager"] = self.averager.state_dict()  # on every rank
        self.checkpoint_io.save_checkpoint(checkpoint, self._path(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> Any:
        return super().load_checkpoint(self._path(checkpoint_path), weights_only)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:  # Lightning calls it only in fit
        super().load_optimizer_state_dict(checkpoint)
        self.averager.load_state_dict(checkpoint["averager"])

    def _path(self, filepath: Any) -> Any:
        return f"{filepath}.{self.global_rank}" if self.global_rank else filepath
