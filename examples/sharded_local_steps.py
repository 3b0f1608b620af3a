"""FSDP2 inside a node and local SGD between nodes: two replicas of a model, each on two ranks.

    torchrun --nproc-per-node 4 examples/sharded_local_steps.py FOLDER 40
    torchrun --nproc-per-node 4 examples/sharded_local_steps.py FOLDER 80

Replicas train independently with AdamW. Every 10 steps, ranks that have the same shards average
these shards over the replicas. The first run stops after step 40 and saves. The second run resumes
and stops after step 80. Prints the messages of a rank, the decreasing loss, and the sum of the
weights. A single run of 80 steps in a different folder prints the same sum.
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

from dct_parallel import DCTAverager

SHARDS = 2  # on GPUs, the number of GPUs per node


def batch(step, rank):
    """Make the samples of a regression task, which differ by rank and step."""
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(4 * step + rank))
    return x, x[:, :8].sum(1, keepdim=True).tanh()


def state_to_save(mesh, model, optimizer, averager):
    """The state for DCP. Each replica has its own key, because replicas differ."""
    weights, steps = get_state_dict(model, optimizer)
    replica = f"replica{mesh.get_local_rank('replicate')}"
    return {replica: {"model": weights, "optimizer": steps}, "averager": averager.state_dict()}


def load(folder, mesh, model, optimizer, averager):
    state = state_to_save(mesh, model, optimizer, averager)
    dcp.load(state, checkpoint_id=folder)
    averager.load_state_dict(state.pop("averager"))
    (replica,) = state.values()
    set_state_dict(
        model, optimizer, model_state_dict=replica["model"], optim_state_dict=replica["optimizer"]
    )


def train(rank, folder, stop):
    replicas = dist.get_world_size() // SHARDS
    mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
    fully_shard(model[0], mesh=mesh["shard"])  # with the whole mesh, torch averages gradients
    fully_shard(model, mesh=mesh["shard"])
    averager = DCTAverager(model, period=10, process_group=mesh["replicate"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

    if os.path.exists(os.path.join(folder, ".metadata")):
        load(folder, mesh, model, optimizer, averager)
    if rank == 0:
        print(f"starts at step {averager.step}")
        print(averager.plan())

    for step in range(averager.step, stop):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        averager.average_parameters()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    dcp.save(state_to_save(mesh, model, optimizer, averager), checkpoint_id=folder)
    total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
    print(f"rank {rank} stops after step {averager.step}, weights {total!r}")


def main(folder, stop):
    dist.init_process_group("gloo")
    train(dist.get_rank(), folder, stop)
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]))
