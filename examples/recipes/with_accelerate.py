"""DCT in a Hugging Face Accelerate training: the prepared model is a DDP, and takes the hook.

    torchrun --nproc-per-node 2 examples/recipes/with_accelerate.py FOLDER

Needs `pip install accelerate`. Its DistributedDataParallelKwargs(comm_hook=...) knows torch's hooks
by name, no others. Saves after every epoch; the same command again goes on from the last one in
FOLDER, bit for bit. Prints the loss of the first and the last step, what was sent, and the sum of
each rank's weights.
"""

import gc
import glob
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dct_parallel import DCTState, dct_hook

EPOCHS = 4


def train(folder):
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    x = torch.randn(6400, 128)
    data = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True).tanh()), batch_size=64)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    accelerator.register_for_checkpointing(rate)

    state = DCTState(model, format="int4", grad_scaler=accelerator.scaler)  # None but for float16
    model.register_comm_hook(state, dct_hook)

    # Accelerate saves what rank 0 holds. Residuals differ, so every rank adds a file.
    own = f"dct{accelerator.process_index}.pt"
    done = len(glob.glob(f"{folder}/epoch*/{own}"))
    if done:
        accelerator.load_state(f"{folder}/epoch{done}")
        state.load_state_dict(torch.load(f"{folder}/epoch{done}/{own}", weights_only=True))

    losses = []
    for epoch in range(done, EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        rate.step()
        accelerator.save_state(f"{folder}/epoch{epoch + 1}")
        torch.save(state.state_dict(), f"{folder}/epoch{epoch + 1}/{own}")

    if accelerator.is_main_process:
        stats = state.stats()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {stats['step']} steps")
        print(f"sent {stats['wire_bytes']:,} bytes a step")
    state.close()
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {accelerator.process_index}: weights {total!r}")


def main(folder):
    train(folder)
    gc.collect()  # the model ends before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
