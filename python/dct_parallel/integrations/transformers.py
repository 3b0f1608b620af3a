"""Callbacks for the HF Trainer (docs/guide/recipes.md). They save one file per rank."""

from typing import Any

import torch
from transformers import TrainerCallback

from .. import DCTAverager, DCTState, dct_hook


class _RankFiles(TrainerCallback):
    """Saves and loads the state that differs between ranks, in one file per rank."""

    def __init__(self, trainer: Any, **settings: Any) -> None:
        self._trainer, self._settings = trainer, settings

    def _begin(self, **parts: Any) -> None:
        self._parts = parts
        if self._trainer.state.global_step:  # the Trainer resumes
            saved = torch.load(self._path(), weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])

    def on_save(self, *_: Any, **__: Any) -> None:  # on every rank
        torch.save({name: part.state_dict() for name, part in self._parts.items()}, self._path())

    def _path(self) -> str:
        args, step = self._trainer.args, self._trainer.state.global_step
        return f"{args.output_dir}/checkpoint-{step}/dct{args.process_index}.pt"


class DCTCallback(_RankFiles):
    """Registers `dct_hook` on the DDP that the HF Trainer creates. `state` is the `DCTState`.

    Args:
        trainer: the Trainer, with `ddp_find_unused_parameters=False`.
        settings: arguments of `DCTState`. The callback adds the GradScaler and the optimizer.
    """

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        ddp, scaler = self._trainer.model_wrapped, self._trainer.accelerator.scaler
        optimizer = self._trainer.optimizer.optimizer  # inside the wrapper of Accelerate
        self.state = DCTState(ddp, grad_scaler=scaler, optimizer=optimizer, **self._settings)
        ddp.register_comm_hook(self.state, dct_hook)
        self._begin(hook=self.state)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.state.close()


class LocalStepsCallback(_RankFiles):
    """Averages the HF Trainer's weights every few steps. `averager` is the `DCTAverager`.

    Args:
        trainer: the Trainer, with `average_tokens_across_devices=False`. During training its DDP
            exchanges no gradients, but DDP's buckets still use memory.
        settings: arguments of `DCTAverager`, such as `period`.
    """

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        model, optimizer = self._trainer.model, self._trainer.optimizer
        self.averager = DCTAverager(model, **self._settings)
        self._begin(model=model, optimizer=optimizer, averager=self.averager)
        self._no_sync = self._trainer.model_wrapped.no_sync()
        self._no_sync.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.averager.average_parameters()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._no_sync.__exit__(None, None, None)
        self.averager.flush()  # trainer.save_model() requires equal weights on all ranks
