"""One run: train DLRM in one mode from one seed, then test it."""

import argparse
import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from dct_embeddings import plan_shards

from .data.dataset import Dataset, batches
from .errors import UsageError
from .models.dlrm import BOTTOM, DLRM, TOP
from .models.row_exchange import row_format, rows_in
from .models.sharded import ShardedDLRM
from .modes import MODES, START_STEP
from .ranks import from_all_ranks
from .scores import Scores, evaluate
from .training import Record, require_equal_weights, train

BUCKET_MB = 1024  # one bucket, because PowerSGD can hang on gloo with several buckets
RATES = {"sgd": 0.1, "momentum": 0.01, "adamw": 0.001}  # default learning rates
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda params, lr: SGD(params, lr, fused=True),
    "momentum": lambda params, lr: SGD(params, lr, momentum=0.9, fused=True),
    "adamw": lambda params, lr: AdamW(params, lr, fused=True),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of one run.

    Attributes:
        seed: the seed of weights and batches.
        scores: scores on the test rows of all ranks.
        density: fraction of gradient entries sent in the last steps; None if mode is not "dct".
        weights: a digest of the weights of all ranks.
    """

    seed: int
    scores: Scores
    record: Record
    density: float | None
    weights: str

    def summary(self) -> dict[str, object]:
        """The results for JSON. Times and bytes exclude the steps before compression starts."""
        sent = {
            name: float(np.mean(steps[START_STEP:])) for name, steps in self.record.sent.items()
        }
        return {
            "seed": self.seed,
            **self.scores._asdict(),
            "step_ms_median": float(np.median(self.record.step_ms[START_STEP:])),
            "bytes_per_step_per_rank": sum(sent.values()),
            "bytes_by_purpose": sent,
            "density": self.density,
            "weights_sha256": self.weights,
        }


def run(
    mode: str, seed: int, data: Dataset, options: argparse.Namespace, on_step: Callable[[], object]
) -> Run:
    """Train and test. Collective: all ranks pass the same arguments, except for their rows.

    Runs with the same seed use the same initial weights and the same batches, in every mode and
    with every value of --parallel.

    Raises:
        UsageError: the run has too few steps, or the loss became infinite or NaN.
        RuntimeError: after training, replicated weights differ between ranks.
    """
    if data.description["steps"] <= START_STEP:
        raise UsageError(
            f"--rows must be enough for more than {START_STEP} steps of --batch-size "
            f"{options.batch_size}, got {data.description['steps']} steps"
        )
    torch.manual_seed(seed)
    model = DLRM(data.tables, options.embedding_dim, BOTTOM, TOP)
    groups: dict[str, dist.ProcessGroup] = {}
    if options.parallel == "data":
        model = ddp = replicated(model)
    else:
        plan = plan_shards(data.tables, dist.get_world_size())
        exchange = rows_in(row_format(mode, options))
        model = ShardedDLRM(model, plan, exchange, options.dedup)
        groups = {"ids": model.ids_group, "rows": model.rows_group}
        ddp = model.mlps = replicated(model.mlps)
    state = MODES[mode](ddp, options)
    steps = batches(data, options.batch_size, seed)
    record = train(model, make_optimizers(model, options), steps, groups, on_step)
    require_equal_weights(digest(ddp))
    density = None if state is None else state.stats()["density"]
    if state is not None:
        state.close()
    weights = hashlib.sha256("".join(from_all_ranks(digest(model))).encode()).hexdigest()
    result = Run(seed, evaluate(model, data.test, data.train), record, density, weights)
    if isinstance(model, ShardedDLRM):
        model.close()
    return result


def make_optimizers(model: nn.Module, options: argparse.Namespace) -> list[Optimizer]:
    """Make SGD with --embedding-lr for the embedding tables, and --optimizer for the MLPs.

    Tables can need a higher learning rate, because few samples of a batch use a given row.
    """
    named = dict(model.named_parameters())
    tables = [weight for name, weight in named.items() if "tables." in name]
    mlps = [weight for name, weight in named.items() if "tables." not in name]
    # A parameter group may be empty, but a list of parameters may not. Some ranks own no table.
    return [
        SGD([{"params": tables}], options.embedding_lr, fused=True),
        OPTIMIZERS[options.optimizer](mlps, options.lr),
    ]


def digest(module: nn.Module) -> str:
    """SHA-256 of the module's weights on this rank."""
    found = hashlib.sha256()
    for weight in module.parameters():
        found.update(weight.detach().numpy().tobytes())
    return found.hexdigest()


def replicated(module: nn.Module) -> DistributedDataParallel:
    """Wrap the module in DDP with one bucket."""
    return DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
