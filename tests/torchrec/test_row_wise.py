"""Row-wise tables with quantized partial sums, compared with an oracle (make torchrec)."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks

pytest.importorskip("fbgemm_gpu", reason="TorchRec is in the environment of make torchrec")

from bags import (
    MEANS,
    SUMS,
    TABLES,
    initial_weights,
    local_shards_of,
    make_inputs,
    on_ranks,
    received_of,
    sharders_of,
    to_features,
)
from models import prepare
from torchrec.distributed.sharding_plan import row_wise

EPS = 1e-6  # TorchRec adds EPS to the divisor, which is 1 for sums


def _expected(inputs, grads, forward, backward, tables):
    """(outputs of a row-wise collection on each rank, its tables after a step with lr=1)."""
    ranks, weights = len(inputs), initial_weights(tables)
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
            pooled, *others = [received_of(part, forward) for part in parts]
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
            for bag, row in zip(bags, received_of(of_bags, backward), strict=True):
                for i, weight in bag:
                    after[t][i] -= weight * row.double() / ranks
    return [torch.cat(found, 1) for found in outputs], after


FORMATS = [("float32", "float32"), ("int8", "bfloat16"), ("int4", "sign"), ("sign", "int4")]
# (tables, samples per rank). TorchRec's mean pooling requires at least one sample per rank.
CASES = {
    2: [(TABLES, (6, 6)), (TABLES, (1, 4)), (SUMS, (5, 0)), (SUMS, (0, 0))],
    4: [(TABLES, (3, 3, 3, 3)), (TABLES, (1, 4, 2, 3)), (SUMS, (0, 5, 1, 2)), (SUMS, (0, 0, 0, 0))],
}
# (tables, samples per rank, distinct bags per rank and feature). Features differ in batch size.
# With different batch sizes, FBGEMM on the CPU supports only tables of one kind.
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
    sharders = sharders_of(f"{forward}, {backward}")
    shardings = {f"t{i}": row_wise() for i in range(len(TABLES))}
    for seed, (tables, sizes, *distinct) in enumerate(cases):
        dmp = on_ranks(shardings, sharders, tables, weighted=weighted)
        inputs = make_inputs(seed, sizes, weighted, *distinct)
        generator = torch.Generator().manual_seed(seed)
        # Integers, so that their sums are exact.
        grads = [torch.randint(-9, 10, (n, 160), generator=generator).float() for n in sizes]
        expected, after = _expected(inputs, grads, forward, backward, tables)
        found = dmp(to_features(inputs[rank], weighted, varying))
        torch.testing.assert_close(found, expected[rank], rtol=0, atol=0)
        found.backward(grads[rank])
        for table, shard, slices in local_shards_of(dmp):
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


def _different_formats(rank):
    prepare()
    text = "dct::compressed_sharders: format must be the same on every rank, got "
    text += "int4, sign on rank 0, int4 on rank 1$"
    with pytest.raises(ValueError, match=text):
        on_ranks({f"t{i}": row_wise() for i in range(3)}, sharders_of(("int4, sign", "int4")[rank]))


def test_ranks_compare_the_format():
    run_ranks(_different_formats, 2)


def _without_rows(rank):
    """The last rank has no row of t1. FBGEMM on the CPU has no backward pass for this case."""
    prepare()
    tables, sizes = ((40, 64, "SUM"), (3, 32, "SUM")), (2, 3, 1, 2)
    shardings = {"t0": row_wise(), "t1": row_wise()}
    dmp = on_ranks(shardings, sharders_of("int4"), tables)
    assert [shard.shape[0] for _, shard, _ in local_shards_of(dmp)] == [10, int(rank < 3)]
    inputs = make_inputs(0, sizes, tables=tables)
    grads = [torch.zeros(n, 96) for n in sizes]
    expected, _ = _expected(inputs, grads, "int4", "int4", tables)
    found = dmp(to_features(inputs[rank], False, False))
    torch.testing.assert_close(found, expected[rank], rtol=0, atol=0)


def test_a_rank_without_rows_of_a_table():
    run_ranks(_without_rows, 4)
