"""A layer split by columns: each rank computes a part of the features, then gathers all features.

    torchrun --nproc-per-node 2 examples/columns.py

Activations and their gradients are sent in int8. Prints the loss, the bytes that rank 0 sends per
step, and the bytes that rank 0 would send in float32.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from dct_kernels import backend_of
from dct_parallel import all_gather_rows
from wire_meter import WireMeter

INPUTS, HIDDEN, BATCH = 32, 256, 64


def train(rank, ranks):
    torch.manual_seed(0)
    teacher = torch.randn(INPUTS, 1) / INPUTS**0.5  # the model learns |x @ teacher|
    head = nn.Sequential(nn.ReLU(), nn.Linear(HIDDEN, 1))  # equal on all ranks
    part = nn.Linear(INPUTS, HIDDEN // ranks)
    nn.init.normal_(part.weight, std=0.2, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.Adam([*part.parameters(), *head.parameters()], lr=2e-3)
    widths = [HIDDEN // ranks] * ranks
    if rank == 0:
        print(f"backend: {backend_of('cpu')}")
    with WireMeter() as meter:
        for step in range(301):
            x = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(step))
            whole = all_gather_rows(part(x), widths, format="int8")
            loss = (head(whole) - (x @ teacher).abs()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in part.parameters():  # sums over the ranks' equal losses
                parameter.grad /= ranks
            optimizer.step()
            sent = meter.take()
            if rank == 0 and step % 100 == 0:
                print(f"step {step}: loss {loss.item():.3f}, {sent:,} bytes")
    if rank == 0:
        print(f"float32: {2 * BATCH * widths[rank] * 4 * (ranks - 1):,} bytes")
    print(f"rank {rank}: head {head[1].weight.sum().item():.6f}")


def main():
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    main()
