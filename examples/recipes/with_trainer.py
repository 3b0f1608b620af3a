"""DCT in a Hugging Face Trainer: a callback registers the hook with the DDP that it made.

    torchrun --nproc-per-node 2 examples/recipes/with_trainer.py FOLDER

Needs `pip install transformers accelerate`. Saves every 50 steps; the same command again goes on
from the last checkpoint in FOLDER, bit for bit. Prints the loss as it was logged first and last,
what was sent, and the sum of each rank's weights.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed

from dct_parallel import DCTState, dct_hook


class DCT(TrainerCallback):
    """The hook, and its residuals in a file per rank in each checkpoint of the Trainer's."""

    def __init__(self, trainer):
        self.trainer = trainer  # a callback is given the model without its DDP

    def on_train_begin(self, args, progress, control, **_):
        ddp, trainer = self.trainer.model_wrapped, self.trainer
        self.state = DCTState(ddp, format="int4", grad_scaler=trainer.accelerator.scaler)
        ddp.register_comm_hook(self.state, dct_hook)
        if progress.global_step:
            self.state.load_state_dict(torch.load(self.path(args, progress), weights_only=True))

    def on_save(self, args, progress, control, **_):  # on every rank
        torch.save(self.state.state_dict(), self.path(args, progress))

    def on_train_end(self, *_, **__):
        self.state.close()

    def path(self, args, progress):
        return f"{args.output_dir}/checkpoint-{progress.global_step}/dct{args.process_index}.pt"


def sentences(count):
    """Each counts up modulo 97, from a number of its own."""
    tokens = (torch.randint(97, (count, 1)) + torch.arange(16)) % 97
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(folder):
    set_seed(0)
    os.makedirs(folder, exist_ok=True)
    config = GPT2Config(vocab_size=97, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        folder,
        max_steps=100,
        per_device_train_batch_size=32,
        learning_rate=0.003,
        lr_scheduler_type="cosine",
        save_steps=50,
        logging_steps=10,
        ddp_find_unused_parameters=False,  # else DDP discards what was sent for unused ones
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=sentences(3200))
    dct = DCT(trainer)
    trainer.add_callback(dct)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {dct.state.step} steps")
        print(f"sent {dct.state.stats()['wire_bytes']:,} bytes a step")
    total = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
    print(f"rank {arguments.process_index}: weights {total!r}")


def main(folder):
    train(folder)
    gc.collect()  # the model ends before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
