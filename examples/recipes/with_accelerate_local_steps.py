"""Local steps in a Hugging Face Accelerate training: the model is prepared without a DDP.

    torchrun --nproc-per-node 2 examples/recipes/with_accelerate_local_steps.py FOLDER

Needs `pip install accelerate`. Ranks train on their own, and average what their weights changed by
every 20th step. Saves after every epoch; the same command again goes on from the last one in
FOLDER, bit for bit. Prints the loss of the first and the last step, what was sent, and the sum of
each rank's weights.
"""

import glob
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dct_parallel import DCTAverager

EPOCHS = 3


def train(folder):
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    x = torch.randn(6400, 128)
    data = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True).tanh()), batch_size=64)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    # Device and autocast as in training, and no DDP: that is what the argument is for.
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, data = accelerator.prepare(optimizer, data)
    accelerator.register_for_checkpointing(rate)

    averager = DCTAverager(model, period=20)

    # Accelerate saves what rank 0 holds. Here ranks differ in all of this, so each adds a file.
    parts = {"model": model, "optimizer": optimizer, "averager": averager}
    own = f"local{accelerator.process_index}.pt"
    done = len(glob.glob(f"{folder}/epoch*/{own}"))
    if done:
        accelerator.load_state(f"{folder}/epoch{done}")
        saved = torch.load(f"{folder}/epoch{done}/{own}", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    losses = []
    for epoch in range(done, EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            averager.average_parameters()
            losses.append(loss.item())
        rate.step()
        accelerator.save_state(f"{folder}/epoch{epoch + 1}")
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save(saved, f"{folder}/epoch{epoch + 1}/{own}")
    averager.flush()  # all ranks have the same weights

    if accelerator.is_main_process:
        stats = averager.stats()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {stats['step']} steps")
        print(f"sent {stats['wire_bytes']:,} bytes every {averager.period} steps")
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {accelerator.process_index}: weights {total!r}")


def main(folder):
    train(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
