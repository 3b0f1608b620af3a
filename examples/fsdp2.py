"""FSDP2: a small sharded transformer that sends weights and gradients in quantized formats.

    torchrun --nproc-per-node 2 examples/fsdp2.py FOLDER 40
    torchrun --nproc-per-node 2 examples/fsdp2.py FOLDER 80
    torchrun --nproc-per-node 4 examples/fsdp2.py OTHER_FOLDER 80 --replicas 2

The first run stops after step 40 and saves. The second run resumes and stops after step 80. The
third run has two replicas of two shards, as for two nodes. A hook sends the gradients between the
replicas in int4. Uses GPUs with NCCL if there are any, else CPUs with gloo. Prints the bytes that a
rank sends for each module, the loss, and the sum of the weights. A single run of 80 steps in a
different folder prints exactly the same sum.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from dct_parallel import compress_fully_shard, dct_fully_shard_hook

TOKENS, LENGTH, WIDTH = 64, 32, 64


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        """Return the loss of next-token prediction."""
        x = self.embedding(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batch(step, rank, device):
    """Make samples, which differ by rank and step. The model learns the successor of each token."""
    successor = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = [torch.randint(TOKENS, (16,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append(successor[tokens[-1]])
    return torch.stack(tokens, 1).to(device)


def train(device, options):
    rank, replicas = dist.get_rank(), options.replicas
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same weights on all ranks, because fully_shard sends none
    model = Transformer().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])  # with the whole mesh, torch averages replicas
    fully_shard(model, mesh=mesh["shard"])
    shards = compress_fully_shard(model, weights=options.weights, gradients=options.gradients)
    states = {"shards": shards}
    residuals = {}  # only the hook has a state to save
    if replicas > 1:
        hook = dct_fully_shard_hook(model, mesh=mesh, format="int4")
        states["replicas"] = residuals["dct"] = hook
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    done = torch.zeros(1, dtype=torch.int64)  # number of steps
    if os.path.exists(os.path.join(options.folder, ".metadata")):
        weights, moments = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": moments, "done": done, **residuals}
        dcp.load(saved, checkpoint_id=options.folder)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=saved["optimizer"]
        )
    if rank == 0:
        print(f"starts at step {done.item()}")
        for state in states.values():
            print(state.plan())

    for step in range(done.item(), options.stop):
        optimizer.zero_grad()
        loss = model(batch(step, rank, device))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "done": done.fill_(options.stop), **residuals}
    dcp.save(saved, checkpoint_id=options.folder)
    total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
    if rank == 0:
        for name, state in states.items():
            print(f"between {name}: {state.stats()['wire_bytes']:,} bytes per step")
        print(f"stops after step {options.stop}, weights {total!r}")


def main():
    parser = argparse.ArgumentParser(
        usage="torchrun --nproc-per-node 2 examples/fsdp2.py FOLDER STOP [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    formats = {"type": lambda name: None if name == "none" else name, "default": "int8"}
    formats["help"] = "int8 (default), bfloat16, float32, or none for torch's collective"
    parser.add_argument("folder", metavar="FOLDER", help="checkpoints, shared by all ranks")
    parser.add_argument("stop", metavar="STOP", type=int, help="number of steps")
    parser.add_argument("--weights", metavar="FORMAT", **formats)
    formats["help"] += "; also int4"
    parser.add_argument("--gradients", metavar="FORMAT", **formats)
    parser.add_argument("--replicas", metavar="N", type=int, default=1, help="(default: 1)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start the ranks with torchrun")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    train(device, options)
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
