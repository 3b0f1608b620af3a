"""FSDP2: two replicas of a model, each cut over two ranks; they exchange 0.5 % of the gradients.

    torchrun --nproc-per-node 4 examples/fully_sharded.py FOLDER 40
    torchrun --nproc-per-node 4 examples/fully_sharded.py FOLDER 80

Shards of one replica would be on one node. The first run stops after step 40 and saves, the second
goes on to step 80. Prints what a rank sends for its part of each module; the loss; then the
fraction of entries that was sent, the bytes that a rank sends to the other replica in a step, and
the sum of the weights, to the last digit: one run of 80 steps, in another folder, ends the same.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dct_parallel import dct_fully_shard_hook

SHARDS = 2  # on GPUs as many as a node has


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def batch(step, rank):
    """A regression task; every rank and step has samples of its own."""
    generator = torch.Generator().manual_seed(4 * step + rank)
    x = torch.randn(32, 128, generator=generator)
    return x, x[:, :8].sum(1, keepdim=True).tanh()


def train(rank, folder, stop):
    replicas = dist.get_world_size() // SHARDS
    mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same weights everywhere: fully_shard sends none
    model = nn.Sequential(Block(128), Block(128), nn.Linear(128, 1))
    for block in model[:2]:
        fully_shard(block, mesh=mesh["shard"])  # not the whole mesh: torch would do both
    fully_shard(model, mesh=mesh["shard"])
    state = dct_fully_shard_hook(model, mesh=mesh, density=0.005)  # from here on an ordinary loop
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)

    if os.path.exists(os.path.join(folder, ".metadata")):
        weights, steps = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": steps, "dct": state}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=saved["optimizer"]
        )
    if rank == 0:
        print(f"starts at step {state.step}")
        print(state.plan())

    for step in range(state.step, stop):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    weights, steps = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": steps, "dct": state}, checkpoint_id=folder)
    total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
    if rank == 0:
        stats = state.stats()
        print(f"sent {stats['density']:.2%} of the entries, {stats['wire_bytes']:,} bytes a step")
        print(f"stops after step {state.step}, weights {total!r}")


def main(folder, stop):
    dist.init_process_group("gloo")
    train(dist.get_rank(), folder, stop)
    gc.collect()  # the model ends before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]))
