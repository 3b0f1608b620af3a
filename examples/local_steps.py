"""Local SGD: two ranks train independently with AdamW, and average the changes of their weights.

    torchrun --nproc-per-node 2 examples/local_steps.py

Weights are bfloat16. The ranks average every 10 steps. Prints the messages of an averaging, the
decreasing loss, and the fraction of entries that were sent. Then each rank prints the sum of its
weights. All sums are equal.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from dct_parallel import DCTAverager


def batch(step, rank):
    """Make the samples of a regression task, which differ by rank and step."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2 * step + rank))
    return x, x[:, :8].sum(1, keepdim=True).tanh()


def train(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1)).bfloat16()
    averager = DCTAverager(model, period=10)  # no DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

    if rank == 0:
        print(averager.plan())
    for step in range(301):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = (model(x.bfloat16()).float() - y).square().mean()
        loss.backward()
        optimizer.step()
        averager.average_parameters()
        if rank == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    averager.flush()  # averages the remaining steps and all residuals
    if rank == 0:
        stats = averager.stats()
        sent, nbytes = stats["density"], stats["wire_bytes"]
        print(f"sent {sent:.1%} of the entries, {nbytes:,} bytes per averaging")
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {rank}: weights {total:.6f}")


def main():
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    main()
