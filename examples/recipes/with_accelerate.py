"""DCT in a Hugging Face Accelerate training: the prepared model is a DDP, and takes the hook.

    torchrun --nproc-per-node 2 examples/recipes/with_accelerate.py

Needs `pip install accelerate`. Its DistributedDataParallelKwargs(comm_hook=...) knows torch's hooks
by name, no others. Prints the loss of the first and the last step, and what was sent.
"""

import gc

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dct_parallel import DCTState, dct_hook


def train():
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    x = torch.randn(6400, 128)
    data = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True).tanh()), batch_size=64)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    state = DCTState(model, density=0.01, grad_scaler=accelerator.scaler)  # None but for float16
    model.register_comm_hook(state, dct_hook)

    losses = []
    for _ in range(4):
        for x, y in data:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    if accelerator.is_main_process:
        stats = state.stats()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {stats['step']} steps")
        print(f"sent {stats['density']:.2%} of the entries, {stats['wire_bytes']:,} bytes a step")
    state.close()


def main():
    train()
    gc.collect()  # the model ends before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
