"""Runs a function on several gloo ranks: every test here is a few processes that must agree."""

import gc
import multiprocessing
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_context = multiprocessing.get_context("forkserver")
# Imported once, in the process that all ranks are forked from. DDP's constructor imports dynamo.
_context.set_forkserver_preload(
    ["dct_parallel", "pytest", "torch._dynamo", "torch.distributed.fsdp"]
)


def run_ranks(function, world_size, *args, timeout=120):
    """[function(rank, *args) on rank 0, 1, ...]; warnings are errors there.

    Raises with the traceback of every rank that failed; kills what is left after `timeout` seconds,
    or once a rank has failed and the others had 10 more to do so.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _context.Process(target=_rank, args=(function, rank, world_size, folder, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        running = list(processes)
        while running and time.monotonic() < deadline:
            wait([p.sentinel for p in running], timeout=deadline - time.monotonic())
            running = [p for p in running if p.exitcode is None]
            if any(p.exitcode for p in processes):
                deadline = min(deadline, time.monotonic() + 10)
        for process in running:
            process.kill()
        for process in processes:
            process.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
        codes = [process.exitcode for process in processes]
        if errors or any(codes):
            raise RuntimeError(f"exit codes {codes} (-9: killed, it hung)\n" + "\n".join(errors))
        results = [Path(folder, f"result{rank}") for rank in range(world_size)]
        return [torch.load(result, weights_only=False) for result in results]


def _rank(function, rank, world_size, folder, args):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    try:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = function(rank, *args)
        torch.save(result, f"{folder}/result{rank}")
        # Nobody leaves while others may still talk to it; a barrier could lose its last message.
        store.set(f"done{rank}", "")
        store.wait([f"done{other}" for other in range(world_size)])
        gc.collect()  # models end before their group
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise SystemExit(1) from None


class Dictated(nn.Module):
    """A model whose parameters' gradients are whatever it is called with."""

    def __init__(self, sizes):
        super().__init__()
        self.p = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, *grads):
        return sum((p * g).sum() for p, g in zip(self.p, grads, strict=True))


def ddp(module, **kwargs):
    """DDP with buckets of a few thousand elements."""
    return DistributedDataParallel(module, bucket_cap_mb=0.02, **kwargs)


def gathered(tensor):
    """Every rank's `tensor`, in rank order."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def mlp(width=64, depth=4):
    """Big enough for several buckets, with weights to compress and biases to leave dense."""
    torch.manual_seed(1234)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def batch(step, rank, width=64, rows=16):
    """A regression batch that differs between steps and ranks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, width, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def entry(state_dict):
    """The one rank's part of a `DCTState.state_dict()`."""
    (only,) = state_dict["ranks"].values()
    return only


def owed(state_dict):
    """{parameter: what this rank still owes to the sum of the ranks' gradients}, both residuals."""
    own = entry(state_dict)
    ranks = own["world_size"]
    return {
        name: parts["residual"] + ranks * parts.get("owner_residual", 0)
        for name, parts in own["parameters"].items()
    }


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
