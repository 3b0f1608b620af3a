"""DCT in a TorchRec training: rows in few bits, and the hook on the dense part.

    torchrun --nproc-per-node 2 examples/recipes/with_torchrec.py

Needs torchrec and fbgemm-gpu (docs/guide/torchrec.md says how to install them). Trains four tables,
each on one rank, and an MLP on both. Prints the loss of the first steps and of the last, and what
a rank sent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dct_embeddings.torchrec import compress_dense, qcomm_codecs
from dct_parallel import RowFormat

TABLES, ROWS, WIDTH, BATCH, STEPS = 4, 100, 64, 64, 200
FEATURES = [f"f{i}" for i in range(TABLES)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t{i}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[feature]
            )
            for i, feature in enumerate(FEATURES)
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = nn.Sequential(nn.Linear(TABLES * WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, features):
        return self.over(self.bags(features).values()).squeeze(1)


def batch(generator):
    """An id of each table for every sample; the label is whether that of the first is even."""
    ids = torch.randint(ROWS, (TABLES, BATCH), generator=generator)
    lengths = torch.ones(TABLES * BATCH, dtype=torch.int32)
    features = KeyedJaggedTensor.from_lengths_sync(FEATURES, ids.flatten(), lengths)
    return features, (ids[0] % 2 == 0).float()


def train():
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 20.0})
    # Embeddings in 4 bits an entry and their gradients in one, with a scale for each 64.
    format = RowFormat("int4", backward="sign")
    sharder = EmbeddingBagCollectionSharder(
        qcomm_codecs_registry=qcomm_codecs(WIDTH, format=format)
    )
    own = construct_module_sharding_plan(
        model.bags,
        {f"t{i}": table_wise(rank=i % 2) for i in range(TABLES)},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan={"bags": own}), sharders=[sharder]
    )
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
        first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
        print(f"loss {first:.3f} -> {last:.3f} in {STEPS} steps")
        stats = state.stats()
        print(
            f"sent {stats['density']:.2%} of the entries, {stats['wire_bytes']:,.0f} bytes a step"
        )
    state.close()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
