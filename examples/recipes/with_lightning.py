"""DCT in a PyTorch Lightning training: a callback registers the hook with the strategy's DDP.

    torchrun --nproc-per-node 2 examples/recipes/with_lightning.py FOLDER

Needs `pip install lightning`. Saves after every epoch; the same command again goes on from the last
one in FOLDER, bit for bit. Prints the loss of the first and the last step, what was sent,
and the sum of each rank's weights.
"""

import gc
import glob
import os
import sys

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dct_parallel import DCTState, dct_hook


class DCT(Callback):
    """The hook, and its residuals in a file per rank beside each checkpoint of Lightning's."""

    def on_train_start(self, trainer, module):
        ddp = trainer.strategy.model
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of "16-mixed"
        self.state = DCTState(ddp, format="int4", grad_scaler=scaler)
        ddp.register_comm_hook(self.state, dct_hook)
        if trainer.ckpt_path:
            self.state.load_state_dict(torch.load(self.path(trainer), weights_only=True))

    def on_save_checkpoint(self, trainer, module, checkpoint):  # on every rank
        torch.save(self.state.state_dict(), self.path(trainer))

    def on_train_end(self, trainer, module):
        self.state.close()

    def path(self, trainer):
        return f"{trainer.default_root_dir}/step{trainer.global_step}-dct{trainer.global_rank}.pt"


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
        self.losses = []

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = (self(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.002)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


def train(folder):
    lightning.seed_everything(0)
    os.makedirs(folder, exist_ok=True)
    x = torch.randn(6400, 128)
    data = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True).tanh()), batch_size=64)
    dct = DCT()
    trainer = lightning.Trainer(
        devices=2,
        max_epochs=4,
        strategy="ddp",
        callbacks=[dct, ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    saved = glob.glob(f"{folder}/*.ckpt")
    trainer.fit(model, data, ckpt_path=max(saved, key=os.path.getmtime) if saved else None)
    if trainer.is_global_zero:
        stats = dct.state.stats()
        print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}, {stats['step']} steps")
        print(f"sent {stats['wire_bytes']:,} bytes a step")
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {trainer.global_rank}: weights {total!r}")


def main(folder):
    train(folder)
    gc.collect()  # the model ends before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
