"""Checks ranks on two GPUs that never call torch.cuda.set_device, so the current device is 0."""

from itertools import chain

import torch

from bench.gpu.common import gpu_backends, report
from bench.gpu.layer import ddp
from dct_parallel.exchange.results import HostCopy
from support.ranks import run_ranks


def late_copies() -> int:
    """The number of copies from the second GPU, of 20, that were read before they arrived."""
    device, late = torch.device("cuda", 1), 0
    for step in range(20):
        with torch.cuda.device(device):
            torch.cuda._sleep(20_000_000)  # about 10 ms
        late += HostCopy(torch.full((1,), step, device=device)).tolist() != [step]
    return late


def on_its_gpu(rank: int, transport: str) -> list[torch.Tensor]:
    return ddp(rank, f"cuda:{rank}", "nccl", transport, scaled=True)


def main() -> None:
    gpu_backends()
    if torch.cuda.device_count() < 2:
        return report([], "skipped: there is only one GPU")
    failures = [f"{late} of 20 copies were read too early"] if (late := late_copies()) else []
    for transport in ("all_gather", "reduce_scatter"):
        on_cpu = run_ranks(ddp, 2, "cpu", "gloo", transport, True)
        on_gpu = run_ranks(on_its_gpu, 2, transport, timeout=60)
        pairs = zip(chain(*on_gpu), chain(*on_cpu), strict=True)
        if wrong := sum(not torch.equal(gpu, cpu) for gpu, cpu in pairs):
            failures.append(f"{transport}: {wrong} tensors differ")
    report(failures, "copies and hooks on two GPUs are correct")


if __name__ == "__main__":
    main()
