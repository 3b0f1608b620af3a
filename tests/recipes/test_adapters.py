"""The adapters for the HF Trainer and Lightning, in ways that the recipes do not use them."""

import contextlib
import io
import logging
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers", reason="transformers is in the environment of make recipes")
pytest.importorskip("lightning", reason="lightning is in the environment of make recipes")

import lightning
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import HPSearchBackend

import dct_parallel.integrations.lightning as in_lightning
import dct_parallel.integrations.transformers as in_trainer
from dct_parallel import process_group
from support.forked import run_forked
from support.programs import run_as_torchrun
from support.ranks import warned, weights

STEPS, SAVE = 6, 3
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x, labels):
        out = self.layers(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def _rows():
    x = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum().sin().view(1)} for row in x]


@contextlib.contextmanager
def _messages():
    """Yields a list, which finally contains this package's warnings, and then its log."""
    log = io.StringIO()
    logging.getLogger("dct").addHandler(handler := logging.StreamHandler(log))
    with warned() as texts:
        yield texts
    logging.getLogger("dct").removeHandler(handler)
    texts[:] = [text.removeprefix("DCT: ") for text in (*texts, *log.getvalue().splitlines())]


def _trainer(folder, adapter=None, cls=Trainer, options=None, **changed):
    """A Trainer with the callback `adapter(trainer, **options)`, and the callback."""
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    settings |= {"ddp_find_unused_parameters": False, "average_tokens_across_devices": False}
    settings |= {"save_strategy": "steps", "save_steps": SAVE, "logging_strategy": "no"}
    settings |= {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "ddp_timeout": 60}
    arguments = TrainingArguments(folder, **settings | changed)
    trainer = cls(_Net(), arguments, train_dataset=_rows(), eval_dataset=_rows())
    callback = adapter(trainer, **options or {"format": "int4"}) if adapter else None
    if adapter:
        trainer.add_callback(callback)
    return trainer, callback


class _LateFolder(Trainer):
    """Rank 0 creates the folder of a checkpoint after rank 1 has saved its state there."""

    def save_model(self, folder, **options):
        while self.args.process_index == 0 and not os.path.exists(f"{folder}/dct1.pt"):
            pass
        super().save_model(folder, **options)


def _hook_in_the_trainer(folder):
    rank, adapter = int(os.environ["RANK"]), in_trainer.DCTCallback
    _trainer(f"{folder}/a", max_steps=SAVE)[0].train()
    checkpoint = f"{folder}/a/checkpoint-{SAVE}"  # of a training without the callback
    trainer, callback = _trainer(f"{folder}/a", adapter)
    with _messages() as texts:
        trainer.train(resume_from_checkpoint=checkpoint)
    assert texts[0].startswith(f"{checkpoint}/dct{rank}.pt has no state of this adapter")
    assert callback.state.step == STEPS - SAVE
    fewer = 4 * weights(trainer.model).numel() / callback.state.stats()["wire_bytes"]
    line = f"int4, {fewer:.1f}x fewer bytes per step than an all-reduce in float32, "
    assert texts[1:] == ([] if rank else [line + f"{fewer / 2:.1f}x fewer than in bfloat16"])

    ddp, first, ends = trainer.model_wrapped, callback.state, []
    with _messages() as texts:  # again, with the same DDP
        for resume in (None, checkpoint):
            trainer.train(resume_from_checkpoint=resume)
            ends.append(weights(trainer.model))
    assert trainer.model_wrapped is ddp and callback.state is not first and not texts
    assert torch.equal(*ends) and callback.state.stats()["step"] == STEPS

    changed = {**COMPILED, "save_only_model": True, "ddp_find_unused_parameters": True}
    trainer, callback = _trainer(f"{folder}/b", adapter, _LateFolder, max_steps=SAVE, **changed)
    with _messages() as texts:
        trainer.train()
    assert callback.state.step == SAVE
    assert texts[0].startswith("with find_unused_parameters=True, DDP discards the entries ")

    trainer, _ = _trainer(f"{folder}/c", adapter, max_steps=SAVE)
    trainer.hp_search_backend, trial = HPSearchBackend.OPTUNA, SimpleNamespace(number=5)
    trainer._hp_search_setup = lambda _: setattr(trainer, "_trial", trial)
    trainer.train()
    assert os.path.exists(f"{folder}/c/run-5/checkpoint-{SAVE}/dct{rank}.pt")
    return torch.cat(ends)


class _Interrupt(TrainerCallback):
    def on_step_end(self, arguments, state, control, **_):
        if state.global_step == 5:
            raise KeyboardInterrupt


def _local_steps_in_the_trainer(folder):
    # "greater_is_better" makes the first checkpoint the best. It is saved between averagings.
    best = {"eval_strategy": "steps", "eval_steps": SAVE, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True, **COMPILED}
    trainer, _ = _trainer(folder, in_trainer.LocalStepsCallback, options={"period": 4}, **best)
    trainer.add_callback(_Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(_Interrupt)
    ddp = trainer.model_wrapped._orig_mod
    trainer.train()
    assert ddp.require_backward_grad_sync  # as before the training
    assert trainer.state.best_model_checkpoint == f"{folder}/checkpoint-{SAVE}"
    saved = load_file(f"{folder}/checkpoint-{SAVE}/model.safetensors")
    found = trainer.model.state_dict()
    assert saved and all(torch.equal(value, found[name]) for name, value in saved.items())
    return weights(trainer.model)


class _Module(lightning.LightningModule):
    def __init__(self, optimizers=1):
        super().__init__()
        self.net, self._count = _Net(), optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch, index):
        loss = self.net(**batch)["loss"]
        if self._count > 1:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def validation_step(self, batch, index):
        self.log("loss", self.net(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self):
        return [torch.optim.AdamW(self.parameters(), lr=0.01) for _ in range(self._count)]


def _fit(folder, strategy, module, resume=None, validates=False, **changed):
    """Train or, with `validates`, only validate. Returns the Trainer."""
    settings = {"devices": 2, "max_steps": STEPS, "accelerator": "cpu", "strategy": strategy}
    settings |= {"default_root_dir": folder, "logger": False, "enable_progress_bar": False}
    settings |= {"enable_checkpointing": False, "enable_model_summary": False}
    trainer = lightning.Trainer(**settings | changed)
    data = torch.utils.data.DataLoader(_rows(), batch_size=8)
    if validates:
        trainer.validate(module, data, verbose=False)
    else:
        trainer.fit(module, data, ckpt_path=resume)
    return trainer


def _in_lightning(folder):
    rank, module = int(os.environ["RANK"]), _Module()
    plain = f"{folder}/plain.ckpt"  # of a training without the adapter
    _fit(folder, "ddp", module, max_steps=SAVE).save_checkpoint(plain)
    hook = {"callbacks": [in_lightning.DCTCallback(format="int4")]}
    for name, changed in {"hook": hook, "local": {}}.items():
        for validates in (True, False):
            strategy = "ddp" if changed else in_lightning.LocalStepsStrategy(period=2)
            with _messages() as texts:
                trainer = _fit(f"{folder}/{name}", strategy, module, plain, validates, **changed)
            trainer.save_checkpoint(f"{folder}/{name}/{validates}.ckpt")
            assert ("has no state of this adapter" in texts[0]) if not validates else not texts
    assert strategy.averager.stats()["step"] == STEPS - SAVE
    trainer.save_checkpoint(f"{folder}/local/weights.ckpt", weights_only=True)
    files = ["False.ckpt", "False.ckpt.1", "True.ckpt", "weights.ckpt"]
    assert sorted(os.listdir(f"{folder}/local")) == files
    for name in ("weights.ckpt", files[rank]):
        saved = torch.load(f"{folder}/local/{name}", weights_only=False)
        assert ("averager" in saved) == (name == files[rank])

    for _ in range(2):
        _fit(folder, "ddp", module, **hook)
        assert hook["callbacks"][0].state.stats()["step"] == STEPS
    strategy = in_lightning.LocalStepsStrategy(period=2)
    _fit(folder, strategy, other := _Module(optimizers=2), max_steps=2 * STEPS)
    assert strategy.averager.stats()["step"] == STEPS  # one step per batch
    return torch.cat([weights(module), weights(other)])


def _on_the_process_group(folder):
    """A Trainer, and Accelerate alone, keep the group "dct". int8 is close to exact reductions."""
    process_group.configure(min_bytes=1000)
    dist.init_process_group("dct")
    accelerator, found = Accelerator(cpu=True), []
    for mode in (process_group.exact, contextlib.nullcontext):
        with mode():
            trainer, _ = _trainer(folder, optim="sgd", learning_rate=0.1, save_strategy="no")
            trainer.train()
            net = _Net()
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            data = torch.utils.data.DataLoader(_rows()[accelerator.process_index :: 2], 16)
            for rows in data:
                accelerator.backward(model(**rows)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.cat([weights(trainer.model), weights(net)]))
    assert dist.get_backend() == "dct"
    assert process_group.stats()["all_reduce"]["calls"] == STEPS + 3
    change = found[0] - torch.cat(2 * [weights(_Net())])
    assert 0 < (found[1] - found[0]).norm() < 0.05 * change.norm()
    return found[1]


@pytest.mark.parametrize(
    "program",
    [_hook_in_the_trainer, _local_steps_in_the_trainer, _in_lightning, _on_the_process_group],
)
def test_adapters_on_two_ranks(program, tmp_path):
    assert torch.equal(*run_as_torchrun(program, 2, str(tmp_path)))


def _alone(folder):
    with _messages() as texts:
        for adapter in (in_trainer.DCTCallback, in_trainer.LocalStepsCallback):
            trainer, _ = _trainer(folder, adapter)
            trainer.train()
            assert trainer.state.global_step == STEPS
        hook, local = in_lightning.DCTCallback(), in_lightning.LocalStepsStrategy(period=2)
        for strategy, callbacks in (("auto", [hook]), (local, [])):
            trainer = _fit(folder, strategy, _Module(), devices=1, callbacks=callbacks)
            trainer.save_checkpoint(f"{folder}/x.ckpt")
    assert hook.state is None and local.averager is None
    assert [text.split(",")[0] for text in texts] == 4 * ["there is only one process"]


def test_one_process(tmp_path):
    run_forked(_alone, [(str(tmp_path),)], timeout=120)


def test_arguments_of_the_strategy():
    strategy = in_lightning.LocalStepsStrategy(period=3, process_group_backend="gloo")
    assert strategy.process_group_backend == "gloo"
    for unknown in ({"ddp_comm_hook": print}, {"find_unused_parameters": True}, {"periods": 2}):
        text = rf"dct::LocalStepsStrategy: arguments must be .*, got {next(iter(unknown))}"
        with pytest.raises(TypeError, match=text):
            in_lightning.LocalStepsStrategy(period=3, **unknown)
