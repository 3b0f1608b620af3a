"""The tasks of dp_density.py: a transformer on text, and DLRM on clicks.

A task provides a model, and batches for every rank, which do not depend on the method. The model is
scored on held-out samples: "validation" for the choice of settings, and "test" for results.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    gelu,
    scaled_dot_product_attention,
)

from dlrm.data import criteo
from dlrm.data.dataset import GENERATOR_SEED, split
from dlrm.data.features import Rows, table_rows
from dlrm.data.synthetic import Generator
from dlrm.models.dlrm import DLRM
from dlrm.scores import score

from .runs import scores

CONTEXT = 64  # characters; context length of the transformer
BATCH_TEXTS = 8  # per rank and step
BATCH_ROWS = 128  # per rank and step


class Block(nn.Module):
    """A transformer layer with norms before the attention and before the MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x))
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norm_mlp(x))))


class Transformer(nn.Module):
    """Maps texts [batch, length] to logits of the next characters [batch, length, characters]."""

    def __init__(self, characters: int, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def next_character_loss(model: nn.Module, texts: Tensor) -> Tensor:
    """The loss of texts [batch, length + 1], in nats per character."""
    return cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())


class Batch(NamedTuple):
    ints: Tensor
    ids: Tensor
    labels: Tensor


class ClicksTask:
    """The DLRM of `train_dlrm.py`. 70 % of the rows are for training, and 10 % for validation.

    Args:
        data: a file in Criteo's layout, or None for generated rows.
        rows: number of rows to generate if `data` is None.
        hash_size, bottom, top: see `train_dlrm.py`.
        batch: rows per rank and step.
    """

    def __init__(
        self,
        data: Path | None = None,
        rows: int = 1_000_000,
        hash_size: int = 4000,
        bottom: tuple[int, ...] = (512, 256, 64),
        top: tuple[int, ...] = (512, 256),
        batch: int = BATCH_ROWS,
    ) -> None:
        sizes = table_rows(hash_size)
        if data is None:
            numbers = np.arange(rows)
            block = Generator(GENERATOR_SEED).rows(numbers)
            encoded = Rows.encode(block.labels, block.ints, block.values, sizes)
        else:
            encoded, numbers, _ = criteo.read(data, sizes, 0, 1)
        test, validation = split(numbers)
        masks = {"train": ~(test | validation), "validation": validation, "test": test}
        self._parts = {
            part: encoded.take(torch.from_numpy(np.flatnonzero(mask)))
            for part, mask in masks.items()
        }
        self._make = lambda: DLRM(sizes, 16, bottom, top)
        self._batch = batch

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self._make()

    def batches(self, seed: int, rank: int, ranks: int):
        generator = torch.Generator().manual_seed(100 * seed)
        rows = self._parts["train"]
        while True:
            order = torch.randperm(len(rows), generator=generator)[rank::ranks]
            for index in order.split(self._batch)[: len(rows) // ranks // self._batch]:
                batch = rows.take(index)
                yield Batch(batch.ints, batch.ids, batch.labels.float())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return binary_cross_entropy_with_logits(model(batch.ints, batch.ids), batch.labels)

    @torch.no_grad()
    def score(self, model: nn.Module, part: str) -> dict[str, float]:
        """{"auc": ..., "loss": log loss, "calibration": mean prediction over mean label}."""
        rows = self._parts[part]
        probability = torch.sigmoid(model(rows.ints, rows.ids).double())
        return scores(score(rows.labels.numpy(), probability.numpy()))
