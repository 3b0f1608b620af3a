"""Checkpoint and resume. Each rank saves its own file, because residuals differ between ranks.

    torchrun --nproc-per-node 2 examples/checkpoint.py FOLDER 10
    torchrun --nproc-per-node 2 examples/checkpoint.py FOLDER 20

The first run stops after step 10, and the second resumes and stops after step 20. Both runs
print their first step and the sum of the weights. A single run of 20 steps in a different folder
prints exactly the same sum.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, dct_hook


def train(rank, folder, stop):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
    state = DCTState(ddp, format="int4")
    ddp.register_comm_hook(state, dct_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    parts = {"model": ddp.module, "optimizer": optimizer, "dct": state}

    path = os.path.join(folder, f"rank{rank}.pt")
    if os.path.exists(path):
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    if rank == 0:
        print(f"{state.plan()}\nstarts at step {state.step}")

    for step in range(state.step, stop):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        (ddp(x) - x.mean(1, keepdim=True)).square().mean().backward()
        optimizer.step()

    os.makedirs(folder, exist_ok=True)
    torch.save({name: part.state_dict() for name, part in parts.items()}, path + ".tmp")
    os.replace(path + ".tmp", path)  # if a save is interrupted, the old file remains
    if rank == 0:
        total = sum(parameter.double().sum().item() for parameter in ddp.parameters())
        print(f"stops after step {state.step}, weights {total!r}")


def main(folder, stop):
    dist.init_process_group("gloo")
    train(dist.get_rank(), folder, stop)
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]))
