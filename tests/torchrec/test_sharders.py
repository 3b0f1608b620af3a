"""Quantized exchanges of embeddings with every plan, compared with TorchRec (make torchrec)."""

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks

pytest.importorskip("fbgemm_gpu", reason="TorchRec is in the environment of make torchrec")

from bags import (
    SUMS,
    TABLES,
    local_shards_of,
    make_inputs,
    on_ranks,
    received_of,
    sharders_of,
    to_features,
)
from models import BAG, BATCH, ROWS, batch, parallel, prepare, train
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)

from dct_embeddings.torchrec import compressed_sharders
from wire_meter import WireMeter


def _bytes_of_rows(dmp):
    """(bytes that a rank sends in a forward pass, in a backward pass)."""
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
# {width of a piece with one scale: pieces that a rank sends per sample}, forward and backward.
PIECES = {
    "table": lambda rank: ({64: 2}, {64: 2}),
    "column": lambda rank: ({32: 4}, {32: 4}),
    "row": lambda rank: ({64: 4}, {64: 4}),
    "mixed": lambda rank: ({64: 1 + rank, 32: 1}, {64: 2 - rank, 32: 1}),
}
BYTES = {64: (256, 34, 10), 32: (128, 18, 6)}  # bytes of a piece in float32, int4, sign


def _training(rank, kind, pooled):
    """float32 losses equal TorchRec's losses. Quantized rows give close losses and fewer bytes."""
    prepare()
    plain = parallel(None, SHARDINGS[kind], pooled)
    floats = parallel(compressed_sharders(format="float32"), SHARDINGS[kind], pooled)
    quantized = parallel(compressed_sharders(), SHARDINGS[kind], pooled)
    losses = train(plain)
    assert train(floats) == losses
    assert train(quantized) == pytest.approx(losses, abs=0.03) and train(quantized) != losses
    before, after = _bytes_of_rows(floats), _bytes_of_rows(quantized)
    assert before == _bytes_of_rows(plain)
    if (kind, pooled) == ("row", False):  # a row per id, sent to the rank that requests it
        features, _ = batch(0)
        foreign = int((features.values() // (ROWS // 2) != rank).sum())
        assert before[1] - after[1] == foreign * (256 - 10)
        return
    for i, pieces in enumerate(PIECES[kind](rank)):
        saved = sum(n * (BYTES[width][0] - BYTES[width][1 + i]) for width, n in pieces.items())
        assert before[i] - after[i] == BATCH * saved * (1 if pooled else BAG)


# TorchRec's EmbeddingCollection does not support this mixed plan.
@pytest.mark.parametrize(
    ("kind", "pooled"), [(k, p) for k in SHARDINGS for p in (True, False) if p or k != "mixed"]
)
def test_training_matches_torchrec(kind, pooled):
    run_ranks(_training, 2, kind, pooled, timeout=300)


def _steps(dmp, sizes, steps, tables=TABLES):
    """(outputs of all steps, this rank's shards after them)."""
    outputs, rank = [], dist.get_rank()
    for step in range(steps):
        inputs = make_inputs(step, sizes, tables=tables)[rank]
        generator = torch.Generator().manual_seed(10 * step + rank)
        found = dmp(to_features(inputs, False, False))
        found.backward(torch.randn(found.shape, generator=generator))
        outputs.append(found.detach())
    return outputs, [shard.clone() for _, shard, _ in local_shards_of(dmp)]


def _within_nodes(rank):
    """Two nodes of two ranks: sums within a node are float32, rows between nodes are quantized."""
    prepare(local_size=2)
    shardings = {f"t{i}": table_row_wise(host_index=i % 2) for i in range(len(TABLES))}
    given = [EmbeddingBagCollectionSharder()], *map(sharders_of, ("float32", "int4, sign"))
    models = [on_ranks(shardings, sharders, SUMS, local_size=2) for sharders in given]
    sent, results = [], []
    for dmp in models:
        (output_dist,) = dmp.module.bags._output_dists
        with (
            WireMeter(output_dist._cross_pg) as between,
            WireMeter(output_dist._intra_pg) as within,
        ):
            results.append(_steps(dmp, (4, 4, 4, 4), 1))
            sent.append((between.take(), within.take()))
    (plain, weights), (floats, shards), (quantized, _) = results
    assert all(map(torch.equal, floats + shards, plain + weights))
    torch.testing.assert_close(quantized, [received_of(plain[0], "int4")], rtol=0, atol=0)
    # Between nodes: rows of 96 entries for 4 samples and gradients of 64 entries, or vice versa.
    forward, backward = ((96, 64), (64, 96))[rank // 2]
    assert sent[0] == sent[1] == (4 * 4 * (forward + backward), sent[0][1])
    assert sent[2] == (4 * (forward // 32 * 18 + backward // 32 * 6), sent[0][1])


def test_only_rows_between_nodes_are_quantized():
    run_ranks(_within_nodes, 4, timeout=300)
