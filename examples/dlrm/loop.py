"""One run: train one model in one mode from one seed, then test it."""

import argparse
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dct_embeddings import DynamicFeatureRows
from dct_parallel import DCTState
from dct_parallel.exchange import RECENT_STEPS

from . import checkpoint
from .data.dataset import Dataset
from .data.features import Rows
from .errors import UsageError
from .models.dlrm import DLRM
from .models.factorised import FACTORISED
from .modes import FIXED_DENSITY, MODES, START_STEP
from .optimizers import make_optimizers
from .parallel import distribute, make_sync
from .ranks import from_all_ranks
from .traffic import Traffic

TEST_BATCH = 8192
Save = Callable[[dict], None]


class Scores(NamedTuple):
    """Of predicted probabilities; calibration is their mean over the labels'."""

    auc: float | None = None
    log_loss: float | None = None
    calibration: float | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run gave; scores on rank 0 only.

    Attributes:
        seed: of weights and batches.
        auc, log_loss, calibration: on the test rows, see `Scores`.
        validation_auc, validation_log_loss: on the validation rows, None where there are none.
        density_mean: entries sent over entries compressed, over the compressed steps; None for a
            mode that sends none.
        loss: float64 [steps], mean over ranks of the training loss.
        step_ms: float64 [steps], this rank's time from batch to updated weights.
        wire_bytes: float64 [steps], sent in all collectives, mean over ranks; see `Traffic`.
        wire_bytes_max: the same of the rank that sends most.
        weights: a digest over all ranks' weights.
        density: (step, mean since the step before it in this list) pairs.
        purposes: of sharded tables the parts of wire_bytes, of a mesh the bytes inside a node; see
            `Traffic`; float64 [steps] each. What is flushed after the last step is in none.
        purposes_max: the same, each of the rank that sends most.
    """

    seed: int
    auc: float | None
    log_loss: float | None
    density_mean: float | None
    loss: np.ndarray
    step_ms: np.ndarray
    wire_bytes: np.ndarray
    wire_bytes_max: np.ndarray
    weights: str
    density: list[tuple[int, float]]
    purposes: dict[str, np.ndarray]
    purposes_max: dict[str, np.ndarray]
    validation_auc: float | None = None
    validation_log_loss: float | None = None
    calibration: float | None = None

    def summary(self) -> dict[str, object]:
        """The numbers of this run, from the steps after compression starts; JSON."""
        return {
            "seed": self.seed,
            "auc": self.auc,
            "log_loss": self.log_loss,
            "calibration": self.calibration,
            **self._validation(),
            "step_ms_median": float(np.median(self.step_ms[START_STEP:])),
            "wire_bytes_per_step_per_rank": float(np.mean(self.wire_bytes[START_STEP:])),
            "wire_bytes_per_step_max_rank": float(np.mean(self.wire_bytes_max[START_STEP:])),
            "density_mean": self.density_mean,
            "ranks_equal": True,  # a run in which they differ raises
            "weights_sha256": self.weights,
            **{
                f"{purpose}_bytes_per_step_{over}": float(np.mean(sent[START_STEP:]))
                for over, sums in (("per_rank", self.purposes), ("max_rank", self.purposes_max))
                for purpose, sent in sums.items()
            },
        }

    def _validation(self) -> dict[str, float]:
        if self.validation_auc is None:
            return {}
        return {name: getattr(self, name) for name in ("validation_auc", "validation_log_loss")}

    def saved(self) -> dict[str, object]:
        """All of it as a checkpoint may hold it, with tensors for arrays."""
        return _convert(vars(self), np.ndarray, torch.from_numpy)

    @staticmethod
    def restored(saved: dict[str, object]) -> "Run":
        """The run that `saved` gave this."""
        return Run(**_convert(saved, torch.Tensor, torch.Tensor.numpy))


def run(
    mode: str,
    seed: int,
    data: Dataset,
    options: argparse.Namespace,
    on_step: Callable[[float], None],
    saved: dict | None = None,
    save: Save | None = None,
) -> Run:
    """Train and test. Collective: every rank calls it with the same arguments but its own rows."""
    model, result = train(mode, seed, data, options, on_step, saved, save)
    if options.validation_fraction:
        auc, bce, _ = test(model, data.validation, data.train)
        result = dataclasses.replace(result, validation_auc=auc, validation_log_loss=bce)
    scores = test(model, data.test, data.train)
    if options.parallel != "data":
        model.close()
    return dataclasses.replace(result, **scores._asdict())


def train(
    mode: str,
    seed: int,
    data: Dataset,
    options: argparse.Namespace,
    on_step: Callable[[float], None],
    saved: dict | None = None,
    save: Save | None = None,
) -> tuple[nn.Module, Run]:
    """The model, and all of its run but the scores. Collective.

    Runs of one seed start from the same weights and see the same batches, whatever the mode and
    parallelism.

    Args:
        on_step: called with this rank's loss after every step.
        saved: what this rank gave to `save`; the run goes on from there, to the same end.
        save: called every `options.checkpoint_every` steps with all that this rank needs for that.

    Raises:
        UsageError: the loss became infinite or NaN.
        RuntimeError: the ranks' weights differ in the end.
    """
    torch.manual_seed(seed)
    model, ddp = distribute(_whole_model(data, options), mode, seed, options)
    exchange = MODES[mode](ddp, options)
    dct = exchange if isinstance(exchange, DCTState) else None
    optimizers = make_optimizers(model, options)
    steps_per_epoch = data.description["steps_per_epoch"]
    total = options.epochs * steps_per_epoch
    traffic = Traffic(model, None if dct is None else dct.node_group)
    losses: list[float] = []
    step_ms: list[float] = []
    density: list[tuple[int, float]] = []
    parts = {"model": model, **optimizers, "exchange": exchange}
    noted = {"losses": losses, "step_ms": step_ms, "density": density}
    noted |= {"wire": traffic.wire, **traffic.purposes}
    if saved is not None:
        _rebuild_buckets(model, data.train.take(slice(options.batch_size)))
        checkpoint.restore(saved, parts, noted)
    sync = make_sync(model, optimizers["tables"], mode, options)
    batches = batches_of(data.train, seed, steps_per_epoch, options, start=len(losses))
    with traffic:
        for step, batch in enumerate(batches, start=len(losses)):
            start = time.perf_counter()
            model.zero_grad()
            logits = model(batch.ints, batch.ids)
            traffic.forward_done()
            loss = binary_cross_entropy_with_logits(logits, batch.labels.float())
            loss.backward()
            for optimizer in optimizers.values():
                optimizer.step()
            if sync is not None:
                sync.step()
            step_ms.append(1e3 * (time.perf_counter() - start))
            # Windows that end with the last step, so that their means make up the mean of all.
            if dct is not None and (total - step - 1) % RECENT_STEPS == 0 and step >= START_STEP:
                sent = dct.stats()["density"]
                if sent is not None:  # as where no bucket is compressed
                    density.append((step + 1, sent))
            saves = save is not None and (step + 1) % options.checkpoint_every == 0
            if saves and sync is not None:
                sync.flush()
            traffic.step_done()
            losses.append(loss.item())
            if not np.isfinite(losses[step]):
                which, got = "--lr", f"{options.lr}"
                if options.embedding_lr:
                    which, got = "--lr and --embedding-lr", f"{got} and {options.embedding_lr}"
                raise UsageError(
                    f"{which} must be so small that the loss stays finite, got {got}: "
                    f"{losses[step]} at step {step}, {mode}, seed {seed}"
                )
            on_step(losses[step])
            if saves:
                save(checkpoint.capture(parts, noted))
    _check_equal(ddp)
    if sync is not None:
        sync.flush()
        _check_equal(model.tables, dist.get_world_size() // options.replicas)
    if dct is not None:
        dct.close()
    purposes = traffic.purposes.items()
    return model, Run(
        seed,
        None,
        None,
        FIXED_DENSITY.get(mode) if dct is None else _mean_density(density),
        _mean_over_ranks(np.array(losses)),
        np.array(step_ms),
        _mean_over_ranks(np.array(traffic.wire, dtype=float)),
        _max_over_ranks(np.array(traffic.wire, dtype=float)),
        _digest_of_all_ranks(model),
        density,
        {name: _mean_over_ranks(np.array(sent, dtype=float)) for name, sent in purposes},
        {name: _max_over_ranks(np.array(sent, dtype=float)) for name, sent in purposes},
    )


@torch.no_grad()
def test(model: nn.Module, rows: Rows, others: Rows) -> Scores:
    """Over `rows` of all ranks, on rank 0; of None elsewhere. Collective.

    The model is left in eval mode, in which nothing is added to it for what is new in `rows`.
    Sharded tables need as many rows on every rank: any of `others` do, and are cut off again.
    """
    model.eval()
    counts = from_all_ranks(len(rows))
    filler = others.take(torch.zeros(max(counts) - len(rows), dtype=torch.int64))
    padded = Rows.concatenate([rows, filler])
    logits = [torch.empty(0)]
    for index in torch.arange(len(padded)).split(TEST_BATCH):
        batch = padded.take(index)
        logits.append(model(batch.ints, batch.ids))
    probability = torch.sigmoid(torch.cat(logits)[: len(rows)].double())
    gathered = gather_rows(torch.stack([rows.labels, probability], dim=1).numpy())
    return Scores() if gathered is None else score(gathered[:, 0], gathered[:, 1])


def score(labels: np.ndarray, probability: np.ndarray) -> Scores:
    """Of probabilities of label 1."""
    calibration = probability.mean() / labels.mean()
    auc, loss = roc_auc_score(labels, probability), log_loss(labels, probability)
    return Scores(float(auc), float(loss), float(calibration))


def gather_rows(local: np.ndarray) -> np.ndarray | None:
    """Every rank's rows behind one another, on rank 0; None elsewhere. Collective."""
    first = dist.get_rank() == 0
    parts = [None] * dist.get_world_size() if first else None
    dist.gather_object(local, parts, dst=0)
    return np.concatenate(parts) if first else None


def _whole_model(data: Dataset, options: argparse.Namespace) -> nn.Module:
    ints, fields = data.train.ints.shape[1], data.train.ids.shape[1]
    tables = data.tables or [1] * fields  # which rows that appear in training take the place of
    if options.model == "dlrm":
        return DLRM(tables, options.embedding_dim, options.bottom, options.top, ints)
    return FACTORISED[options.model](tables, ints, options.embedding_dim, options.top)


def batches_of(
    train: Rows, seed: int, steps_per_epoch: int, options: argparse.Namespace, start: int = 0
) -> Iterator[Rows]:
    """The rank's rows in another order every epoch, a last incomplete batch left out.

    Without the first `start` batches: what comes after them depends on the seed alone.
    """
    generator = torch.Generator().manual_seed(seed * dist.get_world_size() + dist.get_rank())
    for epoch in range(options.epochs):
        order = torch.randperm(len(train), generator=generator)
        done = max(0, start - epoch * steps_per_epoch)
        for index in order.split(options.batch_size)[done:steps_per_epoch]:
            yield train.take(index)


def _rebuild_buckets(model: nn.Module, batch: Rows) -> None:
    """Bring DDP's buckets into the order in which a run has them after its first step.

    In another one sums have other roundings, and a full payload other entries.
    """
    model(batch.ints, batch.ids).sum().backward()


def _convert(value: object, kind: type, convert: Callable) -> object:
    """`value` with every `kind` in it, and in its dicts, converted."""
    if isinstance(value, dict):
        return {key: _convert(item, kind, convert) for key, item in value.items()}
    return convert(value) if isinstance(value, kind) else value


def _mean_density(windows: list[tuple[int, float]]) -> float | None:
    if not windows:
        return None
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


def _digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for part in module.modules():
        for tensor in _weights(part):
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def _weights(part: nn.Module) -> list[torch.Tensor]:
    if isinstance(part, DynamicFeatureRows):
        return [part.ids(), part.weight[: 1 + len(part)]]
    return list(part.parameters(recurse=False))


def _digest_of_all_ranks(module: nn.Module) -> str:
    return hashlib.sha256("".join(from_all_ranks(_digest(module))).encode()).hexdigest()


def _check_equal(module: nn.Module, ranks: int = 1) -> None:
    """That a rank has the same as the one `ranks` before it."""
    digests = from_all_ranks(_digest(module))
    different = [rank for rank, own in enumerate(digests) if own != digests[rank % ranks]]
    if different:
        raise RuntimeError(
            f"weights must be equal on all ranks, got different ones on ranks {different}"
        )
