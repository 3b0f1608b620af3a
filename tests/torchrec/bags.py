"""Collections of bags on ranks, their inputs, and the rows that ranks receive."""

import torch
import torch.distributed as dist
from models import CPU, plan_of
from oracle import quantized_rows
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dct_embeddings.torchrec import compressed_sharders
from dct_parallel import RowFormat
from dct_parallel.formats import DTYPES

# (rows, width, pooling) of each table.
TABLES = ((40, 64, "SUM"), (7, 64, "SUM"), (90, 32, "MEAN"))
SUMS, MEANS = (tuple((n, width, kind) for n, width, _ in TABLES) for kind in ("SUM", "MEAN"))
SHARED = 32  # entries that share a scale


class Bags(nn.Module):
    def __init__(self, weighted=False, tables=TABLES, lr=1.0):
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t{i}",
                embedding_dim=width,
                num_embeddings=rows,
                feature_names=[f"f{i}"],
                pooling=PoolingType[pooling],
            )
            for i, (rows, width, pooling) in enumerate(tables)
        ]
        self.bags = EmbeddingBagCollection(configs, is_weighted=weighted, device="meta")
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters(), {"lr": lr})

    def forward(self, features):
        found = self.bags(features)
        keys = features.keys()
        return torch.cat([found[key] for key in keys], dim=1)


def on_ranks(shardings, sharders, tables=TABLES, local_size=None, **options):
    model, ranks = Bags(tables=tables, **options), dist.get_world_size()
    plan = plan_of(model.bags, shardings, sharders[0], ranks, local_size)
    dmp = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    fill_tables(dmp, initial_weights(tables))
    return dmp


def initial_weights(tables=TABLES):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(rows, width, generator=generator) for rows, width, _ in tables]


def local_shards_of(dmp):
    """Yields (number of the table, this rank's shard, the shard's slices of the table)."""
    for name, value in dmp.state_dict().items():
        table = int(name.split(".")[-2].removeprefix("t"))
        if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
            yield table, value, (slice(None), slice(None))
            continue
        for shard in value.local_shards():
            bounds = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            yield table, shard.tensor, tuple(slice(begin, begin + n) for begin, n in bounds)


def fill_tables(dmp, tables):
    with torch.no_grad():
        for table, shard, slices in local_shards_of(dmp):
            shard.copy_(tables[table][slices])


def make_inputs(seed, sizes, weighted=False, distinct=None, tables=TABLES):
    """For each rank and feature: (bags of (id, weight), number of the bag of each sample).

    Products with these weights are exact.
    """
    generator = torch.Generator().manual_seed(seed)

    def below(limit, *size):
        return torch.randint(limit, size, generator=generator).tolist()

    def bags(rows, count):
        return [
            [(i, 2.0 ** (below(3, 1)[0] - 1) if weighted else 1.0) for i in below(rows, length)]
            for length in below(6, count)
        ]

    result = []
    for rank, samples in enumerate(sizes):
        counts = distinct[rank] if distinct else [samples] * len(tables)
        part = [bags(rows, n) for (rows, _, _), n in zip(tables, counts, strict=True)]
        of_samples = [below(n, samples) if distinct else list(range(n)) for n in counts]
        result.append(list(zip(part, of_samples, strict=True)))
    return result


def to_features(part, weighted, distinct):
    """A rank's part of `make_inputs` as features of TorchRec."""
    flat = [pair for bags, _ in part for bag in bags for pair in bag]
    keys = [f"f{i}" for i in range(len(part))]
    options = {}
    if weighted:
        options["weights"] = torch.tensor([weight for _, weight in flat])
    if distinct:
        options["stride_per_key_per_rank"] = [[len(bags)] for bags, _ in part]
        options["inverse_indices"] = (keys, torch.tensor([of_samples for _, of_samples in part]))
    return KeyedJaggedTensor(
        keys,
        torch.tensor([i for i, _ in flat], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bags, _ in part for bag in bags], dtype=torch.int32),
        **options,
    )


def received_of(x, format):
    """The oracle for rows after an exchange in a number format."""
    if format in DTYPES:
        return x.to(DTYPES[format]).float()
    rows = x.reshape(-1, SHARED).numpy()
    coded = quantized_rows.row_quantize(rows, format)
    raw = quantized_rows.row_dequantize(coded, SHARED, format, "float32")
    return torch.from_numpy(raw.copy()).view(torch.float32).view(x.shape)


def sharders_of(formats):
    return compressed_sharders(format=RowFormat(*formats.split(", ")))
