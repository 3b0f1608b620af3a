"""Mixed precision: bfloat16 autocast, and a GradScaler that the hook's state knows.

    torchrun --nproc-per-node 2 examples/amp.py

Rank 1 meets an infinity at step 5. Both ranks see it in their gradients, both skip the step and
halve the scale, and what had been sent in that step goes back to the residuals. Every rank prints
the step that was skipped, and the sum of its weights, which is the same to the last digit.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, dct_hook


def train(rank):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = DCTState(ddp, density=0.05, grad_scaler=scaler)
    ddp.register_comm_hook(state, dct_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    for step in range(10):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        y = x.mean(1, keepdim=True)
        if (step, rank) == (5, 1):
            y[0] = torch.inf
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (ddp(x) - y).square().mean()
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() != before:
            print(f"rank {rank}, step {step}: skipped, scale {before} -> {scaler.get_scale()}")

    total = sum(parameter.double().sum().item() for parameter in ddp.parameters())
    print(f"rank {rank}: weights {total!r}")


def main():
    dist.init_process_group("gloo")
    train(dist.get_rank())
    gc.collect()  # the model ends before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    main()
