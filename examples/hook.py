"""Data parallel: two ranks train one model, and each rank sends 0.5 % of its gradient entries.

    torchrun --nproc-per-node 2 examples/hook.py

Prints the messages of each bucket, and the loss, which decreases as with DDP without a hook. Then
prints the fraction of entries that were sent, and the bytes that a rank sends per step.
"""

import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, dct_hook


def batch(step, rank):
    """Make the samples of a regression task, which differ by rank and step."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    x = torch.randn(64, 128, generator=generator)
    return x, x[:, :8].sum(1, keepdim=True).tanh()


def train(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
    ddp = DistributedDataParallel(model)
    state = DCTState(ddp, density=0.005)
    ddp.register_comm_hook(state, dct_hook)  # the rest is an ordinary training loop
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    if rank == 0:
        print(state.plan())
    for step in range(301):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = (ddp(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if rank == 0:
        stats = state.stats()
        print(f"sent {stats['density']:.2%} of the entries, {stats['wire_bytes']:,} bytes per step")


def main():
    # If a rank is missing, the other ranks raise an error after 5 minutes (gloo's default: 30).
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    train(dist.get_rank())
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    main()
