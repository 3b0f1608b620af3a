"""Local steps in a Hugging Face Trainer: its DDP is there, and exchanges nothing.

    torchrun --nproc-per-node 2 examples/recipes/with_trainer_local_steps.py FOLDER

Needs `pip install transformers accelerate`. Ranks train on their own, and average what their
weights changed by every 20th step. Saves every 75 steps; the same command again goes on from the
last checkpoint in FOLDER, bit for bit. Prints the loss as it was logged first and last, what was
sent, and the sum of each rank's weights.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed

from dct_parallel import DCTAverager


class LocalTrainer(Trainer):
    """The Trainer always makes a DDP: this keeps it silent, at the price of its buckets' memory."""

    def training_step(self, model, *args, **kwargs):
        with self.accelerator.no_sync(model):
            return super().training_step(model, *args, **kwargs)


class LocalSteps(TrainerCallback):
    """Averages; and saves all that ranks differ in, a file per rank in each checkpoint."""

    def on_train_begin(self, args, progress, control, model, optimizer, **_):
        self.averager = DCTAverager(model, period=20)
        self.parts = {"model": model, "optimizer": optimizer, "averager": self.averager}
        if progress.global_step:
            saved = torch.load(self.path(args, progress), weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(saved[name])

    def on_step_end(self, *_, **__):
        self.averager.average_parameters()

    def on_save(self, args, progress, control, **_):  # on every rank
        saved = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save(saved, self.path(args, progress))

    def on_train_end(self, *_, **__):
        self.averager.flush()  # all ranks have the same weights: now trainer.save_model() is right

    def path(self, args, progress):
        return f"{args.output_dir}/checkpoint-{progress.global_step}/local{args.process_index}.pt"


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
        max_steps=150,
        per_device_train_batch_size=32,
        learning_rate=0.003,
        lr_scheduler_type="cosine",
        save_steps=75,
        logging_steps=10,
        average_tokens_across_devices=False,  # or ranks count tokens together in every step
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    local = LocalSteps()
    data = sentences(3200)
    trainer = LocalTrainer(
        GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[local]
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        stats = local.averager.stats()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {stats['step']} steps")
        print(f"sent {stats['wire_bytes']:,} bytes every {local.averager.period} steps")
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
