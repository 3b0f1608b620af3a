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
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dct_parallel.integrations.lightning import DCTCallback, LocalStepsStrategy

EPOCHS = 3
PERIOD = 20


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
    hook = DCTCallback(format="int4")
    checkpoints = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        devices=2,
        max_epochs=EPOCHS,
        strategy=LocalStepsStrategy(period=PERIOD) if local_steps else "ddp",
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
        dct = trainer.strategy.averager if local_steps else hook.state
        stats = dct.stats()
        print(dct.plan())
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
