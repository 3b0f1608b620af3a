"""DCT in a PyTorch Lightning training: the strategy takes the state and the hook.

    torchrun --nproc-per-node 2 examples/recipes/with_lightning.py

Needs `pip install lightning`. The state is made before there is a DDP; a callback binds it.
Prints the loss of the first and the last step, and what was sent.
"""

import gc

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dct_parallel import DCTState, dct_hook


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
        return torch.optim.SGD(self.parameters(), lr=0.01)


class OnTheCPU(DDPStrategy):
    """Lightning registers hooks on CUDA alone. There, use DDPStrategy as it is."""

    def _register_ddp_hooks(self):
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


def train():
    lightning.seed_everything(0)
    x = torch.randn(6400, 128)
    data = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True).tanh()), batch_size=64)
    state = DCTState(density=0.01)
    bind = LambdaCallback(on_train_start=lambda trainer, _: state.bind(trainer.strategy.model))
    strategy = DDPStrategy if torch.cuda.is_available() else OnTheCPU
    trainer = lightning.Trainer(
        devices=2,
        max_epochs=4,
        strategy=strategy(ddp_comm_state=state, ddp_comm_hook=dct_hook),
        callbacks=[bind],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, data)
    if trainer.is_global_zero:
        stats = state.stats()
        print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f} in {stats['step']} steps")
        print(f"sent {stats['density']:.2%} of the entries, {stats['wire_bytes']:,} bytes a step")
    state.close()


def main():
    train()
    gc.collect()  # the model ends before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
