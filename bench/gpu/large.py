"""Checks mask_pack and scatter_unpack with 2^31 + 5 elements: each entry is either sent or kept."""

import torch

from bench.gpu.common import F32, gpu_backends, report
from dct_kernels import payload_info, payload_layout

NUMEL, DENSITY = 2**31 + 5, 0.001
PIECE = 2**28  # tensors are compared in pieces, so that temporaries use at most 1 GiB


def wrong(ops, clean, tau, planted, passed: int, capacity: int) -> list[str]:
    residual, device = clean.clone(), clean.device
    nbytes = payload_layout(NUMEL, capacity, F32).nbytes
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    seen = torch.zeros(1, dtype=torch.int32, device=device)
    grad = torch.zeros(NUMEL, dtype=torch.bfloat16, device=device)
    ops.mask_pack(residual, grad, tau, payload, seen, capacity, F32)
    out = torch.full_like(clean, torch.nan)
    status = ops.scatter_unpack(payload.unsqueeze(0), out, capacity, F32)
    info, count = payload_info(payload[:64].cpu()), min(passed, capacity)
    pieces = list(zip(*(t.split(PIECE) for t in (out, residual, clean)), strict=True))
    # The last planted entries are packed last. They are sent if the payload has space, else kept.
    end = out if passed <= capacity else residual
    checks = {
        "seen": seen.item() == passed,
        "count": info.count == count,
        "overflow flag": info.overflow == (passed > capacity),
        "status": status.item() == 0,
        # For each entry, out or residual is +0.0, so the sum is exact.
        "sent + kept": all(torch.equal(o + r, c) for o, r, c in pieces),
        "entries sent": sum(int(o.count_nonzero()) for o, _, _ in pieces) == count,
        "first entry": out[0] == clean[0],
        "last entries": torch.equal(end[planted[1:]], clean[planted[1:]]),
    }
    return [check for check, passes in checks.items() if not passes]


def main() -> None:
    backends, failures = gpu_backends(), []
    torch.manual_seed(0)
    clean = torch.empty(NUMEL, device="cuda").normal_()
    # Plant entries above the threshold at both ends, and around the largest signed 32-bit index.
    planted = torch.tensor([0, 2**31 - 1, 2**31, NUMEL - 1], device="cuda")
    clean[planted] = torch.tensor([9.0, -9.0, 8.0, -8.0], device="cuda")
    tau = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor([1 - DENSITY / 2])).cuda()
    passed = sum(int((piece.abs() >= tau).sum()) for piece in clean.split(PIECE))
    for name, ops in backends.items():
        for capacity in (int(1.25 * DENSITY * NUMEL), passed // 2):
            found = wrong(ops, clean, tau, planted, passed, capacity)
            print(f"{name}, capacity {capacity:,}: {found or 'right'}", flush=True)
            failures += [f"{name}, capacity {capacity}: {check}" for check in found]
    report(failures, f"{NUMEL:,} elements, {passed:,} pass: none is lost, also with overflow")


if __name__ == "__main__":
    main()
