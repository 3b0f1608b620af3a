"""Local steps in a PyTorch Lightning training: a strategy that leaves DDP away, and averages.

    torchrun --nproc-per-node 2 examples/recipes/with_lightning_local_steps.py FOLDER

Needs `pip install lightning`. Ranks train on their own, and average what their weights changed by
every 20th step. Saves after every epoch; the same command again goes on from the last one in
FOLDER, bit for bit. Prints the loss of the first and the last step, what was sent, and the sum of
each rank's weights.
"""

import glob
import os
import sys

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dct_parallel import DCTAverager


class LocalSteps(DDPStrategy):
    """DDP's ranks and samplers without its exchange. Checkpoints are a file per rank."""

    restore_checkpoint_after_setup = True  # a new averager sets all weights to those of rank 0

    def configure_ddp(self):
        self.averager = DCTAverager(self.model, period=20)

    def optimizer_step(self, *args, **kwargs):
        output = super().optimizer_step(*args, **kwargs)
        self.averager.average_parameters()
        return output

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):  # on every rank
        checkpoint["averager"] = self.averager.state_dict()
        self.checkpoint_io.save_checkpoint(checkpoint, self.own(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        return super().load_checkpoint(self.own(checkpoint_path), weights_only)

    def load_optimizer_state_dict(self, checkpoint):  # in fit alone
        super().load_optimizer_state_dict(checkpoint)
        self.averager.load_state_dict(checkpoint["averager"])

    def own(self, filepath):
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
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)]


def train(folder):
    lightning.seed_everything(0)
    x = torch.randn(6400, 128)
    data = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True).tanh()), batch_size=64)
    flush = LambdaCallback(on_train_end=lambda trainer, _: trainer.strategy.averager.flush())
    trainer = lightning.Trainer(
        devices=2,
        max_epochs=3,
        strategy=LocalSteps(),
        callbacks=[flush, ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    saved = glob.glob(f"{folder}/*.ckpt")
    trainer.fit(model, data, ckpt_path=max(saved, key=os.path.getmtime) if saved else None)
    if trainer.is_global_zero:
        averager = trainer.strategy.averager
        stats = averager.stats()
        print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}, {stats['step']} steps")
        print(f"sent {stats['wire_bytes']:,} bytes every {averager.period} steps")
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {trainer.global_rank}: weights {total!r}")


def main(folder):
    train(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
