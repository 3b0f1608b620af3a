"""A callback and a strategy for Lightning (docs/guide/recipes.md). Each rank saves files."""

import inspect
import os
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from dct_kernels import checks

from .. import DCTAverager
from .common import HookCallback, is_alone, load_parts, save_parts, warn_not_saved


class DCTCallback(HookCallback, Callback):
    """Registers `dct_hook` on the DDP of Lightning's strategy. `state` is the `DCTState`.

    With one process, the callback does nothing, and `state` is None.

    Args:
        settings: arguments of `DCTState`. The callback adds the GradScaler and the optimizer.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if is_alone(trainer.world_size):
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # with "16-mixed"
        settings = {"grad_scaler": scaler, "optimizer": trainer.optimizers, **self._settings}
        state = self._register(trainer.strategy.model, **settings)
        if trainer.ckpt_path:
            load_parts(self._path(trainer), hook=state)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self._log_once(module)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if self.state is not None:
            save_parts(self._path(trainer), hook=self.state)  # on every rank

    def _path(self, trainer: Any) -> str:
        return f"{trainer.default_root_dir}/step{trainer.global_step}-dct{trainer.global_rank}.pt"


class LocalStepsStrategy(DDPStrategy):
    """Averages Lightning's weights every few steps. `averager` is the `DCTAverager`.

    With manual optimization, a step is a batch in which an optimizer stepped. With one process,
    `averager` is None.

    Args:
        settings: arguments of `DCTAverager`, such as `period`, and of `DDPStrategy`, such as
            `timeout`, except arguments for DDP, which this strategy does not use.

    Raises:
        TypeError: an argument is unknown, or is for DDP.
    """

    restore_checkpoint_after_setup = True  # a new averager broadcasts the weights of rank 0
    averager: DCTAverager | None = None

    def __init__(self, **settings: Any) -> None:
        ddp = {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"}
        strategy = inspect.signature(DDPStrategy).parameters.keys() - ddp - {"kwargs"}
        averager = inspect.signature(DCTAverager).parameters.keys() - {"module"}
        if unknown := settings.keys() - strategy - averager:
            rule = "arguments of DCTAverager, or of DDPStrategy without those for DDP"
            got = ", ".join(sorted(unknown))
            checks.fail("LocalStepsStrategy", "arguments", rule, got, TypeError)
        super().__init__(**{name: settings.pop(name) for name in strategy & settings.keys()})
        self._settings = settings
        self._stepped = False  # whether an optimizer stepped in this training step

    def configure_ddp(self) -> None:  # the averager replaces DDP
        if not is_alone(self.world_size):
            self.averager = DCTAverager(self.model, **self._settings)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._stepped = False
        output = super().training_step(*args, **kwargs)
        if self._stepped:  # manual optimization
            self._average()
        return output

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self._stepped = True
        if self.lightning_module.automatic_optimization:
            self._average()
        return output

    def _average(self) -> None:
        if self.averager is not None:
            self.averager.average_parameters()

    def on_train_end(self) -> None:
        if self.averager is not None:
            self.averager.flush()  # so that all ranks have the same weights

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if self.averager is None or "optimizer_states" not in checkpoint:  # only weights
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            checkpoint["averager"] = self.averager.state_dict()  # on every rank
            self.checkpoint_io.save_checkpoint(checkpoint, self._path(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> Any:
        own = self._path(checkpoint_path)
        path = own if os.path.exists(own) else checkpoint_path
        return super().load_checkpoint(path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:  # Lightning calls it only in fit
        super().load_optimizer_state_dict(checkpoint)
        if self.averager is None:
            return
        if "averager" in checkpoint:
            self.averager.load_state_dict(checkpoint["averager"])
        else:
            warn_not_saved("the checkpoint")

    def _path(self, filepath: Any) -> Any:
        return f"{filepath}.{self.global_rank}" if self.global_rank else filepath
