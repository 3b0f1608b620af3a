"""mask_pack and scatter_unpack of 2**31 + 5 elements: what was sent and stayed is all there was.

python bench/gpu/large.py
"""

import torch
from common import F32, gpu_backends, report

from dct_kernels import payload_info, payload_layout

NUMEL = 2**31 + 5
BLOCK = 16384
DENSITY = 0.001
PIECE = 2**28  # looked at in pieces: temporaries of 1 GiB at most


def main() -> None:
    backends, failures = gpu_backends(), []
    torch.manual_seed(0)
    clean = torch.empty(NUMEL, device="cuda").normal_()
    # The ends, and both sides of the largest signed 32-bit index, hold entries that pass.
    planted = torch.tensor([0, 2**31 - 1, 2**31, NUMEL - 1], device="cuda")
    clean[planted] = torch.tensor([9.0, -9.0, 8.0, -8.0], device="cuda")
    tau = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor([1 - DENSITY / 2])).cuda()
    passed = sum(int((piece.abs() >= tau).sum()) for piece in clean.split(PIECE))
    for name, ops in backends.items():
        for capacity in (int(1.25 * DENSITY * NUMEL), passed // 2):
            wrong = check(ops, clean, tau, planted, passed, capacity)
            print(f"{name}, capacity {capacity:,}: {wrong or 'right'}", flush=True)
            failures += [f"{name}, capacity {capacity}: {what}" for what in wrong]
    report(failures, f"{NUMEL:,} elements, {passed:,} pass: conserved, with and without overflow")


def check(ops, clean, tau, planted, passed: int, capacity: int) -> list[str]:
    """What is wrong, of all that must be right."""
    residual = clean.clone()
    layout = payload_layout(NUMEL, capacity, F32)
    payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
    seen = torch.zeros(1, dtype=torch.int32, device="cuda")
    segments = torch.tensor([0, NUMEL], device="cuda")
    ops.mask_pack(residual, None, segments, tau, payload, seen, capacity, F32)
    out = torch.full((NUMEL,), torch.nan, device="cuda")
    status = ops.scatter_unpack(payload.unsqueeze(0), out, capacity, F32)
    info = payload_info(payload[:64].cpu())
    count = min(passed, capacity)
    starts = payload[layout.starts : layout.positions].view(torch.int32)
    wrong = {
        "seen": seen.item() != passed,
        "count": info.count != count,
        "overflow flag": info.overflow != (passed > capacity),
        "status": status.item() != 0,
        # Either is +0.0 where the other holds the entry, so the sum is exact.
        "sent + left": not all(
            torch.equal(o + r, c)
            for o, r, c in zip(*(t.split(PIECE) for t in (out, residual, clean)), strict=True)
        ),
        "entries sent": sum(int(piece.count_nonzero()) for piece in out.split(PIECE)) != count,
        "first entry": out[planted[0]] != clean[planted[0]],
        # They are the last to be packed: sent if there was room, else left.
        "last entries": not torch.equal(
            (out if passed <= capacity else residual)[planted[1:]], clean[planted[1:]]
        ),
        # The first entries in order: none is sent after one that was left.
        "order": passed > capacity and last(out, tau) >= first(residual, tau),
        "starts": int(starts[0]) != 0 or int(starts[(NUMEL + BLOCK - 1) // BLOCK]) != count,
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]


def first(tensor: torch.Tensor, tau: torch.Tensor) -> int:
    """Index of the first entry that reaches tau."""
    for k, piece in enumerate(tensor.split(PIECE)):
        found = (piece.abs() >= tau).nonzero()
        if len(found):
            return k * PIECE + int(found[0])
    return NUMEL


def last(tensor: torch.Tensor, tau: torch.Tensor) -> int:
    return NUMEL - 1 - first(tensor.flip(0), tau)


if __name__ == "__main__":
    main()
