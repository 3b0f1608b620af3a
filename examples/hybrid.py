"""A hybrid-parallel recommender: embedding tables sharded over the ranks, an MLP on all ranks.

    torchrun --nproc-per-node 2 examples/hybrid.py

Ranks send the 4 largest of the 32 entries of each embedding, and receive the gradients of these
entries. They also send 1 % of the MLP's gradient entries. Prints the loss, the bytes that rank 0
sends per step, and the bytes that rank 0 would send per step in float32.
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

RANKS, IDS, WIDTH, BATCH = 2, 100, 32, 64  # one table and 64 samples per rank


def train(rank):
    torch.manual_seed(0)
    taste = torch.randn(IDS, RANKS)  # determines the labels
    table = nn.Embedding(IDS, WIDTH)  # embeds the ids in column `rank`
    mlp = nn.Sequential(nn.Linear(RANKS * WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))
    ddp = DistributedDataParallel(mlp)
    state = DCTState(ddp, density=0.01)
    ddp.register_comm_hook(state, dct_hook)
    # Tables need a higher learning rate, because entries that were not sent get no gradient.
    groups = [{"params": mlp.parameters()}, {"params": table.parameters(), "lr": 20.0}]
    optimizer = torch.optim.SGD(groups, lr=0.2)

    if rank == 0:
        print(state.plan())
    with WireMeter() as meter:
        for step in range(301):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(IDS, (RANKS * BATCH, RANKS), generator=generator)  # all ranks
            pooled = table(ids[:, rank])  # for the samples of all ranks: [RANKS * BATCH, WIDTH]
            received = all_to_all_rows(
                pooled, [BATCH] * RANKS, [BATCH] * RANKS, format=RowFormat(density=0.125)
            )
            features = received.view(RANKS, BATCH, WIDTH).transpose(0, 1).flatten(1)
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
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    main()
