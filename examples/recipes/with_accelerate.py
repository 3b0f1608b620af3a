"""Train with Hugging Face Accelerate and DCT: int4 gradients, local steps, or FSDP2 in int8.

    torchrun --nproc-per-node 2 examples/recipes/with_accelerate.py FOLDER
    torchrun --nproc-per-node 2 examples/recipes/with_accelerate.py FOLDER --local-steps
    torchrun --nproc-per-node 2 examples/recipes/with_accelerate.py FOLDER --fsdp2

Needs `pip install accelerate`. By default, the hook is registered on the DDP module of Accelerate.
With --local-steps, the model is prepared without DDP, and the ranks average the changes of their
weights every 20 steps. With --fsdp2, Accelerate shards the model, and ranks exchange weights and
gradients in int8. The program saves after every epoch. The same command resumes from the last epoch
in FOLDER, with bitwise equal results. It prints the loss of the first and the last step, the bytes
that were sent, and the sum of each rank's weights.
"""

import argparse
import gc
import glob
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dct_parallel import DCTAverager, DCTState, compress_fully_shard, dct_hook

EPOCHS = 3
PERIOD = 20


def make_accelerator(fsdp2):
    plugin = None
    if fsdp2:  # for transformers: the default policy, transformer_cls_names_to_wrap=["..."]
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000
        )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    if fsdp2 and accelerator.device.type == "cpu":
        # Accelerate uses the plugin only on GPUs. These lines enable the plugin on CPUs for tests.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def train(folder, local_steps, fsdp2):
    set_seed(0)
    accelerator = make_accelerator(fsdp2)
    x = torch.randn(6400, 128)
    data = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True).tanh()), batch_size=64)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    if local_steps:
        # With evaluation_mode=True, Accelerate sets device and autocast, but does not use DDP.
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer, data = accelerator.prepare(optimizer, data)
        dct = DCTAverager(model, period=PERIOD)
        parts = {"model": model, "optimizer": optimizer, "averager": dct}
    elif fsdp2:
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        dct = compress_fully_shard(model)
        parts = {}  # no residual
    else:
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        # The scaler is None without float16. DCTState needs the optimizer that Accelerate wraps.
        scaled = {"grad_scaler": accelerator.scaler, "optimizer": optimizer.optimizer}
        dct = DCTState(model, format="int4", **scaled)
        model.register_comm_hook(dct, dct_hook)
        parts = {"hook": dct}
    accelerator.print(dct.plan())
    accelerator.register_for_checkpointing(rate)

    # Accelerate saves the state of rank 0, or all shards. Each rank adds a file with the state that
    # differs between ranks.
    rank_file = f"rank{accelerator.process_index}.pt"
    done = len(glob.glob(f"{folder}/epoch*/{rank_file}"))
    if done:
        accelerator.load_state(f"{folder}/epoch{done}")
        saved = torch.load(f"{folder}/epoch{done}/{rank_file}", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    losses = []
    for epoch in range(done, EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            if local_steps:
                dct.average_parameters()
            losses.append(loss.item())
        rate.step()
        accelerator.save_state(f"{folder}/epoch{epoch + 1}")
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save(saved, f"{folder}/epoch{epoch + 1}/{rank_file}")

    if local_steps:
        dct.flush()  # now all ranks have the same weights
    else:
        dct.close()
    if accelerator.is_main_process:
        stats = dct.stats()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {stats['step']} steps")
        interval = f"every {PERIOD} steps" if local_steps else "per step"
        print(f"sent {stats['wire_bytes']:,} bytes {interval}")
    whole = [p.full_tensor() if fsdp2 else p for p in model.parameters()]
    total = sum(parameter.double().sum().item() for parameter in whole)
    print(f"rank {accelerator.process_index}: weights {total!r}")


def main(folder, local_steps, fsdp2):
    train(folder, local_steps, fsdp2)
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--local-steps", action="store_true")
    mode.add_argument("--fsdp2", action="store_true")
    main(**vars(parser.parse_args()))
