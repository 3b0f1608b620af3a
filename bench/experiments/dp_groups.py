"""Trains with a process for each rank, for dp_density.py.

FSDP1 and DeepSpeed's ZeRO 2 use the process group "dct". dp_peers.py has the other optimizers.
"""

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dct_parallel import process_group
from dct_parallel.collectives import all_reduce_bytes

from . import dp_peers
from .dp_ranks import Counts

FRAMEWORKS = ("fsdp1", "zero2")


class Group(Counts):
    """`framework`: one of FRAMEWORKS, or the name of an optimizer of dp_peers.py.

    `format` is the format of the process group, or "float32" for gloo.
    """

    def __init__(self, framework: str, format: str = "float32") -> None:
        self.framework, self.format = framework, format


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, object], Tensor],
    batches: Sequence[Iterator],
    group: Group,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    update_of: Callable[[torch.optim.Optimizer], Callable[[int], None]],
    steps: int,
) -> Iterator[tuple[float, Group]]:
    """Like `dp_ranks.train`. `update_of` takes the optimizer of a process."""
    model.share_memory()
    losses, sent = torch.zeros(len(batches), steps).share_memory_(), torch.zeros(1).share_memory_()

    def work(rank: int, folder: str) -> None:
        torch.set_num_threads(1)
        backend, store = "gloo", dist.FileStore(f"{folder}/store", len(batches))
        if group.format != "float32":
            backend = process_group.NAME
            process_group.configure(format=group.format)
        dist.init_process_group(backend, store=store, rank=rank, world_size=len(batches))
        trained = copy.deepcopy(model)
        if group.framework == "fsdp1":
            cpu = torch.device("cpu")
            trained = FullyShardedDataParallel(trained, device_id=cpu, use_orig_params=True)
            optimizer, backward = optimizer_of(trained), Tensor.backward
        elif group.framework in dp_peers.NAMES:
            rate, backward = optimizer_of(trained).defaults["lr"], Tensor.backward
            optimizer = dp_peers.optimizer(group.framework, trained, rate)
        else:
            import deepspeed

            os.environ["LOCAL_RANK"] = str(rank)
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # bypasses the group
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
            inner = optimizer_of(trained)
            trained, inner, *_ = deepspeed.initialize(None, trained, inner, config=config)
            trained.param_groups = inner.param_groups
            optimizer, backward = trained, trained.backward
        update, traffic, first = update_of(optimizer), dp_peers.Traffic(len(batches)), 0
        counts = group.framework in dp_peers.NAMES
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(trained, next(batches[rank]))
            backward(loss)
            with traffic if counts and step < 2 else contextlib.nullcontext():
                update(step)
            if step == 0:
                first = traffic.sent  # and later steps send as many bytes as the second one
            losses[rank, step] = loss.detach()
        full = (trained.module if group.framework == "zero2" else trained).state_dict()
        if rank == 0:
            model.load_state_dict(full)
            compressed = sum(each["sent_bytes"] for each in process_group.stats().values())
            sent.fill_(compressed + first + (steps - 1) * (traffic.sent - first))
        dist.destroy_process_group()

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(work, (folder,), len(batches), start_method="fork")
    dense = all_reduce_bytes(sum(p.nbytes for p in model.parameters()), len(batches)) * steps
    group.sent = int(sent) or dense // (1 + (group.framework == "fsdp1"))
    yield from ((loss, group) for loss in losses.mean(0).tolist())
