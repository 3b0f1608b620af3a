"""Mixed precision: bfloat16 autocast and a GradScaler. A skipped step loses no residuals.

    torchrun --nproc-per-node 2 examples/amp.py

At step 5, the batch of rank 1 contains an infinity, so both ranks get non-finite gradients. Both
ranks skip the step and halve the scale, and the entries that were sent in that step return to the
residuals. Rank 0 prints the messages of a step. Each rank prints the skipped step and the sum of
its weights. All ranks print exactly the same sum.
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
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    state = DCTState(ddp, density=0.05, grad_scaler=scaler, optimizer=optimizer)
    ddp.register_comm_hook(state, dct_hook)

    if rank == 0:
        print(state.plan())
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
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    main()
