"""Sharded models for the tests of `compress_fully_shard`, and their expected gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from support.ranks import batch

# Bounds of the rounding error, relative to the largest of 64 entries. In int8 and int4, the bound
# is half a quantization step and includes the rounding of the scale.
ROUNDING = {"int8": 0.5 / 127 * (1 + 2**-7), "int4": 0.5 / 7 * (1 + 2**-7), "bfloat16": 2**-8}


class Block(nn.Module):
    """A linear layer and a norm. The default number of rows is odd, so shards are uneven."""

    def __init__(self, inputs=50, outputs=71):
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), nn.LayerNorm(outputs)

    def forward(self, x):
        return self.norm(self.linear(x).tanh())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.Sequential(Block(), Block(71, 70))
        self.head = nn.Linear(70, 61)

    def forward(self, x):
        return self.head(self.blocks(x))


def sharded(model=None, **options):
    """Apply fully_shard to each block and to the model."""
    model = Net() if model is None else model
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp_modules(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def loss_of(model, step, rank):
    x, dtype = batch(step, rank, width=50, rows=8)[0], next(model.parameters()).dtype
    return model(x.to(dtype)).float().square().mean()


def computed_weights(model):
    """Return {name: gathered weight that this rank computes with}."""
    for module in fsdp_modules(model):
        module.unshard()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for module in fsdp_modules(model):
        module.reshard()
    return found


def full_weights(model):
    """Return {name: unsharded weight of the optimizer}. These weights are not rounded."""
    for module in fsdp_modules(model):
        module.reshard()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@torch.no_grad()
def set_weights(model, weights):
    """Set parameters that are sharded by rows from unsharded tensors."""
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        part = parameter.to_local()
        start = dist.get_rank() * -(-len(weight) // dist.get_world_size())
        part.copy_(weight[start:][: len(part)])


def gradients(model):
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def plain_gradients(model, weights, batches):
    """Return one {name: gradient} of an unsharded model per batch (step, rank)."""
    dtype = next(iter(weights.values())).dtype
    model.to(dtype).load_state_dict(weights, strict=False)  # one name for tied parameters
    found = []
    for step, rank in batches:
        model.zero_grad()
        loss_of(model, step, rank).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({name: grad.double() for name, grad in grads.items()})
    return found


def require_close(found, by_rank, most=1e-5, factor=1.0, format="int8"):
    """Check that `found` is close to the mean of the ranks' gradients times `factor`.

    The bound of the error is `most` times the largest gradient, because of dtypes and the order of
    sums. Matrices are also rounded, which adds `ROUNDING` times the mean of the ranks' largest
    gradients. Both terms are multiplied by `factor`.
    """
    assert found.keys() == by_rank[0].keys()
    largest = [max(grad.abs().max().item() for grad in grads.values()) for grads in by_rank]
    for name, grad in found.items():
        mean = sum(grads[name] for grads in by_rank) / len(by_rank) * factor
        bound = most * max(largest) * factor
        if grad.dim() > 1:
            bound += ROUNDING[format] * sum(largest) / len(largest) * factor
        error = (grad - mean).abs().max().item()
        assert error <= bound, (name, error, bound)
        assert mean.abs().max() > 0, name
