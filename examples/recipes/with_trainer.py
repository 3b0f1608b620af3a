"""Train with the Hugging Face Trainer and DCT: int4 gradients on every step, or local steps.

    torchrun --nproc-per-node 2 examples/recipes/with_trainer.py FOLDER
    torchrun --nproc-per-node 2 examples/recipes/with_trainer.py FOLDER --local-steps

Needs `pip install transformers accelerate`. By default, a callback registers the hook on the
Trainer's DDP module. With --local-steps, the DDP module exchanges nothing, and a callback averages
the changes of the ranks' weights every 20 steps. The program saves every 75 steps. The same command
resumes from the last checkpoint in FOLDER, with bitwise equal results. It prints the first and the
last loss that the Trainer logged, the bytes that were sent, and the sum of each rank's weights.
"""

import argparse
import gc
import os
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed

from dct_parallel.integrations.transformers import DCTCallback, LocalStepsCallback

PERIOD = 20


def sentences(count):
    """Make sequences that count up modulo 97 from a random start."""
    tokens = (torch.randint(97, (count, 1)) + torch.arange(16)) % 97
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(folder, local_steps):
    set_seed(0)
    os.makedirs(folder, exist_ok=True)
    config = GPT2Config(vocab_size=97, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        folder,
        max_steps=150,
        per_device_train_batch_size=32,
        learning_rate=0.003,
        lr_scheduler_type="cosine",
        save_steps=75,
        logging_steps=10,
        ddp_find_unused_parameters=False,  # True drops values sent for unused parameters
        average_tokens_across_devices=not local_steps,  # True sends token counts in every step
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=sentences(3200))
    if local_steps:
        callback = LocalStepsCallback(trainer, period=PERIOD)
    else:
        callback = DCTCallback(trainer, format="int4")
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        dct = callback.averager if local_steps else callback.state
        stats = dct.stats()
        print(dct.plan())
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {stats['step']} steps")
        interval = f"every {PERIOD} steps" if local_steps else "per step"
        print(f"sent {stats['wire_bytes'] or 0:,} bytes {interval}")
    total = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
    print(f"rank {arguments.process_index}: weights {total!r}")


def main(folder, local_steps):
    train(folder, local_steps)
    gc.collect()  # free the model before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--local-steps", action="store_true")
    main(**vars(parser.parse_args()))
