"""Models, gradients, digests and error checks for all random programs."""

import contextlib
import functools
import hashlib
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

# Shapes of parameters. "t" means transposed and "c" channels last; neither is contiguous.
SHAPES = [(), (1,), (7,), (0, 5), (130,), (40, 33, "t"), (8, 4, 3, 3, "c"), (900,), (61, 31)]
LONG = (40_000,)  # several blocks
FORMATS = ["bfloat16", "float32", "int8", "int4", "ternary"]
QUANTIZED = FORMATS[2:]
TRANSPORTS = [None, "all_gather", "reduce_scatter"]
BLOCK, SCALED = 16384, 64  # entries per block, and per scale in a quantized format
SCALES = [0.0, 2.0**-10, 1.0, 1.0, 2.0**10]  # magnitudes of a parameter's gradients


def draw_shapes(draw, shapes=SHAPES):
    return draw.sample(shapes, draw.randint(2, 5)) + [LONG] * (draw.random() < 0.15)


def draw_format(draw):
    """Draw a format, and a density unless the format is quantized."""
    format = draw.choice(FORMATS)
    if format in QUANTIZED:
        return {"format": format}
    return {"format": format, "density": draw.choice([1e-9, 0.003, 0.02, 0.1, 0.3, 1.0])}


class Odd(nn.Module):
    """A model whose inputs are the gradients of its parameters."""

    def __init__(self, shapes, frozen=()):
        super().__init__()
        self.p = nn.ParameterList(_odd_parameter(shape) for shape in shapes)
        for index in frozen:
            self.p[index].requires_grad_(False)

    def forward(self, *grads):
        return sum((p * g).sum() for p, g in zip(self.p, grads, strict=True) if p.requires_grad)


def _odd_parameter(shape):
    if shape[-1:] == ("t",):
        return torch.zeros(*reversed(shape[:-1])).t()
    if shape[-1:] == ("c",):
        return torch.zeros(shape[:-1]).to(memory_format=torch.channels_last)
    return torch.zeros(shape)


def values(parameters, seed, rank):
    """Draw each parameter's values: small, medium, large or all zero. Each rank draws others."""
    drawn = random.Random(seed)
    generator = torch.Generator().manual_seed(31 * seed + rank)
    return [torch.randn(p.shape, generator=generator) * drawn.choice(SCALES) for p in parameters]


def poison(tensors, rank, bad):
    """Set entries to a non-finite value. `bad` is (rank, value, first entry, count)."""
    bad_rank, value, first, count = bad
    if bad_rank != rank:
        return
    at = 0
    for tensor in tensors:
        low, high = max(first - at, 0), min(first + count - at, tensor.numel())
        if low < high:
            tensor.view(-1)[low:high] = float(value)
        at += tensor.numel()


def with_same_scale(mask, messages, places, format):
    """Return the masked entries and, in quantized formats, all entries that share their scales.

    Args:
        messages, places: the message of each entry, and the entry's position in the message.
    """
    if format not in QUANTIZED:
        return mask
    groups = 10**9 * messages + places // SCALED
    return torch.isin(groups, groups[mask])


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def digest(value):
    """Return a hash of nested dicts and lists, without "run_id", which changes after a load."""
    made = hashlib.sha256()

    def add(part):
        if isinstance(part, dict):
            for key in sorted(part.keys() - {"run_id"}):
                add(key)
                add(part[key])
        elif isinstance(part, (list, tuple)):
            for item in part:
                add(item)
        elif isinstance(part, torch.Tensor):
            local = part.to_local() if hasattr(part, "to_local") else part
            made.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            made.update(repr(part).encode())

    add(value)
    return made.hexdigest()


def require_equal(value, group, what):
    """Raise unless the value is bitwise equal on all ranks of the group."""
    local = torch.tensor([int(digest(value)[:15], 16)])
    gathered = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(gathered, local, group=group)
    assert len({int(one) for one in gathered}) == 1, f"{what} differ between ranks"


@contextlib.contextmanager
def refused(*errors):
    """Check that the body raises one of these errors, with a message of this package."""
    try:
        yield
    except errors as error:
        assert "dct::" in str(error), f"not an error of this package: {error!r}"
    else:
        raise AssertionError("an invalid call raised no error")


def gather_objects(value):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast_from_rank_0(value, group=None):
    values = [value]
    dist.broadcast_object_list(values, 0, group)
    return values[0]


# Groups and meshes are created once per rank and shared by all programs. All ranks run the same
# programs, so they create groups in the same order.


@functools.cache
def group_of(ranks):
    return dist.new_group(range(ranks))


@functools.cache
def mesh_of(replicas, shards):
    ranks = torch.arange(replicas * shards).view(replicas, shards)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
