"""Exchanges of embeddings in few bits, under every plan, beside TorchRec itself (make torchrec)."""

import itertools
import math
import os

import pytest
import torch
import torch.distributed as dist
from oracle import quantized_rows
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ranks import run_ranks, set_timeout

pytest.importorskip("fbgemm_gpu", reason="TorchRec is in the environment of make torchrec")

from models import BAG, BATCH, CPU, ROWS, batch, parallel, plan_of, prepare, train
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import (
    column_wise,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dct_embeddings.torchrec import compressed_sharders
from dct_parallel import RowFormat
from dct_parallel.formats import DTYPES
from dct_parallel.rows import reduce_scatter
from wire_meter import WireMeter

# Rows, widths and pooling of each table.
TABLES = ((40, 64, "SUM"), (7, 64, "SUM"), (90, 32, "MEAN"))
SUMS, MEANS = (tuple((n, width, kind) for n, width, _ in TABLES) for kind in ("SUM", "MEAN"))
SHARED = 32  # entries that share a scale
EPS = 1e-6  # that TorchRec adds to the lengths by which it divides, for sums to 1


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
        return torch.cat([found[key] for key in features.keys()], dim=1)


def _sharded(shardings, sharders, tables=TABLES, local_size=None, **options):
    model, ranks = Bags(tables=tables, **options), dist.get_world_size()
    plan = plan_of(model.bags, shardings, sharders[0], ranks, local_size)
    dmp = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    _fill(dmp, _weights(tables))
    return dmp


def _weights(tables=TABLES):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(rows, width, generator=generator) for rows, width, _ in tables]


def _shards(dmp):
    """(number of the table, this rank's shard of it, the slices of the table that it is)."""
    for name, value in dmp.state_dict().items():
        table = int(name.split(".")[-2].removeprefix("t"))
        if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
            yield table, value, (slice(None), slice(None))
            continue
        for shard in value.local_shards():
            bounds = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            yield table, shard.tensor, tuple(slice(begin, begin + n) for begin, n in bounds)


def _fill(dmp, tables):
    with torch.no_grad():
        for table, shard, slices in _shards(dmp):
            shard.copy_(tables[table][slices])


def _inputs(seed, sizes, weighted=False, distinct=None, tables=TABLES):
    """For each rank and feature: bags of at most two (id, weight), and the bag of each sample.

    Sums of two rows are exact in any order, and so are products with these weights.
    """
    generator = torch.Generator().manual_seed(seed)

    def below(limit, *size):
        return torch.randint(limit, size, generator=generator).tolist()

    def bags(rows, count):
        return [
            [(i, 2.0 ** (below(3, 1)[0] - 1) if weighted else 1.0) for i in below(rows, length)]
            for length in below(3, count)
        ]

    result = []
    for rank, samples in enumerate(sizes):
        counts = distinct[rank] if distinct else [samples] * len(tables)
        own = [bags(rows, n) for (rows, _, _), n in zip(tables, counts, strict=True)]
        of_samples = [below(n, samples) if distinct else list(range(n)) for n in counts]
        result.append(list(zip(own, of_samples, strict=True)))
    return result


def _features(own, weighted, distinct):
    """A rank's part of `_inputs` as TorchRec has it."""
    flat = [pair for bags, _ in own for bag in bags for pair in bag]
    keys = [f"f{i}" for i in range(len(own))]
    options = {}
    if weighted:
        options["weights"] = torch.tensor([weight for _, weight in flat])
    if distinct:
        options["stride_per_key_per_rank"] = [[len(bags)] for bags, _ in own]
        options["inverse_indices"] = (keys, torch.tensor([of_samples for _, of_samples in own]))
    return KeyedJaggedTensor(
        keys,
        torch.tensor([i for i, _ in flat], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bags, _ in own for bag in bags], dtype=torch.int32),
        **options,
    )


def _sent(x, format):
    """What arrives of rows in a number format, by the oracle."""
    if format in DTYPES:
        return x.to(DTYPES[format]).float()
    rows = x.reshape(-1, SHARED).numpy()
    coded = quantized_rows.row_quantize(rows, format)
    raw = quantized_rows.row_dequantize(coded, SHARED, format, "float32")
    return torch.from_numpy(raw.copy()).view(torch.float32).view(x.shape)


def _expected(inputs, grads, forward, backward, tables):
    """What a row-wise collection returns on each rank, and its tables after a step of rate 1."""
    ranks, weights = len(inputs), _weights(tables)
    outputs, after = [[] for _ in inputs], [table.double() for table in weights]
    begins = list(itertools.accumulate((width for _, width, _ in tables), initial=0))
    for rank, of_rank in enumerate(inputs):
        for t, (bags, of_samples) in enumerate(of_rank):
            rows, width, pooling = tables[t]
            block = math.ceil(rows / ranks)
            parts = torch.zeros(ranks, len(bags), width)
            for number, bag in enumerate(bags):
                for i, weight in bag:
                    parts[i // block, number] += weight * weights[t][i]
            pooled, *others = [_sent(part, forward) for part in parts]
            for other in others:
                pooled = pooled + other
            found, grad = pooled[of_samples], grads[rank][:, begins[t] : begins[t + 1]]
            weight_of = {"MEAN": lambda bag: sum(weight for _, weight in bag), "SUM": lambda bag: 1}
            lengths = torch.tensor([float(weight_of[pooling](bag)) for bag in bags])
            if any(pooling == "MEAN" for *_, pooling in tables):
                divisor = lengths.view(-1, 1)[of_samples] + EPS
                found, grad = found / divisor, grad / divisor
            outputs[rank].append(found)
            of_bags = torch.zeros(len(bags), width).index_add(
                0, torch.tensor(of_samples).int(), grad
            )
            for bag, row in zip(bags, _sent(of_bags, backward), strict=True):
                for i, weight in bag:
                    after[t][i] -= weight * row.double() / ranks
    return [torch.cat(found, 1) for found in outputs], after


FORMATS = [
    ("float32", "float32"),
    ("int8", "bfloat16"),
    ("int4", "ternary"),
    ("int4", "sign"),
    ("sign", "int4"),
]
# Tables, and samples of each rank: even, uneven; and none, of which TorchRec takes no means.
CASES = {
    2: [(TABLES, (6, 6)), (TABLES, (1, 4)), (SUMS, (5, 0)), (SUMS, (0, 0))],
    4: [(TABLES, (3, 3, 3, 3)), (TABLES, (1, 4, 2, 3)), (SUMS, (0, 5, 1, 2)), (SUMS, (0, 0, 0, 0))],
}
# The same, and the distinct bags of each feature, where features have batches of different sizes.
# FBGEMM on the CPU then takes tables of one kind.
VARYING = {
    2: [(SUMS, (5, 6), [(2, 3, 1), (4, 1, 3)]), (MEANS, (6, 3), [(1, 3, 2), (4, 2, 3)])],
    4: [
        (SUMS, (5, 6, 3, 4), [(2, 3, 1), (1, 1, 1), (4, 1, 2), (3, 2, 2)]),
        (MEANS, (3, 3, 3, 3), [(1, 2, 3), (1, 1, 1), (3, 1, 2), (2, 2, 2)]),
    ],
}


def _row_wise(rank, forward, backward, weighted, varying):
    prepare()
    cases = (VARYING if varying else CASES)[dist.get_world_size()]
    sharders = compressed_sharders(format=RowFormat(forward, backward=backward))
    shardings = {f"t{i}": row_wise() for i in range(len(TABLES))}
    for seed, (tables, sizes, *distinct) in enumerate(cases):
        dmp = _sharded(shardings, sharders, tables, weighted=weighted)
        inputs = _inputs(seed, sizes, weighted, *distinct)
        generator = torch.Generator().manual_seed(seed)
        # Whole numbers, so that their sums are exact.
        grads = [torch.randint(-9, 10, (n, 160), generator=generator).float() for n in sizes]
        expected, after = _expected(inputs, grads, forward, backward, tables)
        found = dmp(_features(inputs[rank], weighted, varying))
        torch.testing.assert_close(found, expected[rank], rtol=0, atol=0)
        found.backward(grads[rank])
        for table, shard, slices in _shards(dmp):
            torch.testing.assert_close(shard.double(), after[table][slices], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("formats", "weighted", "varying"),
    [(pair, False, False) for pair in FORMATS]
    + [(("float32", "float32"), False, True), (("int4", "sign"), False, True)]
    + [(("int4", "sign"), True, False)],
)
def test_row_wise_tables(ranks, formats, weighted, varying):
    run_ranks(_row_wise, ranks, *formats, weighted, varying, timeout=300)


def _without_rows(rank):
    """The last rank has none of a table. FBGEMM on the CPU has no backward pass of that."""
    prepare()
    tables, sizes = ((40, 64, "SUM"), (3, 32, "SUM")), (2, 3, 1, 2)
    shardings = {"t0": row_wise(), "t1": row_wise()}
    dmp = _sharded(shardings, compressed_sharders(format="int4"), tables)
    assert [shard.shape[0] for _, shard, _ in _shards(dmp)] == [10, int(rank < 3)]
    inputs = _inputs(0, sizes, tables=tables)
    grads = [torch.zeros(n, 96) for n in sizes]
    expected, _ = _expected(inputs, grads, "int4", "int4", tables)
    found = dmp(_features(inputs[rank], False, False))
    torch.testing.assert_close(found, expected[rank], rtol=0, atol=0)


def test_a_rank_without_rows():
    run_ranks(_without_rows, 4)


def _bytes_of_rows(dmp):
    """What one rank sends in a forward pass, and in a backward pass."""
    features, labels = batch(0)
    with WireMeter() as meter:
        logits = dmp(features)
        forward = meter.take()
        binary_cross_entropy_with_logits(logits, labels).backward()
    return forward, meter.take()


SHARDINGS = {
    "table": lambda i: table_wise(rank=i % 2),
    "column": lambda i: column_wise(ranks=[0, 1]),
    "row": lambda i: row_wise(),
    "mixed": lambda i: [table_wise(1), row_wise(), column_wise(ranks=[0, 1]), data_parallel()][i],
}
# {width: pieces of a row with one scale} that a rank sends per sample, forward and backward.
PIECES = {
    "table": lambda rank: ({64: 2}, {64: 2}),
    "column": lambda rank: ({32: 4}, {32: 4}),
    "row": lambda rank: ({64: 4}, {64: 4}),
    "mixed": lambda rank: ({64: 1 + rank, 32: 1}, {64: 2 - rank, 32: 1}),
}
BYTES = {64: (256, 34, 10), 32: (128, 18, 6)}  # of a piece: float32, int4, sign


def _training(rank, kind, pooled):
    """As without codecs in float32, bit for bit; in few bits nearly, and in fewer bytes."""
    prepare()
    plain = parallel(None, SHARDINGS[kind], pooled)
    floats = parallel(compressed_sharders(format="float32"), SHARDINGS[kind], pooled)
    few = parallel(compressed_sharders(), SHARDINGS[kind], pooled)
    losses = train(plain)
    assert train(floats) == losses
    assert train(few) == pytest.approx(losses, abs=0.03) and train(few) != losses
    before, after = _bytes_of_rows(floats), _bytes_of_rows(few)
    assert before == _bytes_of_rows(plain)
    if (kind, pooled) == ("row", False):  # a row for each id, to the rank that asked for it
        features, _ = batch(0)
        foreign = int((features.values() // (ROWS // 2) != rank).sum())
        assert before[1] - after[1] == foreign * (256 - 10)
        return
    for i, pieces in enumerate(PIECES[kind](rank)):
        saved = sum(n * (BYTES[width][0] - BYTES[width][1 + i]) for width, n in pieces.items())
        assert before[i] - after[i] == BATCH * saved * (1 if pooled else BAG)


# TorchRec's collection of rows itself does not take this mixed plan.
@pytest.mark.parametrize(
    ("kind", "pooled"), [(k, p) for k in SHARDINGS for p in (True, False) if p or k != "mixed"]
)
def test_training(kind, pooled):
    run_ranks(_training, 2, kind, pooled, timeout=300)


def _sharders(formats):
    return compressed_sharders(format=RowFormat(*formats.split(", ")))


def _steps(dmp, sizes, steps, tables=TABLES):
    """The outputs of some steps, and this rank's shards after them."""
    outputs, rank = [], dist.get_rank()
    for step in range(steps):
        inputs = _inputs(step, sizes, tables=tables)[rank]
        generator = torch.Generator().manual_seed(10 * step + rank)
        found = dmp(_features(inputs, False, False))
        found.backward(torch.randn(found.shape, generator=generator))
        outputs.append(found.detach())
    return outputs, [shard.clone() for _, shard, _ in _shards(dmp)]


def _within_nodes(rank):
    """Two nodes of two ranks: within one TorchRec sums in float32, between them rows are coded."""
    prepare(local_size=2)
    shardings = {f"t{i}": table_row_wise(host_index=i % 2) for i in range(len(TABLES))}
    given = [EmbeddingBagCollectionSharder()], *map(_sharders, ("float32", "int4, sign"))
    models = [_sharded(shardings, sharders, SUMS, local_size=2) for sharders in given]
    sent, results = [], []
    for dmp in models:
        (output_dist,) = dmp.module.bags._output_dists
        with (
            WireMeter(output_dist._cross_pg) as between,
            WireMeter(output_dist._intra_pg) as within,
        ):
            results.append(_steps(dmp, (4, 4, 4, 4), 1))
            sent.append((between.take(), within.take()))
    (plain, weights), (floats, shards), (few, _) = results
    assert all(map(torch.equal, floats + shards, plain + weights))
    torch.testing.assert_close(few, [_sent(plain[0], "int4")], rtol=0, atol=0)
    # Between nodes: rows of 96 entries for 4 samples there and gradients of 64 back, or reversed.
    there, back = ((96, 64), (64, 96))[rank // 2]
    assert sent[0] == sent[1] == (4 * 4 * (there + back), sent[0][1])
    assert sent[2] == (4 * (there // 32 * 18 + back // 32 * 6), sent[0][1])


def test_within_nodes():
    run_ranks(_within_nodes, 4, timeout=300)


def _planned(rank):
    """A plan of TorchRec's planner, of four kinds, on four ranks."""
    prepare()
    tables = ((40, 64, "SUM"), (90, 32, "MEAN"), (30, 128, "SUM"), (7, 64, "SUM"))
    kinds = ["row_wise", "table_wise", "column_wise", "data_parallel"]
    constraints = {
        f"t{i}": ParameterConstraints(sharding_types=[kind], min_partition=64)
        for i, kind in enumerate(kinds)
    }
    topology = Topology(4, "cpu", local_world_size=4)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharders = compressed_sharders(format="float32")
    plan = planner.collective_plan(Bags(tables=tables), sharders, dist.group.WORLD)
    found = {name: own.sharding_type for name, own in plan.plan["bags"].items()}
    assert found == dict(zip(constraints, kinds, strict=True))
    results = []
    for given in ([EmbeddingBagCollectionSharder()], sharders, compressed_sharders()):
        model = Bags(tables=tables)
        dmp = DistributedModelParallel(model, device=CPU, plan=plan, sharders=given)
        _fill(dmp, _weights(tables))
        results.append(_steps(dmp, (5, 5, 5, 5), 3, tables))
    expected, floats, few = results
    torch.testing.assert_close(floats, expected, rtol=1e-6, atol=2e-6)
    error = few[0][0] - expected[0][0]
    assert 0 < error.norm() < 0.2 * expected[0][0].norm()


def test_a_plan_of_the_planner():
    run_ranks(_planned, 4, timeout=300)


def _damaged(rank):
    """The message has no checksum: a damaged row is some numbers, and no other row changes."""
    prepare()
    sizes = (4, 3)
    dmp = _sharded({f"t{i}": row_wise() for i in range(3)}, _sharders("int4"), SUMS)
    inputs = _features(_inputs(0, sizes)[rank], False, False)
    sound = dmp(inputs).detach()
    start = reduce_scatter.start_all_to_all

    def damaging(*arguments):
        receive = start(*arguments)

        def damaged():
            message = receive()
            message[0] = torch.arange(len(message[0]))  # sample 0's first piece, from rank 0
            return message

        return damaged

    reduce_scatter.start_all_to_all = damaging
    damaged = dmp(inputs)
    assert not torch.equal(damaged[0, :SHARED], sound[0, :SHARED])
    damaged[0, :SHARED] = sound[0, :SHARED]
    assert torch.equal(damaged, sound)


def test_a_damaged_row():
    run_ranks(_damaged, 2)


def _dies(rank, when):
    prepare()
    dmp = _sharded({f"t{i}": row_wise() for i in range(3)}, _sharders("int4"))
    features = _features(_inputs(0, (4, 4))[rank], False, False)
    dmp(features)
    set_timeout(20)
    dist.barrier()
    if rank == 1 and when == "forward":
        reduce_scatter.start_all_to_all = lambda *arguments: os._exit(7)
    found = dmp(features)
    if rank == 1:
        os._exit(7)
    found.sum().backward()


@pytest.mark.parametrize(("when", "named"), [("forward", "wait"), ("backward", "wait|all_gather")])
def test_a_rank_that_dies_ends_the_others_with_an_error(when, named):
    with pytest.raises(
        RuntimeError, match=rf"(?s)exit codes \[1, 7\].*reduce_scatter.py.*({named})"
    ):
        run_ranks(_dies, 2, when)


def test_errors_name_the_argument():
    for given, error, text in [
        ({"format": "int5"}, ValueError, "dct::compressed_sharders: format must be 'float32', "),
        ({"format": 4}, TypeError, "dct::compressed_sharders: format must be a string or a"),
        (
            {"format": RowFormat(density=0.1)},
            ValueError,
            r"dct::compressed_sharders: format must be without a density: every entry is sent, got",
        ),
        ({"width": 64}, TypeError, "width"),
    ]:
        with pytest.raises(error, match=text):
            compressed_sharders(**given)
