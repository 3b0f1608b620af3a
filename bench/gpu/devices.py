"""Checks ranks on two GPUs that never call torch.cuda.set_device, so the current device is 0."""

from itertools import chain

import torch

from bench.gpu.common import gpu_backends, report
from bench.gpu.layer import ddp
from dct_parallel.exchange.results import HostCopy
from support.ranks import run_ranks


def is_late(step: int) -> bool:
    """Whether a copy from the second GPU is read before it has arrived."""
    with torch.cuda.device(1):
        torch.cuda._sleep(20_000_000)  # about 10 ms
    return HostCopy(torch.full((1,), step, device="cuda:1")).tolist() != [step]


def on_its_gpu(rank: int, transport: str) -> list[torch.Tensor]:
    return ddp(rank, f"cuda:{rank}", "nccl", transport, scaled=True)


def main() -> None:
    gpu_backends()
    if torch.cuda.device_count() < 2:
        report([], "skipped: there is only one GPU")
    late = sum(map(is_late, range(20)))
    failures = [f"{late} of 20 copies were read too early"] if late else []
    for transport in ("all_gather", "reduce_scatter"):
        on_cpu = run_ranks(ddp, 2, "cpu", "gloo", transport, True)
        on_gpu = run_ranks(on_its_gpu, 2, transport, timeout=60)
        if not all(map(torch.equal, chain(*on_gpu), chain(*on_cpu))):
            failures.append(f"{transport}: tensors differ")
    report(failures, "copies and hooks on two GPUs are correct")


if __name__ == "__main__":
    main()
