"""Every op once on small inputs, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python bench/gpu/sanitize.py

Without torch's cache every tensor is an allocation of its own: an access past its end shows.
"""

import torch
from common import calls, gpu_backends

NUMEL = 2 * 16384 + 77  # three blocks, the last of them short and not a whole vector
ROWS = 33


def main() -> None:
    ops = gpu_backends()["cuda"]
    for call in calls(0, NUMEL, ROWS):
        call.on("cuda").run(ops)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
