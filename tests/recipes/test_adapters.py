"""The adapters for the HF Trainer and Lightning in the ways that these frameworks are used."""

import glob
import importlib
import io
import logging
import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from support.forked import run_forked
from support.programs import run_as_torchrun

STEPS, SAVE = 6, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x, labels=None):
        out = self.last(self.second(self.first(x).tanh()).tanh())
        return {"loss": (out - labels).square().mean(), "logits": out}


def _rows():
    x = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum().sin().view(1)} for row in x]


def _trainer(folder, trainer=None, **arguments):
    from transformers import Trainer, TrainingArguments

    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "ddp_find_unused_parameters": False,
        "average_tokens_across_devices": False,
        "save_strategy": "steps",
        "save_steps": SAVE,
        "logging_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "ddp_timeout": 60,
    }
    arguments = TrainingArguments(folder, **settings | arguments)
    return (trainer or Trainer)(Net(), arguments, train_dataset=_rows(), eval_dataset=_rows())


def _weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class _Told:
    """Collects warnings and log messages of this package."""

    def __enter__(self):
        self._log = io.StringIO()
        self._handler = logging.StreamHandler(self._log)
        logging.getLogger("dct").addHandler(self._handler)
        self._warnings = warnings.catch_warnings(record=True)
        self._caught = self._warnings.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error):
        self._warnings.__exit__(*error)
        logging.getLogger("dct").removeHandler(self._handler)
        self.warned = [t for w in self._caught if (t := str(w.message)).startswith("DCT: ")]
        self.logged = [t for t in self._log.getvalue().splitlines() if t.startswith("DCT: ")]


def _hook_of_transformers(folder):
    from transformers import Trainer
    from transformers.trainer_utils import HPSearchBackend

    from dct_parallel.integrations.transformers import DCTCallback

    rank = int(os.environ["RANK"])

    # Training without the callback, and then with it.
    _trainer(f"{folder}/a", max_steps=SAVE).train()
    trainer = _trainer(f"{folder}/a")
    callback = DCTCallback(trainer, format="int4")
    trainer.add_callback(callback)
    with _Told() as told:
        trainer.train(resume_from_checkpoint=f"{folder}/a/checkpoint-{SAVE}")
    (text,) = told.warned
    assert f"checkpoint-{SAVE}/dct{rank}.pt has no state of this adapter" in text
    assert callback.state.step == STEPS - SAVE
    numel = _weights(trainer.model).numel()
    fewer = 4 * numel / callback.state.stats()["wire_bytes"]
    line = f"DCT: int4, {fewer:.1f}x fewer bytes per step than an all-reduce in float32, "
    assert told.logged == ([line + f"{fewer / 2:.1f}x fewer than in bfloat16"] if rank == 0 else [])

    # Again in the same process, with the same DDP.
    ddp, first = trainer.model_wrapped, callback.state
    with _Told() as told:
        trainer.train()
        ends = [_weights(trainer.model)]
        trainer.train(resume_from_checkpoint=f"{folder}/a/checkpoint-{SAVE}")
        ends.append(_weights(trainer.model))
    assert trainer.model_wrapped is ddp and callback.state is not first
    assert not told.warned and not told.logged  # the state was saved, and the log is once
    assert torch.equal(*ends)
    assert callback.state.stats()["step"] == STEPS

    # A compiled DDP, in a folder that rank 0 creates late.
    class Slow(Trainer):
        def save_model(self, folder, **options):
            rank or torch.distributed.distributed_c10d._get_default_store().wait(["saved"])
            super().save_model(folder, **options)

    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "save_only_model": True}
    compiled |= {"max_steps": SAVE, "ddp_find_unused_parameters": True}
    trainer = _trainer(f"{folder}/b", Slow, **compiled)
    callback = DCTCallback(trainer, format="int8")
    saved = callback.on_save

    def save(*arguments, **more):
        saved(*arguments, **more)
        rank and torch.distributed.distributed_c10d._get_default_store().set("saved", "")

    callback.on_save = save
    trainer.add_callback(callback)
    with _Told() as told:
        trainer.train()
    assert callback.state.step == SAVE
    (text,) = told.warned
    assert text.startswith("DCT: with find_unused_parameters=True, DDP discards the entries ")
    assert rank or told.logged[0].startswith("DCT: int8, ")
    ends.append(_weights(trainer.model))

    # A trial of a hyperparameter search.
    trainer = _trainer(f"{folder}/c", max_steps=SAVE)
    trainer.add_callback(DCTCallback(trainer, format="int4"))
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trial = SimpleNamespace(number=5)
    trainer._hp_search_setup = lambda _: setattr(trainer, "_trial", trial)
    trainer.train()
    assert os.path.exists(f"{folder}/c/run-5/checkpoint-{SAVE}/dct{rank}.pt")
    return ends


def test_hook_in_the_trainer(tmp_path):
    pytest.importorskip("transformers", reason="transformers is in the environment of make recipes")
    ends = run_as_torchrun(_hook_of_transformers, 2, str(tmp_path))
    assert all(map(torch.equal, *ends))


def _local_steps_of_transformers(folder):
    from safetensors.torch import load_file
    from transformers import TrainerCallback

    from dct_parallel.integrations.transformers import LocalStepsCallback

    class Stop(TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            if state.global_step == 5:
                raise KeyboardInterrupt

    # "greater_is_better" makes the first checkpoint the best. It is saved between averagings.
    best = {"eval_strategy": "steps", "eval_steps": SAVE, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = _trainer(folder, **best, torch_compile=True, torch_compile_backend="eager")
    callback = LocalStepsCallback(trainer, period=4)
    trainer.add_callback(callback)
    trainer.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Stop)
    ddp = trainer.model_wrapped._orig_mod
    trainer.train()
    assert ddp.require_backward_grad_sync  # as before the training
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{SAVE}")
    saved = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    found = trainer.model.state_dict()
    assert saved and all(torch.equal(value, found[name]) for name, value in saved.items())
    return _weights(trainer.model)


def test_local_steps_in_the_trainer_end_with_the_best_weights(tmp_path):
    pytest.importorskip("transformers", reason="transformers is in the environment of make recipes")
    assert torch.equal(*run_as_torchrun(_local_steps_of_transformers, 2, str(tmp_path)))


def _module(optimizers=1, manual=False):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = Net(), not manual

        def training_step(self, batch, index):
            loss = self.net(**batch)["loss"]
            if manual:
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def validation_step(self, batch, index):
            self.log("loss", self.net(**batch)["loss"], sync_dist=True)

        def configure_optimizers(self):
            return [torch.optim.AdamW(self.parameters(), lr=0.01) for _ in range(optimizers)]

    return Module()


def _fit(folder, strategy="ddp", module=None, resume=None, validates=False, **settings):
    """Train 6 batches, or resume. With `validates`, save a checkpoint without training."""
    import lightning

    trainer = lightning.Trainer(
        devices=settings.pop("devices", 2),
        accelerator="cpu",
        strategy=strategy,
        max_steps=settings.pop("max_steps", STEPS),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    module = module or _module()
    data = torch.utils.data.DataLoader(_rows(), batch_size=8)
    if validates:
        trainer.validate(module, data, verbose=False)
    else:
        trainer.fit(module, data, ckpt_path=resume)
    return trainer, module


def _lightning(folder):
    from dct_parallel.integrations.lightning import DCTCallback, LocalStepsStrategy

    rank = int(os.environ["RANK"])

    def hook():
        return DCTCallback(format="int4")

    # Checkpoints before a training, and of a training without the adapter.
    plain, _ = _fit(f"{folder}/a", max_steps=SAVE)
    plain.save_checkpoint(f"{folder}/a/plain.ckpt")
    for number, local_steps in enumerate((False, True)):
        callbacks = [] if local_steps else [hook()]

        def strategy(local_steps=local_steps):
            return LocalStepsStrategy(period=2) if local_steps else "ddp"

        trainer, _ = _fit(f"{folder}/b{number}", strategy(), validates=True, callbacks=callbacks)
        trainer.save_checkpoint(f"{folder}/b{number}/validated.ckpt")
        assert sorted(os.listdir(f"{folder}/b{number}")) == ["validated.ckpt"]
        resume = {"resume": f"{folder}/a/plain.ckpt", "callbacks": callbacks}
        with _Told() as told:
            trainer, module = _fit(f"{folder}/c{number}", strategy(), **resume)
        (text,) = told.warned
        assert "has no state of this adapter" in text and trainer.global_step == STEPS
        assert bool(told.logged) == (callbacks != [] and rank == 0)
    assert trainer.strategy.averager.stats()["step"] == STEPS - SAVE
    trainer.save_checkpoint(f"{folder}/all.ckpt")
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    own = f"{folder}/all.ckpt.1" if rank else f"{folder}/all.ckpt"
    assert "averager" in torch.load(own, weights_only=False)
    assert "averager" not in torch.load(f"{folder}/weights.ckpt", weights_only=False)
    assert len(glob.glob(f"{folder}/*.ckpt*")) == 3

    # Training again, with the same module and the same callback.
    callbacks = [hook()]
    for _ in range(2):
        _, module = _fit(f"{folder}/d", module=module, callbacks=callbacks)
        assert callbacks[0].state.stats()["step"] == STEPS

    # Two optimizers that step in every batch.
    strategy = LocalStepsStrategy(period=2)
    _, other = _fit(f"{folder}/e", strategy, _module(2, manual=True), max_steps=2 * STEPS)
    assert strategy.averager.stats()["step"] == STEPS
    return torch.cat([_weights(module), _weights(other)])


def test_hook_and_local_steps_in_lightning(tmp_path):
    pytest.importorskip("lightning", reason="lightning is in the environment of make recipes")
    assert torch.equal(*run_as_torchrun(_lightning, 2, str(tmp_path)))


def test_arguments_of_the_strategy():
    pytest.importorskip("lightning", reason="lightning is in the environment of make recipes")
    from dct_parallel.integrations.lightning import LocalStepsStrategy

    strategy = LocalStepsStrategy(period=3, process_group_backend="gloo", start_method="fork")
    assert strategy.process_group_backend == "gloo" and strategy._start_method == "fork"
    for unknown in ({"ddp_comm_hook": print}, {"find_unused_parameters": True}, {"periods": 2}):
        text = rf"dct::LocalStepsStrategy: arguments must be .*, got {next(iter(unknown))}"
        with pytest.raises(TypeError, match=text):
            LocalStepsStrategy(period=3, **unknown)


def _alone(framework, folder):
    adapters = importlib.import_module(f"dct_parallel.integrations.{framework}")
    callbacks = []
    with _Told() as told:
        if framework == "transformers":
            trainer = _trainer(folder)
            callbacks = [adapters.DCTCallback(trainer), adapters.LocalStepsCallback(trainer)]
            for callback in callbacks:
                trainer.add_callback(callback)
            trainer.train()
        else:
            callbacks = [adapters.DCTCallback()]
            trainer, _ = _fit(folder, callbacks=callbacks, strategy="auto", devices=1)
            trainer.save_checkpoint(f"{folder}/x.ckpt")
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
            strategy = adapters.LocalStepsStrategy(period=2)
            trainer, _ = _fit(folder, strategy, devices=1)
            callbacks.append(strategy)
    assert trainer.global_step if framework == "lightning" else trainer.state.global_step == STEPS
    assert len(told.warned) == 2 and not told.logged
    assert all(text.startswith("DCT: there is only one process") for text in told.warned)
    first, second = callbacks
    assert first.state is None and second.averager is None


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_one_process(framework, tmp_path):
    pytest.importorskip(framework, reason=f"{framework} is in the environment of make recipes")
    run_forked(_alone, [(framework, str(tmp_path))], timeout=120)
