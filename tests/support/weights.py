"""A trainer's weights of every kind, and the bits that receivers must have, computed with numpy."""

import numpy as np
import torch

NUMBER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def initial(seed=0):
    """Weights of several blocks and dtypes, with NaN, Inf, -0.0, subnormals and empty tensors."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        "layer.weight": torch.randn(130, 70, generator=generator),
        "layer.bias": torch.randn(200, generator=generator).bfloat16(),
        "half": torch.randn(3, 1500, generator=generator).half(),
        "position": torch.arange(7),
        "mask": torch.tensor([True, False, True]),
        "double": torch.randn(4, generator=generator).double(),
        "scale": torch.tensor(0.5),
        "empty": torch.empty(0, 4),
    }
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40])
    made["layer.weight"][0, :6] = special
    made["half"][1, :6] = special.half()
    return made


def step(weights, share, seed):
    """Change a share of each tensor, mostly by one unit in the last place of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        if tensor.is_floating_point():
            chosen = torch.rand(tensor.shape, generator=generator) < share
            factor = torch.where(torch.rand(tensor.shape, generator=generator) < 0.8, 1.008, -3.0)
            tensor[chosen] = (tensor * factor).to(tensor.dtype)[chosen]
    if "position" in weights:
        weights["position"] += 1


def bits(tensors):
    """{name: a copy of the raw numbers}, to compare NaN and -0.0."""
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    return {name: copy.view(NUMBER[copy.itemsize]).numpy() for name, copy in copies.items()}


def published(weights):
    """{name: the raw numbers that receivers must have}: float32 is rounded to bfloat16."""
    found = bits(weights)
    for name, tensor in weights.items():
        if tensor.dtype == torch.float32:
            raw = found[name].view(np.uint32).astype(np.uint64)
            rounded = (raw + 0x7FFF + (raw >> 16 & 1)) >> 16
            nan = (raw & 0x7FFFFFFF) > 0x7F800000
            found[name] = np.where(nan, 0x7FC0, rounded).astype(np.uint16).view(np.int16)
    return found


def receiver(weights):
    """Tensors with the shapes and dtypes of a receiver, and other values."""
    dtypes = {torch.float32: torch.bfloat16}
    return {n: torch.ones(t.shape, dtype=dtypes.get(t.dtype, t.dtype)) for n, t in weights.items()}


def assert_bits(found, expected):
    assert found.keys() == expected.keys()
    different = [name for name in found if not np.array_equal(found[name], expected[name])]
    assert not different, different
