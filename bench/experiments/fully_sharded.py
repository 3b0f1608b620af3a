"""Quality with FSDP2: a transformer on generated text, 2 replicas of 2 shards.

    torchrun --nproc-per-node 4 -m bench.experiments.fully_sharded --optimizers adamw --seeds 1 2

Every block is wrapped by itself. Methods between the replicas: "dense" is torch's own hybrid
sharding, in float32; "1%" is the hook with this density; "int4" is the hook in this format;
"local:10%x10" is DCTAverager, at this density (or "local:ternaryx10", in this format) every 10
steps. All methods of one seed start from the same weights and see the same batches. Prints a JSON
line for each run: test loss, and the bytes that a rank sends to the other replica per step.
"""

import argparse
import gc
import json
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.experiments.dp_tasks import CONTEXT, Transformer, next_character_loss
from bench.provenance import describe
from dct_parallel import DCTAverager, dct_fully_shard_hook

SHARDS = 2
WARMUP_STEPS = 50  # of the rate
BATCH_TEXTS, HELD_OUT_TEXTS = 8, 400
OPTIMIZERS = {"sgd": (torch.optim.SGD, 1.0), "adamw": (torch.optim.AdamW, 2e-3)}


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


class TextTask:
    """The next character; the first 80 % are trained on, the last 10 % are the test part."""

    def __init__(self) -> None:
        text = generate_text(1_000_000)
        known = sorted(set(text))
        number = {character: i for i, character in enumerate(known)}
        encoded = torch.tensor([number[character] for character in text])
        tenth = len(encoded) // 10
        self.parts = {"train": encoded[: 8 * tenth], "test": encoded[9 * tenth :]}
        self.characters = len(known)

    def draw(self, part: str, count: int, generator: torch.Generator) -> torch.Tensor:
        text = self.parts[part]
        starts = torch.randint(0, len(text) - CONTEXT, (count,), generator=generator)
        return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def train(
    task: TextTask, mesh: DeviceMesh, optimizer: str, method: str, seed: int, steps: int
) -> tuple[float, float]:
    """Test loss, and bytes per step that a rank sends to the other replica."""
    torch.manual_seed(seed)
    model = Transformer(task.characters)
    numel = sum(parameter.numel() for parameter in model.parameters())
    inside = mesh if method == "dense" else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=inside)
    fully_shard(model, mesh=inside)

    hook = averager = None
    kind, _, local = method.partition(":")
    if kind == "local":
        what, _, period = local.partition("x")
        averager = DCTAverager(
            model,
            period=int(period),
            process_group=mesh["replicate"].get_group(),
            **_settings(what),
        )
    elif kind != "dense":
        hook = dct_fully_shard_hook(model, mesh=mesh, **_settings(method))

    make, rate = OPTIMIZERS[optimizer]
    updates = make(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        updates, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
    )
    draws = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for _ in range(steps):
        updates.zero_grad()
        next_character_loss(model, task.draw("train", BATCH_TEXTS, draws)).backward()
        updates.step()
        schedule.step()
        if averager is not None:
            averager.average_parameters()

    nbytes = 4 * numel / SHARDS  # an all-reduce of two ranks
    if averager is not None:
        nbytes = averager.stats()["wire_bytes"] / averager.period
    if hook is not None:
        nbytes = hook.stats()["wire_bytes"]
        hook.close()
    texts = task.draw("test", HELD_OUT_TEXTS, torch.Generator().manual_seed(7))
    with torch.no_grad():
        return next_character_loss(model, texts).item(), nbytes


def _settings(text: str) -> dict[str, object]:
    return {"density": float(text[:-1]) / 100} if text.endswith("%") else {"format": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--methods", nargs="+", default=["dense", "1%", "int4"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's own mesh
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        print(json.dumps(describe()), flush=True)
    task = TextTask()
    shape = (dist.get_world_size() // SHARDS, SHARDS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for optimizer in options.optimizers:
        for method in options.methods:
            for seed in options.seeds:
                loss, nbytes = train(task, mesh, optimizer, method, seed, options.steps)
                if first:
                    run = {"optimizer": optimizer, "method": method, "seed": seed}
                    print(json.dumps(run | {"loss": round(loss, 4), "bytes": nbytes}), flush=True)
    gc.collect()  # models end before their group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
