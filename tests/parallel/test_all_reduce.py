"""all_reduce_compressed: dtypes, shapes, invalid arguments, and failures."""

import math
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from dct_parallel import all_reduce_compressed, collectives
from dct_parallel.exchange import all_reduce
from dct_parallel.groups import PeerError
from support.ranks import corrupting, on_ranks

BLOCK = 16_384
NUMEL = 2 * BLOCK + 1000  # each of three ranks owns one block; the last is short


class Sub(torch.Tensor):
    pass


def _grad(rank, step, numel=NUMEL):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(numel, generator=generator) * 10.0 ** (rank - 1)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_dtypes_shapes_async_and_nan(rank):
    ranks = dist.get_world_size()
    # The format may be a torch.dtype. With two ranks, float32 results equal dist.all_reduce.
    x = y = _grad(rank, 0)
    all_reduce_compressed(x := x.clone(), format=torch.float32)
    dist.all_reduce(y := y.clone())
    assert torch.equal(x, y) if ranks == 2 else torch.allclose(x, y, rtol=1e-5, atol=1e-5)
    # AVG for several dtypes, without a residual.
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((3, 1, 7), rank + 1.0, dtype=dtype)
        all_reduce_compressed(x, format="bfloat16", op=ReduceOp.AVG)
        assert (x == (ranks + 1) / 2).all() and x.shape == (3, 1, 7)
    # SUM for a scalar and an empty tensor, with a residual.
    for shape in ((), (0,)):
        x = torch.ones(shape)
        all_reduce_compressed(x, torch.zeros(shape), format="bfloat16")
        assert x.shape == shape and (x == ranks).all()
    # Concurrent calls give the same results as consecutive calls.
    xs, again = [_grad(rank, s) for s in range(3)], [_grad(rank, s) for s in range(3)]
    works = [all_reduce_compressed(x, format="int4", async_op=True) for x in xs]
    assert all(work.wait() and work.wait() for work in works)
    for x in again:
        all_reduce_compressed(x, format="int4")
    assert all(map(torch.equal, xs, again))
    # Rank 0's NaN spreads to its group of 64 entries. Rank 0 keeps the residual of this group.
    x, residual = torch.ones(NUMEL), torch.full((NUMEL,), 0.5)
    if rank == 0:
        x[70] = math.nan
    all_reduce_compressed(x, residual, format="int8", op=ReduceOp.AVG)
    assert x[64:128].isnan().all() and x.isnan().sum() == 64
    kept = residual == 0.5
    assert kept.sum() == 64 * (rank == 0) and kept[64:128].all() == (rank == 0)


@on_ranks(2)
def test_invalid_arguments_change_nothing(rank):
    x, r = torch.ones(6), torch.zeros(6)
    wrong = [
        (TypeError, "tensor must be .* got int32", (x.int(),), {}),
        (ValueError, "tensor must be contiguous", (x.view(2, 3).T,), {}),
        (TypeError, "residual must be float32", (x, r.half()), {}),
        (ValueError, r"residual must have shape \[6\], like tensor, got \[3\]", (x, r[:3]), {}),
        (ValueError, "residual must share no memory with tensor, got 24", (x, x), {}),
        (ValueError, "format must be .* got 'int5'", (x, r), {"format": "int5"}),
        (TypeError, "tensor must be a plain tensor .* got Sub", (x.as_subclass(Sub),), {}),
        (ValueError, "tensor must be on the CPU or CUDA, got meta", (x.to("meta"),), {}),
        (ValueError, "op must be ReduceOp.SUM or ReduceOp.AVG", (x, r), {"op": ReduceOp.MAX}),
    ]
    for error, text, args, options in wrong:
        with pytest.raises(error, match=f"dct::all_reduce_compressed: {text}"):
            all_reduce_compressed(*args, **{"format": "int4"} | options)
    assert (x == 1).all() and (r == 0).all()
    all_reduce_compressed(x, r, format="bfloat16")
    assert (x == 2).all()


@on_ranks(2)
def test_ranks_compare_each_combination_of_arguments_once(rank):
    """Equal arguments are compared once. If size, dtype or format differ, every call raises."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    compared, compare = [], all_reduce.compare

    def counted(op, values, *args):
        compared.append(values)
        return compare(op, values, *args)

    same = "must be the same on every rank, got"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_reduce, "compare", counted)
        for numel, dtype, format, text in (
            (1000, torch.float32, "float32", None),
            (1000 + 1000 * rank, torch.float32, "int8", f"numel {same} 1000 on rank 0, 2000 on"),
            (1000, (torch.float32, torch.bfloat16)[rank], "int8", f"dtype {same} torch.float32"),
            (1000, torch.float32, ("int8", "ternary")[rank], f"format {same} int8 on rank 0, tern"),
        ):
            x, residual = torch.ones(numel, dtype=dtype), torch.zeros(numel)
            for _ in range(2):
                if text is None:
                    all_reduce_compressed(x.fill_(1), residual, format=format, group=group)
                    assert (x == 2).all()
                else:
                    with pytest.raises(ValueError, match=f"dct::all_reduce_compressed: {text}"):
                        all_reduce_compressed(x, residual, format=format, group=group)
                    assert (x == 1).all() and not residual.any()
        assert len(compared) == 1 + 3 * 2
        if rank == 0:
            text = "every rank must do the same within 1 s, got nothing from rank 1"
            with pytest.raises(PeerError, match=text):
                all_reduce_compressed(torch.ones(5), format="int4", group=group)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_failed_collectives_keep_tensor_and_gradient(rank):
    class Gone(Exception):
        pass

    def fails(*args, **options):
        raise Gone

    names = ["all_gather"] if dist.get_world_size() == 2 else ["all_gather", "all_to_all"]
    for name in names:
        x, residual = _grad(rank, 0), _grad(rank, 1)
        before, acc = x.clone(), x + residual
        with pytest.MonkeyPatch.context() as patch:
            if name == "all_to_all":
                patch.setattr(dist, "all_to_all_single", fails)
            else:
                for module in ("transport", "reduce_scatter"):
                    patch.setattr(f"dct_parallel.exchange.{module}.all_gather", fails)
            with pytest.raises(Gone):
                all_reduce_compressed(x, residual, format="int4")
        work = all_reduce_compressed(_grad(rank, 2), format="int4", async_op=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(work._bucket, "finish", fails)
            for error in (Gone, RuntimeError):  # a later wait() raises again
                with pytest.raises(error):
                    work.wait()
        assert torch.equal(x, before) and torch.equal(residual, acc), name


@on_ranks(2)
def test_corrupted_payload_raises_on_the_receiving_rank(rank):
    def change(output):
        output[0, 0] ^= 255 * rank

    x, damaged = torch.ones(100), corrupting(collectives.all_gather, change)
    with mock.patch("dct_parallel.exchange.transport.all_gather", damaged):
        if rank == 0:
            all_reduce_compressed(x, format="bfloat16")
            assert (x == 2).all()
        else:
            work = all_reduce_compressed(x, format="bfloat16", async_op=True)
            for _ in range(2):  # every call raises
                with pytest.raises(RuntimeError, match=r"payload must .* status 1 from rank 0"):
                    work.wait()
