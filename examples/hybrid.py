"""A recommender in two halves: embedding tables sharded over the ranks, an MLP on all of them.

    torchrun --nproc-per-node 2 examples/hybrid.py

Of every embedding the 4 largest of 32 entries cross, and their gradients come back. Of the MLP's
gradients 1 % cross. Prints the loss and the bytes that rank 0 sends in a step, beside those of the
same exchange in float32.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, RowFormat, all_to_all_rows, dct_hook
from wire_meter import WireMeter

RANKS, IDS, WIDTH, BATCH = 2, 100, 32, 64  # one table a rank; samples a rank


def train(rank):
    torch.manual_seed(0)
    taste = torch.randn(IDS, RANKS)  # what there is to learn
    table = nn.Embedding(IDS, WIDTH)  # of the ids in column `rank`; the other rank has the other
    mlp = nn.Sequential(nn.Linear(RANKS * WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))
    ddp = DistributedDataParallel(mlp)
    state = DCTState(ddp, density=0.01)
    ddp.register_comm_hook(state, dct_hook)
    # Entries that did not cross get no gradient: tables want a higher learning rate.
    groups = [{"params": mlp.parameters()}, {"params": table.parameters(), "lr": 20.0}]
    optimizer = torch.optim.SGD(groups, lr=0.2)

    with WireMeter() as meter:
        for step in range(301):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(IDS, (RANKS * BATCH, RANKS), generator=generator)  # all ranks'
            pooled = table(ids[:, rank])  # for everybody's samples, [RANKS * BATCH, WIDTH]
            mine = all_to_all_rows(
                pooled, [BATCH] * RANKS, [BATCH] * RANKS, format=RowFormat(density=0.125)
            )
            features = mine.view(RANKS, BATCH, WIDTH).transpose(0, 1).flatten(1)
            clicked = (taste[ids, [0, 1]].sum(1) > 0).float()[rank * BATCH : (rank + 1) * BATCH]
            loss = nn.functional.binary_cross_entropy_with_logits(ddp(features)[:, 0], clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sent = meter.take()
            if rank == 0 and step % 100 == 0:
                print(f"step {step}: loss {loss.item():.3f}, {sent:,} bytes")
    if rank == 0:
        dense = 2 * BATCH * WIDTH * 4 + 4 * sum(p.numel() for p in mlp.parameters())
        print(f"float32: {dense:,} bytes")


def main():
    dist.init_process_group("gloo")
    train(dist.get_rank())
    gc.collect()  # the model ends before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    main()
