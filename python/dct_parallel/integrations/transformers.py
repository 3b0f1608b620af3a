"""Callbacks for the HF Trainer (docs/guide/recipes.md). They save one file per rank."""

from abc import ABC, abstractmethod
from typing import Any

from transformers import TrainerCallback

from .. import DCTAverager
from .common import HookCallback, is_alone, load_parts, save_parts


class _RankFiles(TrainerCallback, ABC):
    """Saves and loads the state that differs between ranks, in one file per rank."""

    def __init__(self, trainer: Any, **settings: Any) -> None:
        self._trainer, self._settings = trainer, settings
        self._parts: dict[str, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._parts = {} if is_alone(self._trainer.args.world_size) else self._begin()
        if self._parts and self._trainer.state.global_step:  # the Trainer resumes
            load_parts(self._path(), **self._parts)

    @abstractmethod
    def _begin(self) -> dict[str, Any]:
        """Start the compression. Return {name: an object with a state that differs by rank}."""

    def on_save(self, *_: Any, **__: Any) -> None:  # on every rank
        if self._parts:
            save_parts(self._path(), **self._parts)

    def _path(self) -> str:
        trainer = self._trainer
        folder = trainer._get_output_dir(trial=trainer._trial)  # a search has a folder per trial
        return f"{folder}/checkpoint-{trainer.state.global_step}/dct{trainer.args.process_index}.pt"


class DCTCallback(HookCallback, _RankFiles):
    """Registers `dct_hook` on the DDP that the HF Trainer creates. `state` is the `DCTState`.

    With one process, the callback does nothing, and `state` is None.

    Args:
        trainer: the Trainer, with `ddp_find_unused_parameters=False`.
        settings: arguments of `DCTState`. The callback adds the GradScaler and the optimizer.
    """

    def _begin(self) -> dict[str, Any]:
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        optimizer = trainer.optimizer.optimizer  # inside the wrapper of Accelerate
        settings = {"grad_scaler": scaler, "optimizer": optimizer, **self._settings}
        return {"hook": self._register(trainer.model_wrapped, **settings)}

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._log_once(self._trainer.model)


class LocalStepsCallback(_RankFiles):
    """Averages the HF Trainer's weights every few steps. `averager` is the `DCTAverager`.

    With one process, the callback does nothing, and `averager` is None.

    Args:
        trainer: the Trainer, with `average_tokens_across_devices=False`. During training its DDP
            exchanges no gradients, but DDP's buckets still use memory.
        settings: arguments of `DCTAverager`, such as `period`.
    """

    averager: DCTAverager | None = None

    def _begin(self) -> dict[str, Any]:
        trainer = self._trainer
        self.averager = DCTAverager(trainer.model, **self._settings)
        # The Trainer may compile the DDP, and creates none if it has evaluated before.
        self._ddp = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
        self._ddp.require_backward_grad_sync = False  # as in DDP.no_sync
        parts = {"model": trainer.model, "optimizer": trainer.optimizer}
        return {**parts, "averager": self.averager}

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.averager is not None:
            self.averager.average_parameters()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.averager is not None:
            self._ddp.require_backward_grad_sync = True
            self.averager.flush()  # trainer.save_model() requires equal weights on all ranks
