"""compress_fully_shard: the bits that ranks compute with, and the sums of their gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from compressed_shards import (
    ROUNDING,
    computed_weights,
    full_weights,
    gradients,
    loss_of,
    plain_gradients,
    require_close,
    sharded,
    Net,
)
from dct_kernels import quantized_payload_bytes, reference
from dct_parallel import compress_fully_shard
from ranks import Dictated, assert_same, gathered, on_ranks, shard_mesh


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


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_without_rounding_the_bits_are_those_of_torch(rank):
    for dtype in (None, torch.bfloat16):
        for reshard in (True, False):
            options = {
                "reshard_after_forward": reshard,
                "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            }
            expected = _trained(rank, None, **options)
            for format in (None, "float32", torch.float32):
                compress = {"weights": format, "gradients": format}
                assert torch.equal(_trained(rank, compress, **options), expected)
            assert not torch.equal(_trained(rank, {}, **options), expected)


class Recorded(torch.autograd.Function):
    """x @ weight.T, and copies of the weight in `log` whenever it is read."""

    @staticmethod
    def forward(ctx, x, weight, log):
        ctx.save_for_backward(x, weight)
        ctx.log = log
        log.append(weight.detach().clone())
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.log.append(weight.detach().clone())
        return grad @ weight, grad.T @ x, None


class Recording(nn.Module):
    """Layers that record the weights that they compute with."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(50, 50, bias=False) for _ in range(3))
        self.logs, self._use_reentrant = [[] for _ in self.blocks], use_reentrant
        for block, log in zip(self.blocks, self.logs, strict=True):
            block.forward = lambda x, block=block, log=log: Recorded.apply(x, block.weight, log)

    def forward(self, x):
        if torch.is_grad_enabled():
            x.requires_grad_()  # reentrant checkpoints need it
        for block in self.blocks:
            if self._use_reentrant is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self._use_reentrant)
        return x


def _one(copies):
    """The one value that all copies are, on all ranks."""
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert_same(copies[0])
    return copies[0]


@pytest.mark.parametrize("format", ["int8", "int4", "bfloat16"])
@on_ranks(2)
def test_all_ranks_and_passes_of_a_step_compute_with_equal_bits(rank, format):
    for use_reentrant, dtype in ((None, None), (False, None), (True, torch.bfloat16)):
        if dtype is not None and format == "bfloat16":
            continue  # that is torch's all-gather
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        model = sharded(Recording(use_reentrant), mp_policy=policy)
        compress_fully_shard(model, weights=format)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        reads = 6 if use_reentrant is None else 8  # 2 evaluations, 2 forward and backward passes
        for step in range(4):
            with torch.no_grad():
                loss_of(model, 10, 0)
            optimizer.zero_grad()
            (loss_of(model, step, rank) + loss_of(model, step + 1, rank)).backward()
            with torch.inference_mode():
                loss_of(model, 10, 0)
            exact = [weight.to(dtype) for weight in full_weights(model).values()]
            for log, weight in zip(model.logs, exact, strict=True):
                assert len(log) == reads
                used = _one(log)
                rounded = not torch.equal(used, weight)
                assert rounded == (format != "int4" or step > 0)
                top = weight.abs().max() if format != "int4" else 2e-3
                assert (used - weight).abs().max() <= ROUNDING[format] * top + 2**-8 * 0.2 * (
                    dtype is not None
                )
                log.clear()
            optimizer.step()
