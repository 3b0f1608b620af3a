"""What the doors' programs share: models of odd parameters, gradients, digests, refusals."""

import contextlib
import functools
import hashlib
import io
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

# Of parameters; with a letter: transposed, or channels last, neither of which is contiguous.
SHAPES = [(), (1,), (7,), (0, 5), (130,), (40, 33, "t"), (8, 4, 3, 3, "c"), (900,), (61, 31)]
LONG = (40_000,)  # of several blocks
FORMATS = ["bfloat16", "float32", "int8", "int4", "ternary"]
FEW_BITS = FORMATS[2:]
TRANSPORTS = [None, "all_gather", "reduce_scatter"]
BLOCK, SCALED = 16384, 64  # entries of a block, and of those that share a scale in few bits
SCALES = [0.0, 2.0**-10, 1.0, 1.0, 2.0**10]  # of a parameter's gradients in a step


def draw_shapes(draw, shapes=SHAPES):
    return draw.sample(shapes, draw.randint(2, 5)) + [LONG] * (draw.random() < 0.15)


def draw_format(draw):
    """A format and a density for it."""
    format = draw.choice(FORMATS)
    if format in FEW_BITS:
        return {"format": format}
    return {"format": format, "density": draw.choice([1e-9, 0.003, 0.02, 0.1, 0.5, 1.0])}


class Odd(nn.Module):
    """A model whose parameters' gradients are whatever it is called with."""

    def __init__(self, shapes, frozen=()):
        super().__init__()
        self.p = nn.ParameterList(_odd(shape) for shape in shapes)
        for index in frozen:
            self.p[index].requires_grad_(False)

    def forward(self, *grads):
        return sum((p * g).sum() for p, g in zip(self.p, grads, strict=True) if p.requires_grad)


def _odd(shape):
    if shape[-1:] == ("t",):
        return torch.zeros(*reversed(shape[:-1])).t()
    if shape[-1:] == ("c",):
        return torch.zeros(shape[:-1]).to(memory_format=torch.channels_last)
    return torch.zeros(shape)


def values(parameters, seed, rank):
    """Draws values for each parameter, small, large or all zero; they differ per seed and rank."""
    drawn = random.Random(seed)
    generator = torch.Generator().manual_seed(31 * seed + rank)
    return [torch.randn(p.shape, generator=generator) * drawn.choice(SCALES) for p in parameters]


def poison(tensors, rank, bad):
    """Of (rank, value, first, count): these entries of all tensors are `value` on that rank."""
    who, value, first, count = bad
    if who != rank:
        return
    at = 0
    for tensor in tensors:
        low, high = max(first - at, 0), min(first + count - at, tensor.numel())
        if low < high:
            tensor.view(-1)[low:high] = float(value)
        at += tensor.numel()


def beside(mask, messages, places, format):
    """These entries, and in few bits those that share a scale with one of them.

    Args:
        messages, places: of every entry the number of its message, and the place in it.
    """
    if format not in FEW_BITS:
        return mask
    groups = 10**9 * messages + places // SCALED
    return torch.isin(groups, groups[mask])


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def digest(value):
    """Of tensors, numbers and texts in dicts and lists: equal for equal bits."""
    made = hashlib.sha256()

    def add(part):
        if isinstance(part, dict):
            for key in sorted(part):
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
    """On every rank of the group the same bits."""
    own = torch.tensor([int(digest(value)[:15], 16)])
    told = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(told, own, group=group)
    assert len({int(one) for one in told}) == 1, f"{what} differ between ranks"


@contextlib.contextmanager
def refused(*errors):
    """What is inside raises one of these, in a sentence of ours."""
    try:
        yield
    except errors as error:
        assert "dct::" in str(error), f"not a sentence of ours: {error!r}"
    else:
        raise AssertionError("was not refused")


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def from_everyone(value):
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def from_first(value, group=None):
    """Rank 0's, on every rank."""
    told = [value]
    dist.broadcast_object_list(told, 0, group)
    return told[0]


# Made once for all programs of a rank: all ranks play the same ones, so they ask in one order.


@functools.cache
def group_of(ranks):
    """The first so many ranks."""
    return dist.new_group(range(ranks))


@functools.cache
def mesh_of(replicas, shards):
    """Of the first ranks."""
    ranks = torch.arange(replicas * shards).view(replicas, shards)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
