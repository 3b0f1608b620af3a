"""Weight patches: two processes receive the weights of a trainer, bit for bit, after every step.

    torchrun --nproc-per-node 3 examples/weight_patches.py

Rank 0 trains a small transformer on Python source code with AdamW, in float32 with a bfloat16
forward pass. It trains at a learning rate of 2e-3, and then publishes 5 steps at 1e-5. Rank 1
receives each version over gloo, and rank 2 over a folder. Both hold bfloat16 weights and score the
same text. For each version, rank 0 prints the fraction of weights that changed, the bytes of the
patch and of a full copy, whether all ranks hold equal bits, and both losses.
"""

import gc
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from dct_patches import WeightPublisher, WeightSubscriber, broadcast_patch

LENGTH, WIDTH, VERSIONS = 64, 128, 5


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(128, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, texts):
        """Return the loss of predicting the next character of ASCII texts [batch, LENGTH + 1]."""
        x = self.characters(texts[:, :-1]) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype)
        logits = self.head(self.blocks(x, mask, is_causal=True)).float()
        return cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())


def texts():
    """Return the sources of torch.nn as texts, int64 [texts, LENGTH + 1]."""
    raw = b"".join(path.read_bytes() for path in sorted(Path(nn.__file__).parent.rglob("*.py")))
    characters = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clamp(max=127).long()
    return characters.unfold(0, LENGTH + 1, LENGTH + 1)


def train(model, optimizer, samples, steps):
    for step in steps:
        batch = samples[torch.randint(len(samples), (16,), generator=torch.manual_seed(step))]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch)
        loss.backward()
        optimizer.step()


def publish(model, folder, group):
    """Train on rank 0, and send each version over the group and the folder."""
    samples = texts()[:-64]  # the last texts are scored
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train(model, optimizer, samples, range(100))
    for settings in optimizer.param_groups:
        settings["lr"] = 1e-5

    publisher = WeightPublisher(model.named_parameters())
    full = publisher.full()
    full.save(folder)
    broadcast_patch(full, 0, group)
    report(model, 0, f"full copy {full.nbytes:,} bytes")
    for version in range(1, VERSIONS + 1):
        train(model, optimizer, samples, [100 + version])
        patch = publisher.diff(model.named_parameters())
        changed = sum(len(part.indices) for part in publisher.to_indices_and_values(patch))
        patch.save(folder, keep=2)
        broadcast_patch(patch, 0, group)
        publisher.confirm(patch)
        share = changed / (full.nbytes / 2)
        sizes = f"patch {patch.nbytes:,} bytes, full copy {full.nbytes:,} bytes"
        report(model, version, f"{share:.2%} changed, {sizes}")


def receive(model, rank, folder, group):
    """Receive each version, over the group on rank 1 and over the folder on rank 2."""
    model.bfloat16().eval()
    subscriber = WeightSubscriber(model.named_parameters())
    for version in range(VERSIONS + 1):
        if rank == 1:
            broadcast_patch(None, 0, group, subscriber)
        while rank == 2 and subscriber.version != version:
            try:
                subscriber.update(folder)
            except FileNotFoundError:  # before the first full copy
                time.sleep(0.1)
        report(model, version)


@torch.no_grad()
def report(model, version, text=""):
    """Compare all ranks' weights, and print `text` and the losses on rank 0. Collective."""
    flat = torch.cat([weight.flatten().bfloat16() for weight in model.parameters()])
    bits = flat.view(torch.uint8).numpy().tobytes()
    loss = None if model.training else model(texts()[-64:]).item()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (hashlib.sha256(bits).digest(), loss))
    if dist.get_rank() == 0:
        equal = "equal" if len({digest for digest, _ in gathered}) == 1 else "different"
        losses = " and ".join(f"{loss:.4f}" for _, loss in gathered[1:])
        print(f"version {version}: {text}, {equal} bits on all ranks, losses {losses}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    torch.manual_seed(0)
    model = Transformer()
    with tempfile.TemporaryDirectory() as name:
        folders = [name]
        dist.broadcast_object_list(folders, 0)
        if rank == 0:
            publish(model, folders[0], group)
        else:
            receive(model, rank, folders[0], group)
        dist.barrier()  # keeps the folder until rank 2 has read it
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    main()
