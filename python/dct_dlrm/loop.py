"""One run: train one model in one mode from one seed, then test it."""

import argparse
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from dct_parallel.data_parallel import RECENT_STEPS

from .data.dataset import Dataset
from .data.features import Rows, table_rows
from .errors import UsageError
from .models.dlrm import DLRM
from .models.hybrid import HybridDLRM
from .models.row_exchange import EXCHANGES
from .models.sharding import shard_tables
from .modes import FIXED_DENSITY, MODES, START_STEP
from .traffic import Traffic

TEST_BATCH = 8192


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run gave; scores on rank 0 only.

    Attributes:
        seed: of weights and batches.
        auc, log_loss: on the test rows.
        validation_auc, validation_log_loss: on the validation rows, None where there are none.
        density_mean: entries sent over entries compressed, over the compressed steps; None for a
            mode that sends none.
        loss: float64 [steps], mean over ranks of the training loss.
        step_ms: float64 [steps], this rank's time from batch to updated weights.
        wire_bytes: float64 [steps], sent in all collectives, mean over ranks.
        wire_bytes_max: the same of the rank that sends most.
        density: (step, mean since the step before it in this list) pairs.
        purposes: hybrid only: the parts of wire_bytes, see `Traffic`; float64 [steps] each.
    """

    seed: int
    auc: float | None
    log_loss: float | None
    density_mean: float | None
    loss: np.ndarray
    step_ms: np.ndarray
    wire_bytes: np.ndarray
    wire_bytes_max: np.ndarray
    density: list[tuple[int, float]]
    purposes: dict[str, np.ndarray]
    validation_auc: float | None = None
    validation_log_loss: float | None = None

    def summary(self) -> dict[str, object]:
        """The numbers of this run, from the steps after compression starts; JSON."""
        return {
            "seed": self.seed,
            "auc": self.auc,
            "log_loss": self.log_loss,
            **self._validation(),
            "step_ms_median": float(np.median(self.step_ms[START_STEP:])),
            "wire_bytes_per_step_per_rank": float(np.mean(self.wire_bytes[START_STEP:])),
            "wire_bytes_per_step_max_rank": float(np.mean(self.wire_bytes_max[START_STEP:])),
            "density_mean": self.density_mean,
            "ranks_equal": True,  # a run in which they differ raises
            **{
                f"{purpose}_bytes_per_step_per_rank": float(np.mean(sent[START_STEP:]))
                for purpose, sent in self.purposes.items()
            },
        }

    def _validation(self) -> dict[str, float]:
        if self.validation_auc is None:
            return {}
        return {
            "validation_auc": self.validation_auc,
            "validation_log_loss": self.validation_log_loss,
        }


def run(
    mode: str,
    seed: int,
    data: Dataset,
    options: argparse.Namespace,
    on_step: Callable[[float], None],
) -> Run:
    """Train and test. Collective: every rank calls it with the same arguments but its own rows."""
    model, result = train(mode, seed, data, options, on_step)
    if options.validation_fraction:
        auc, bce = test(model, data.validation, data.train)
        result = dataclasses.replace(result, validation_auc=auc, validation_log_loss=bce)
    auc, bce = test(model, data.test, data.train)
    if isinstance(model, HybridDLRM):
        model.close()
    return dataclasses.replace(result, auc=auc, log_loss=bce)


def train(
    mode: str,
    seed: int,
    data: Dataset,
    options: argparse.Namespace,
    on_step: Callable[[float], None],
) -> tuple[nn.Module, Run]:
    """The model, and all of its run but the scores. Collective.

    Runs of one seed start from the same weights and see the same batches, whatever the mode and
    parallelism.

    Args:
        on_step: called with this rank's loss after every step.

    Raises:
        UsageError: the loss became infinite or NaN.
        RuntimeError: the ranks' weights differ in the end.
    """
    torch.manual_seed(seed)
    model = DLRM(table_rows(options.hash_size), options.embedding_dim, options.bottom, options.top)
    if options.parallel == "hybrid":
        plan = shard_tables(table_rows(options.hash_size), dist.get_world_size())
        model = HybridDLRM(model, plan, EXCHANGES[mode](options), options.dedup)
        ddp = model.mlps = _replicated(model.mlps, options)
    else:
        ddp = model = _replicated(model, options)
    state = MODES[mode](ddp, options)
    optimizer = torch.optim.SGD(_parameter_groups(model, options), lr=options.lr, fused=True)
    steps_per_epoch = data.description["steps_per_epoch"]
    total = options.epochs * steps_per_epoch
    losses, step_ms = np.empty((2, total))
    density: list[tuple[int, float]] = []
    batches = _batches(data.train, seed, steps_per_epoch, options)
    with Traffic(model) as traffic:
        for step, batch in enumerate(batches):
            start = time.perf_counter()
            optimizer.zero_grad()
            logits = model(batch.ints, batch.ids)
            traffic.forward_done()
            loss = binary_cross_entropy_with_logits(logits, batch.labels.float())
            loss.backward()
            optimizer.step()
            step_ms[step] = 1e3 * (time.perf_counter() - start)
            # Windows that end with the last step, so that their means make up the mean of all.
            if state is not None and (total - step - 1) % RECENT_STEPS == 0 and step >= START_STEP:
                density.append((step + 1, state.stats()["density"]))
            traffic.step_done()
            losses[step] = loss.item()
            if not np.isfinite(losses[step]):
                which, got = "--lr", f"{options.lr}"
                if options.embedding_lr:
                    which, got = "--lr and --embedding-lr", f"{got} and {options.embedding_lr}"
                raise UsageError(
                    f"{which} must be so small that the loss stays finite, got {got}: "
                    f"{losses[step]} at step {step}, {mode}, seed {seed}"
                )
            on_step(losses[step])
    _check_equal(ddp)
    if state is not None:
        state.close()
    return model, Run(
        seed,
        None,
        None,
        FIXED_DENSITY.get(mode) if state is None else _mean_density(density),
        _mean_over_ranks(losses),
        step_ms,
        _mean_over_ranks(np.array(traffic.wire, dtype=float)),
        _max_over_ranks(np.array(traffic.wire, dtype=float)),
        density,
        {
            purpose: _mean_over_ranks(np.array(sent, dtype=float))
            for purpose, sent in traffic.purposes.items()
        },
    )


@torch.no_grad()
def test(model: nn.Module, rows: Rows, others: Rows) -> tuple[float | None, float | None]:
    """(AUC, log loss) over `rows` of all ranks, on rank 0; None elsewhere. Collective.

    A hybrid model needs as many rows on every rank: any of `others` do, and are cut off again.
    """
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(rows))
    filler = others.take(torch.zeros(max(counts) - len(rows), dtype=torch.int64))
    padded = Rows.concatenate([rows, filler])
    logits = [torch.empty(0)]
    for index in torch.arange(len(padded)).split(TEST_BATCH):
        batch = padded.take(index)
        logits.append(model(batch.ints, batch.ids))
    probability = torch.sigmoid(torch.cat(logits)[: len(rows)].double())
    gathered = gather_rows(torch.stack([rows.labels, probability], dim=1).numpy())
    return (None, None) if gathered is None else score(gathered[:, 0], gathered[:, 1])


def score(labels: np.ndarray, probability: np.ndarray) -> tuple[float, float]:
    """(AUC, log loss) of probabilities of label 1."""
    return float(roc_auc_score(labels, probability)), float(log_loss(labels, probability))


def gather_rows(local: np.ndarray) -> np.ndarray | None:
    """Every rank's rows behind one another, on rank 0; None elsewhere. Collective."""
    first = dist.get_rank() == 0
    parts = [None] * dist.get_world_size() if first else None
    dist.gather_object(local, parts, dst=0)
    return np.concatenate(parts) if first else None


def _parameter_groups(model: nn.Module, options: argparse.Namespace) -> list[dict]:
    """Tables have a learning rate of their own: few samples of a batch touch a row of theirs."""
    named = dict(model.named_parameters())
    tables = [named[name] for name in named if "tables." in name]
    others = [named[name] for name in named if "tables." not in name]
    return [{"params": tables, "lr": options.embedding_lr or options.lr}, {"params": others}]


def _replicated(module: nn.Module, options: argparse.Namespace) -> DistributedDataParallel:
    return DistributedDataParallel(
        module, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True
    )


def _batches(
    train: Rows, seed: int, steps_per_epoch: int, options: argparse.Namespace
) -> Iterator[Rows]:
    """The rank's rows in another order every epoch, a last incomplete batch left out."""
    generator = torch.Generator().manual_seed(seed * dist.get_world_size() + dist.get_rank())
    for _ in range(options.epochs):
        order = torch.randperm(len(train), generator=generator)
        for index in order.split(options.batch_size)[:steps_per_epoch]:
            yield train.take(index)


def _mean_density(windows: list[tuple[int, float]]) -> float:
    ends = [START_STEP, *(end for end, _ in windows)]
    return float(np.average([density for _, density in windows], weights=np.diff(ends)))


def _mean_over_ranks(values: np.ndarray) -> np.ndarray:
    mean = torch.from_numpy(values.copy())
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).numpy()


def _max_over_ranks(values: np.ndarray) -> np.ndarray:
    most = torch.from_numpy(values.copy())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.numpy()


def _check_equal(model: nn.Module) -> None:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RuntimeError(f"weights must be equal on all ranks, got others on ranks {different}")
