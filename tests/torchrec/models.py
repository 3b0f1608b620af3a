"""A TorchRec model with four tables, its batches, and its training on ranks."""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

TABLES, ROWS, WIDTH, BATCH, BAG, STEPS = 4, 300, 64, 16, 2, 8
CPU = torch.device("cpu")


class Model(nn.Module):
    """A model with pooled bags. With `pooled=False`, it sums the rows itself."""

    def __init__(self, optimizer, lr, pooled=True):
        super().__init__()
        self.pooled = pooled
        config, collection = EmbeddingBagConfig, EmbeddingBagCollection
        if not pooled:
            config, collection = EmbeddingConfig, EmbeddingCollection
        tables = [
            config(name=f"t{i}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[f"f{i}"])
            for i in range(TABLES)
        ]
        self.bags = collection(device=torch.device("meta"), tables=tables)
        self.over = nn.Sequential(nn.Linear(TABLES * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
        apply_optimizer_in_backward(optimizer, self.bags.parameters(), {"lr": lr})

    def forward(self, features):
        found = self.bags(features)
        if self.pooled:
            return self.over(found.values()).squeeze(1)
        rows = [found[f"f{i}"].values().view(-1, BAG, WIDTH).sum(1) for i in range(TABLES)]
        return self.over(torch.cat(rows, dim=1)).squeeze(1)


def prepare(local_size=None):
    """Ignore TorchRec's warnings, and set the variables of torchrun that it reads."""
    warnings.simplefilter("ignore")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local_size = local_size or ranks
    os.environ.update(LOCAL_WORLD_SIZE=str(local_size), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_RANK=str(rank % local_size))


def plan_of(bags, shardings, sharder, ranks, local_size=None):
    """A ShardingPlan of a model whose only collection is `bags`, with `shardings` by table."""
    plan = construct_module_sharding_plan(
        bags,
        shardings,
        sharder=sharder,
        local_size=local_size or ranks,
        world_size=ranks,
        device_type="cpu",
    )
    return ShardingPlan(plan={"bags": plan})


def parallel(sharders=None, sharding=lambda i: table_wise(rank=i % 2), pooled=True, **settings):
    """The model on the ranks, by default with TorchRec's own sharders."""
    torch.manual_seed(0)
    model = Model(torch.optim.SGD, 1.0, pooled)
    sharders = sharders or [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    shardings = {f"t{i}": sharding(i) for i in range(TABLES)}
    plan = plan_of(model.bags, shardings, sharders[not pooled], dist.get_world_size())
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders, **settings)


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=[f"f{i}" for i in range(TABLES)],
        values=torch.randint(ROWS, (TABLES * BATCH * BAG,), generator=generator),
        lengths=torch.full((TABLES * BATCH,), BAG, dtype=torch.int32),
    )
    return features, (features.values().view(TABLES, BATCH, BAG)[0, :, 0] % 2).float()


def train(dmp, steps=STEPS, after=lambda step: None):
    """The loss of each step."""
    optimizer = torch.optim.SGD([p for n, p in dmp.named_parameters() if "over" in n], lr=0.1)
    losses = []
    for step in range(steps):
        features, labels = batch(step)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(dmp(features), labels)
        loss.backward()
        optimizer.step()
        after(step)
        losses.append(loss.item())
    return losses
