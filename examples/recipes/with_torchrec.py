"""Train with TorchRec and DCT: quantized rows with TorchRec's planner, and the DDP hook.

    torchrun --nproc-per-node 4 examples/recipes/with_torchrec.py

Needs torchrec and fbgemm-gpu; docs/guide/torchrec.md explains how to install them. Trains four
tables and an MLP. The largest table does not fit on one rank, so the planner shards it row-wise.
Prints the plan, the loss of the first and last steps, and the bytes that rank 0 sends per step.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dct_embeddings.torchrec import compress_dense, compressed_sharders
from dct_kernels import backend_of
from dct_parallel import RowFormat

ROWS, WIDTH, BATCH, STEPS = (4000, 100, 100, 100), 64, 64, 200
MEMORY = 2**20  # bytes per rank for tables and exchanges
FEATURES = [f"f{i}" for i in range(len(ROWS))]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t{i}", embedding_dim=WIDTH, num_embeddings=rows, feature_names=[feature]
            )
            for i, (rows, feature) in enumerate(zip(ROWS, FEATURES, strict=True))
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = nn.Sequential(nn.Linear(len(ROWS) * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features):
        return self.over(self.bags(features).values()).squeeze(1)


def batch(generator):
    """Make samples with one id per table. The label is 1 if the id of the first table is even."""
    ids = torch.stack([torch.randint(rows, (BATCH,), generator=generator) for rows in ROWS])
    lengths = torch.ones(ids.numel(), dtype=torch.int32)
    features = KeyedJaggedTensor.from_lengths_sync(FEATURES, ids.flatten(), lengths)
    return features, (ids[0] % 2 == 0).float()


def train():
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 200.0})
    # Embeddings use 4 bits per entry, and gradients 1 bit. 64 entries share a scale.
    sharders = compressed_sharders(format=RowFormat("int4", backward="sign"))
    topology = Topology(dist.get_world_size(), "cpu", ddr_cap=MEMORY)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    state = compress_dense(dmp, density=0.05)
    dense = [p for name, p in dmp.named_parameters() if "over" in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        features, labels = batch(generator)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(dmp(features), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"backend: {backend_of('cpu')}")
        for table, sharding in plan.plan["bags"].items():
            print(f"{table}: {sharding.sharding_type} on ranks {sharding.ranks}")
        first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
        print(f"loss {first:.3f} -> {last:.3f} in {STEPS} steps")
        stats = state.stats()
        sent, nbytes = stats["density"], stats["wire_bytes"]
        print(f"sent {sent:.2%} of the entries, {nbytes:,.0f} bytes per step")
    state.close()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
