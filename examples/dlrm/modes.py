"""Methods that average gradients with DDP: torch's hooks as baselines, and DCT."""

import argparse
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, dct_hook

START_STEP = 2  # steps before PowerSGD and DCT start to compress


def _dense(ddp: DistributedDataParallel, options: argparse.Namespace) -> None:
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


def _bf16(ddp: DistributedDataParallel, options: argparse.Namespace) -> None:
    # DDP refuses torch's bf16_compress_hook on the CPU because of the hook's name.
    def hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
        return default_hooks.bf16_compress_hook(group, bucket)

    ddp.register_comm_hook(None, hook)


def _powersgd(ddp: DistributedDataParallel, options: argparse.Namespace) -> None:
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=START_STEP
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _dct(ddp: DistributedDataParallel, options: argparse.Namespace) -> DCTState:
    state = DCTState(
        ddp,
        density=options.density,
        format=options.format,
        start_step=START_STEP,
        refresh_every=options.refresh_every,
    )
    ddp.register_comm_hook(state, dct_hook)
    return state


# Each function registers a hook. _dct also returns the state of the hook.
MODES: dict[str, Callable[[DistributedDataParallel, argparse.Namespace], DCTState | None]] = {
    "dense": _dense,
    "bf16": _bf16,
    "powersgd": _powersgd,
    "dct": _dct,
}
