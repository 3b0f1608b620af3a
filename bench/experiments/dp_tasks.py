"""What dp_density.py trains: a transformer on text, DLRM on clicks, an MLP on a made-up function.

A task draws the batches of every rank, and scores a model on rows that it was not trained on:
"validation" ones, for choosing settings, and "test" ones.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    gelu,
    mse_loss,
    scaled_dot_product_attention,
)

from dlrm import files, loop
from dlrm.data import criteo
from dlrm.data.dataset import GENERATOR_SEED, split
from dlrm.data.features import Rows, table_rows
from dlrm.data.synthetic import Generator
from dlrm.models.dlrm import DLRM
from dlrm.models.mlp import layers


class Task(Protocol):
    """Data, and a model for it; `batches` and `model` depend on the seed alone.

    Attributes:
        curve: the part that a model is scored on while it is trained.
    """

    description: dict[str, object]
    curve: str

    def model(self, seed: int) -> nn.Module: ...

    def batches(self, seed: int, rank: int, ranks: int): ...

    def loss(self, model: nn.Module, batch) -> Tensor: ...

    def score(self, model: nn.Module, part: str) -> dict[str, float]: ...


# --- text ---

CONTEXT = 64  # characters that the transformer sees
BATCH_TEXTS = 8  # of a rank and step
HELD_OUT_TEXTS = 400  # scored of each part
GENERATED_CHARACTERS = 1_000_000


class Block(nn.Module):
    """A layer of a transformer that norms before attention and before its MLP."""

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
    """Logits of the next character [batch, length, characters] of characters [batch, length]."""

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
    """Nats a character, of texts [batch, length + 1]."""
    return cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())


class TextTask:
    """Next characters of a text: its first 80 % are trained on, then come validation and test.

    Args:
        path: of the text; written by `generate_text` if it is not there.
        width, layers: of the transformer.
        batch: texts of a rank and step.
    """

    curve = "test"

    def __init__(
        self, path: Path, width: int = 96, layers: int = 3, batch: int = BATCH_TEXTS
    ) -> None:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, generate_text(GENERATED_CHARACTERS).encode())
        text = path.read_text()
        known = sorted(set(text))
        number = {character: i for i, character in enumerate(known)}
        encoded = torch.tensor([number[character] for character in text])
        shares = [int(0.8 * len(encoded)), int(0.1 * len(encoded))]
        parts = encoded.split([*shares, len(encoded) - sum(shares)])
        self._parts = dict(zip(("train", "validation", "test"), parts, strict=True))
        self._make = lambda: Transformer(len(known), width, layers)
        self._batch = batch
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.description = {"characters": len(text), "distinct": len(known), "sha256": digest}

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self._make()

    def batches(self, seed: int, rank: int, ranks: int):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        while True:
            yield self._draw("train", self._batch, generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return next_character_loss(model, batch)

    @torch.no_grad()
    def score(self, model: nn.Module, part: str) -> dict[str, float]:
        """{"loss": nats a character}, over texts that are the same for every model."""
        texts = self._draw(part, HELD_OUT_TEXTS, torch.Generator().manual_seed(7))
        return {"loss": self.loss(model, texts).item()}

    def _draw(self, part: str, count: int, generator: torch.Generator) -> Tensor:
        text = self._parts[part]
        starts = torch.randint(0, len(text) - CONTEXT, (count,), generator=generator)
        return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def generate_text(characters: int) -> str:
    """Sentences of made-up words, each drawn by the word before it: the same in every call."""
    rng = np.random.default_rng(0)
    syllables = [c + v for c in "bdfghklmnprstvwz" for v in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(2000)]
    # After each word come twenty, the first of them oftenest; early words come after many.
    following = (len(words) * rng.random((len(words), 20)) ** 3).astype(int)
    weights = 1 / np.arange(1, 21)
    choices = rng.choice(20, size=characters // 4, p=weights / weights.sum())
    lengths = iter(rng.integers(4, 13, size=characters // 8))
    text, word, left, size = [], 0, next(lengths), 0
    for choice in choices:
        word = following[word, choice]
        left -= 1
        text.append(words[word] + (" " if left else ".\n"))
        size += len(text[-1])
        if not left:
            word, left = rng.integers(len(words)), next(lengths)
        if size >= characters:
            break
    return "".join(text)[:characters]


# --- a made-up function ---

INPUTS, WAVES = 4, 16
MLP_WIDTHS = (INPUTS, *[64] * 12)
MLP_BATCH = 128  # rows of a rank and step


class BiasesTask:
    """A deep MLP without norms learns a sum of waves, for whose phases it needs its biases.

    The function's variance is .64. At a rate of 2e-3 1,000 steps bring the error down to .015, and
    where biases stay 0 to .22.

    Args:
        batch: rows of a rank and step, drawn anew for each.
    """

    curve = "test"

    def __init__(self, batch: int = MLP_BATCH) -> None:
        generator = torch.Generator().manual_seed(GENERATOR_SEED)
        self._directions = torch.randn(INPUTS, WAVES, generator=generator)
        self._phases = 6.28 * torch.rand(WAVES, generator=generator)
        self._sizes = torch.randn(WAVES, generator=generator)
        self._sizes *= (2 / self._sizes.square().sum()).sqrt()
        self._scored = {part: self._draw(20_000, generator) for part in ("validation", "test")}
        self._batch = batch
        self.description = {"inputs": INPUTS, "waves": WAVES, "widths": MLP_WIDTHS}

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(*layers(MLP_WIDTHS), nn.Linear(MLP_WIDTHS[-1], 1))
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        return model

    def batches(self, seed: int, rank: int, ranks: int):
        generator = torch.Generator().manual_seed(100 * (seed + 1) + rank)
        while True:
            yield self._draw(self._batch, generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return mse_loss(model(x).squeeze(1), y)

    @torch.no_grad()
    def score(self, model: nn.Module, part: str) -> dict[str, float]:
        """{"loss": squared error}."""
        return {"loss": self.loss(model, self._scored[part]).item()}

    def _draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, INPUTS, generator=generator)
        return x, torch.cos(x @ self._directions + self._phases) @ self._sizes


# --- clicks ---

BATCH_ROWS = 128  # of a rank and step


class Batch(NamedTuple):
    ints: Tensor
    ids: Tensor
    labels: Tensor


class ClicksTask:
    """DLRM as `train_dlrm.py` has it: 70 % of the rows are trained on, 10 % validate, 20 % test.

    Args:
        data: a file in Criteo's layout, or None for generated rows.
        rows: to generate; training goes over them in another order each time.
        hash_size, bottom, top: as of `train_dlrm.py`.
        batch: rows of a rank and step.
    """

    curve = "test"

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
        test, validation = split(numbers, 0.2, 0.1)
        masks = {"train": ~(test | validation), "validation": validation, "test": test}
        self._parts = {
            part: encoded.take(torch.from_numpy(np.flatnonzero(mask)))
            for part, mask in masks.items()
        }
        self._make = lambda: DLRM(sizes, 16, bottom, top)
        self._batch = batch
        self.description = {"rows": len(numbers), "hash_size": hash_size}
        self.description |= {} if data is None else {"file": data.name}

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
        auc, log_loss, calibration = loop.score(rows.labels.numpy(), probability.numpy())
        return {"auc": auc, "loss": log_loss, "calibration": calibration}
