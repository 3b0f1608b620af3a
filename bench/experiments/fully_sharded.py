"""Quality of FSDP2 with DCT between replicas: a transformer on text, 2 replicas of 2 shards.

    torchrun --nproc-per-node 4 -m experiments.fully_sharded --optimizers sgd --steps 300

The model and the text are those of dp_density.py (width 96, 3 layers, 8 x 64 characters a
rank; --text is generated if it is not there). Every block is wrapped by itself.

Methods: dense is torch's own hybrid sharding, in float32; dct:D% is the hook, with D % of the
entries sent; local:D%xH are replicas that train alone, of whose shards DCTAverager sends D % of the
changes every H steps. All methods of one seed start from the same weights and see the same batches.
Prints, for each method, the loss on the test part, by seed, its mean difference from dense of the
same seed where that is asked for first, and the bytes that a rank sends to the other replica in a
step, by formula.
"""

import argparse
import gc
import statistics
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from dct_parallel import DCTAverager, dct_fully_shard_hook, wire

from . import dp_tasks

SHARDS = 2
WARMUP_STEPS = 50  # of the rate
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, 1.0),
    "momentum": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), 0.3),
    "adamw": (torch.optim.AdamW, 2e-3),
}


def train(
    task: dp_tasks.TextTask, mesh: DeviceMesh, optimizer: str, method: str, seed: int, steps: int
) -> tuple[float, int]:
    """Test loss, and bytes to other replicas a step."""
    kind, _, rest = method.partition(":")
    percent, _, period = rest.partition("%x")
    model = task.model(seed)
    numel = sum(parameter.numel() for parameter in model.parameters())
    inside = mesh if kind == "dense" else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=inside)
    fully_shard(model, mesh=inside)

    hook = averager = None
    if kind == "dct":
        hook = dct_fully_shard_hook(model, mesh=mesh, density=float(percent.rstrip("%")) / 100)
        nbytes = hook.stats()["wire_bytes"]
    elif kind == "local":
        shards = nn.ParameterList(nn.Parameter(p.to_local()) for p in model.parameters())
        averager = DCTAverager(
            shards,
            density=float(percent) / 100,
            period=int(period),
            process_group=mesh["replicate"].get_group(),
        )
        nbytes = averager.wire_bytes // averager.period
    else:
        nbytes = wire.all_reduce_bytes(4 * numel // SHARDS, mesh["replicate"].size())

    make, rate = OPTIMIZERS[optimizer]
    updates = make(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        updates, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
    )
    batches = task.batches(seed, dist.get_rank(), dist.get_world_size())
    for _ in range(steps):
        updates.zero_grad()
        task.loss(model, next(batches)).backward()
        updates.step()
        schedule.step()
        if averager is not None:
            averager.average_parameters()
    if hook is not None:
        hook.close()
    return task.score(model, "test")["loss"], nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--methods", nargs="+", default=["dense", "dct:1%", "dct:0.5%"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--text", type=Path, default=Path("runs/text.txt"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's own mesh
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        dp_tasks.TextTask(options.text)  # which generates the text
    dist.barrier()
    task = dp_tasks.TextTask(options.text)
    shape = (dist.get_world_size() // SHARDS, SHARDS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if first:
        print("| optimizer | method | bytes a step | test loss, by seed | to dense |")
        print("|---|---|---|---|---|")
    for optimizer in options.optimizers:
        dense: list[float] = []
        for method in options.methods:
            runs = [
                train(task, mesh, optimizer, method, seed, options.steps) for seed in options.seeds
            ]
            losses = [loss for loss, _ in runs]
            dense = losses if method == "dense" else dense
            gaps = [a - b for a, b in zip(losses, dense, strict=False)]
            row = (
                optimizer,
                method,
                f"{runs[0][1]:,}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{statistics.mean(gaps):+.4f}" if gaps else "",
            )
            if first:
                print(f"| {' | '.join(row)} |", flush=True)
    gc.collect()  # models end before their group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
