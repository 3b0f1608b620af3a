"""compress_fully_shard: bitwise checks of gathered weights and reduced gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dct_kernels import quantized_payload_bytes, reference
from dct_parallel import compress_fully_shard
from dct_parallel.fsdp2.collectives import GradientReduceScatter
from support.compressed_shards import (
    ROUNDING,
    computed_weights,
    full_weights,
    loss_of,
    set_weights,
    sharded,
)
from support.ranks import Dictated, on_ranks


def _trained(rank, compress, steps=3, **options):
    model = sharded(**options)
    if compress is not None:
        compress_fully_shard(model, **compress)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return torch.cat([weight.flatten() for weight in full_weights(model).values()])


@on_ranks(3)
def test_unrounded_formats_are_bitwise_equal_to_torch(rank):
    for dtype in (None, torch.bfloat16):
        for reshard in (True, False):
            options = {
                "reshard_after_forward": reshard,
                "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            }
            expected = _trained(rank, None, **options)
            for format in (None, torch.float32):
                compress = {"weights": format, "gradients": format}
                assert torch.equal(_trained(rank, compress, **options), expected)
            assert not torch.equal(_trained(rank, {}, **options), expected)


# Row counts not divisible by 3, a single row, and vectors between them.
SHAPES = ((61, 40), (37,), (1, 900), (5,), (64, 30))


def _part(tensors, rank, ranks):
    """Return a rank's shards as FSDP2 sends them: equal chunks of rows, zero-padded."""
    parts = []
    for tensor in tensors:
        rows = -(-len(tensor) // ranks)
        filled = torch.zeros(rows * ranks, *tensor.shape[1:], dtype=tensor.dtype)
        filled[: len(tensor)] = tensor
        parts.append(filled[rank * rows :][:rows].flatten())
    return parts


def _payload(parts, format):
    """Return the reference's payload of the matrices, with zeros for vectors."""
    flat = torch.cat([p * (len(s) > 1) for p, s in zip(parts, SHAPES, strict=True)])
    payload = torch.zeros(quantized_payload_bytes(len(flat), format), dtype=torch.uint8)
    reference.quantize_pack(None, flat, payload, format)
    return payload


def _summed(by_rank, format, dtype, scale=1.0):
    """Return `scale` times the sum of the ranks' parts; matrices are added in rank order."""
    total = torch.empty(sum(map(len, by_rank[0])), dtype=dtype)
    payloads = torch.stack([_payload(parts, format) for parts in by_rank])
    reference.dequantize_sum(payloads, total, format, scale)
    sums = list(total.split([len(part) for part in by_rank[0]]))
    for index, shape in enumerate(SHAPES):
        if len(shape) == 1:
            exact = torch.stack([parts[index].float() for parts in by_rank]).sum(0)
            sums[index] = (exact * scale).to(dtype)
    return sums


def _dictated_gradients(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("format", ["int8", "int4", "bfloat16"])
@on_ranks(3)
def test_owners_sum_gradients_in_rank_order_in_float32(rank, format):
    for dtype in (torch.float32, torch.bfloat16):
        for factor in (None, 8.0):
            model = fully_shard(
                Dictated(SHAPES), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)
            )
            compress_fully_shard(model, weights=None, gradients=format)
            if factor is not None:  # torch then uses PREMUL_SUM, which gloo itself does not support
                model.set_gradient_divide_factor(factor)
            model(*_dictated_gradients(0, rank)).backward()
            everyone = [[g.to(dtype) for g in _dictated_gradients(0, r)] for r in range(3)]
            scale = 1 / (factor or 3)
            parts = [_part(grads, rank, 3) for grads in everyone]
            expected = _summed(parts, format, dtype, scale)
            for index, (parameter, sums) in enumerate(zip(model.p, expected, strict=True)):
                grad = parameter.grad.to_local()
                assert torch.equal(grad.flatten(), sums[: grad.numel()].float())
                exact = sum(grads[index].double() for grads in everyone) * scale
                top = sum(g.abs().max() for grads in everyone for g in grads) / 3
                most = ROUNDING[format] * top * 3 * scale if grad.dim() > 1 else 0
                most += (2**-7 if dtype == torch.bfloat16 else 1e-6) * exact.abs().max()
                assert (parameter.grad.full_tensor() - exact).abs().max() <= most


def test_the_scale_of_a_sum_depends_on_the_reduction():
    collective = object.__new__(GradientReduceScatter)
    collective._ranks = [0, 1, 2]
    collective._unit = SimpleNamespace(group=SimpleNamespace(gradient_divide_factor=8.0))
    for op, scale in ((ReduceOp.SUM, 1), (ReduceOp.AVG, 1 / 3), (ReduceOp.PREMUL_SUM, 1 / 8)):
        assert collective._scale(op) == scale


@pytest.mark.parametrize("format", ["int8", "bfloat16"])
@on_ranks(3)
def test_gathered_weights_match_the_reference(rank, format):
    model = fully_shard(Dictated(SHAPES))
    compress_fully_shard(model, weights=format)
    for step in range(2):
        weights = _dictated_gradients(step, 0)
        set_weights(model, weights)
        used = list(computed_weights(model).values())
        for r in range(3):
            exact = _part(weights, r, 3)
            expected = _summed([exact], format, torch.float32)
            for index, shape in enumerate(SHAPES):
                if len(shape) == 1:
                    expected[index] = exact[index]
                assert torch.equal(_part(used, r, 3)[index], expected[index]), (step, shape)
