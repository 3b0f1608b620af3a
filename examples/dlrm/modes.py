"""How gradients are averaged: torch's own DDP hooks as baselines, and DCT."""

import argparse
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, dct_hook, node_mesh

START_STEP = 2  # steps before compression starts, in every mode that compresses with a state


def _dense(ddp: DistributedDataParallel, options: argparse.Namespace) -> None:
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


def _bf16(ddp: DistributedDataParallel, options: argparse.Namespace) -> None:
    # DDP looks at the name and refuses torch's bf16_compress_hook off the GPU, where it works too.
    def hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
        return default_hooks.bf16_compress_hook(group, bucket)

    ddp.register_comm_hook(None, hook)


class PowerSGD(powerSGD_hook.PowerSGDState):
    """Torch's state with what a checkpoint needs of it."""

    # Not its generator: that is asked once, at the first compressed step.
    _SAVED = ("iter", "error_dict", "p_memory_dict", "q_memory_dict")

    def state_dict(self) -> dict:
        """This rank's; not copied."""
        return {name: getattr(self, name) for name in self._SAVED}

    def load_state_dict(self, state: dict) -> None:
        """Go on from a `state_dict`."""
        for name in self._SAVED:
            setattr(self, name, state[name])


def _powersgd(ddp: DistributedDataParallel, options: argparse.Namespace) -> PowerSGD:
    state = PowerSGD(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=START_STEP
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return state


def _dct(ddp: DistributedDataParallel, options: argparse.Namespace) -> DCTState:
    state = DCTState(
        ddp,
        density=options.density,
        format=options.format,
        transport=options.transport,
        mesh=node_mesh(options.local_size, "cpu") if options.local_size > 1 else None,
        start_step=START_STEP,
        policy=options.policy,
        refresh_every=options.refresh_every,
    )
    ddp.register_comm_hook(state, dct_hook)
    return state


# Each registers its hook and returns its state, if it has one.
Mode = Callable[[DistributedDataParallel, argparse.Namespace], DCTState | PowerSGD | None]
MODES: dict[str, Mode] = {"dense": _dense, "bf16": _bf16, "powersgd": _powersgd, "dct": _dct}
# Fraction of entries sent, where a mode sends a fixed one (PowerSGD sends no entries).
FIXED_DENSITY: dict[str, float] = {"dense": 1.0, "bf16": 1.0}
