"""Train with PyTorch Lightning and DCT: int4 gradients on every step, or local steps.

    torchrun --nproc-per-node 2 examples/recipes/with_lightning.py FOLDER
    torchrun --nproc-per-node 2 examples/recipes/with_lightning.py FOLDER --local-steps

Needs `pip install lightning`. By default, a callback registers the hook on the DDP module. With
--local-steps, a strategy without DDP averages the changes of the ranks' weights every 20 steps. The
program saves after every epoch. The same command resumes from the last epoch in FOLDER, with
bitwise equal results. It prints the loss of the first and the last step, the bytes that were sent,
and the sum of each rank's weights.
"""

import argparse
import gc
import glob
import os
import sys

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dct_parallel import DCTAverager, DCTState, dct_hook

EPOCHS = 3
PERIOD = 20


class Hook(Callback):
    """Registers the hook. Each rank saves its residuals next to Lightning's checkpoint."""

    def on_train_start(self, trainer, module):
        ddp = trainer.strategy.model
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # with "16-mixed"
        scaled = {"grad_scaler": scaler, "optimizer": trainer.optimizers}
        self.state = DCTState(ddp, format="int4", **scaled)
        ddp.register_comm_hook(self.state, dct_hook)
        if trainer.ckpt_path:
            self.state.load_state_dict(torch.load(self.path(trainer), weights_only=True))

    def on_save_checkpoint(self, trainer, module, checkpoint):  # on every rank
        torch.save(self.state.state_dict(), self.path(trainer))

    def on_train_end(self, trainer, module):
        self.state.close()

    def path(self, trainer):
        return f"{trainer.default_root_dir}/step{trainer.global_step}-dct{trainer.global_rank}.pt"


class LocalSteps(DDPStrategy):
    """Like DDP, but without the gradient exchange. Each rank saves a checkpoint."""

    restore_checkpoint_after_setup = True  # a new averager sets all weights to those of rank 0

    def configure_ddp(self):
        self.averager = DCTAverager(self.model, period=PERIOD)

    def optimizer_step(self, *args, **kwargs):
        output = super().optimizer_step(*args, **kwargs)
        self.averager.average_parameters()
        return output

    def on_train_end(self):
        self.averager.flush()  # now all ranks have the same weights

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):  # on every rank
        checkpoint["averager"] = self.averager.state_dict()
        self.checkpoint_io.save_checkpoint(checkpoint, self.rank_path(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        return super().load_checkpoint(self.rank_path(checkpoint_path), weights_only)

    def load_optimizer_state_dict(self, checkpoint):  # only in fit
        super().load_optimizer_state_dict(checkpoint)
        self.averager.load_state_dict(checkpoint["averager"])

    def rank_path(self, filepath):
        return f"{filepath}.{self.global_rank}" if self.global_rank else filepath


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = (self.layers(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.002)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)]


def train(folder, local_steps):
    lightning.seed_everything(0)
    os.makedirs(folder, exist_ok=True)
    x = torch.randn(6400, 128)
    data = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True).tanh()), batch_size=64)
    hook = Hook()
    checkpoints = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        devices=2,
        max_epochs=EPOCHS,
        strategy=LocalSteps() if local_steps else "ddp",
        callbacks=[checkpoints] if local_steps else [hook, checkpoints],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    saved = glob.glob(f"{folder}/*.ckpt")
    trainer.fit(model, data, ckpt_path=max(saved, key=os.path.getmtime) if saved else None)
    if trainer.is_global_zero:
        stats = trainer.strategy.averager.stats() if local_steps else hook.state.stats()
        print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}, {stats['step']} steps")
        interval = f"every {PERIOD} steps" if local_steps else "per step"
        print(f"sent {stats['wire_bytes']:,} bytes {interval}")
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {trainer.global_rank}: weights {total!r}")


def main(folder, local_steps):
    train(folder, local_steps)
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--local-steps", action="store_true")
    main(**vars(parser.parse_args()))
