"""dct_embeddings.torchrec beside TorchRec itself (make torchrec)."""

import math
import os
import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from programs import ROOT, run
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ranks import assert_same, gathered, run_ranks

pytest.importorskip("fbgemm_gpu", reason="TorchRec is in the environment of make torchrec")

from collection import allow_cpu
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    DMPCollection,
)
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan, ShardingStrategy
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dct_embeddings.torchrec import compress_dense, qcomm_codecs, replica_sync
from dct_kernels.layout import payload_layout, quantized_payload_bytes, range_bounds
from dct_parallel import RowFormat
from dct_parallel.exchange import transport as all_gather
from dct_parallel.exchange.settings import FORMATS
from wire_meter import WireMeter

TABLES, ROWS, WIDTH, BATCH, BAG, STEPS = 4, 300, 64, 16, 2, 8
CPU = torch.device("cpu")


class Model(nn.Module):
    """Of bags, or with `pooled` false of rows that it adds up itself."""

    def __init__(self, optimizer, lr, pooled=True):
        super().__init__()
        self.pooled = pooled
        config, collection = EmbeddingBagConfig, EmbeddingBagCollection
        if not pooled:
            config, collection = EmbeddingConfig, EmbeddingCollection
        tables = [
            config(name=f"t{i}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[f"f{i}"])
            for i in range(TABLES)
        ]
        self.bags = collection(device=torch.device("meta"), tables=tables)
        self.over = nn.Sequential(nn.Linear(TABLES * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
        apply_optimizer_in_backward(optimizer, self.bags.parameters(), {"lr": lr})

    def forward(self, features):
        found = self.bags(features)
        if self.pooled:
            return self.over(found.values()).squeeze(1)
        rows = [found[f"f{i}"].values().view(-1, BAG, WIDTH).sum(1) for i in range(TABLES)]
        return self.over(torch.cat(rows, dim=1)).squeeze(1)


def _prepare():
    """TorchRec's warnings are its own; it asks for torchrun's variables."""
    warnings.simplefilter("ignore")
    size = str(dist.get_world_size())
    os.environ.update(LOCAL_WORLD_SIZE=size, WORLD_SIZE=size, LOCAL_RANK=str(dist.get_rank()))


def _plan(model, shardings, sharder, ranks):
    own = construct_module_sharding_plan(
        model.bags,
        shardings,
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    return ShardingPlan(plan={"bags": own})


def _parallel(codecs=None, sharding=lambda i: table_wise(rank=i % 2), pooled=True, **settings):
    torch.manual_seed(0)
    model = Model(torch.optim.SGD, 1.0, pooled)
    kind = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    sharder = kind(qcomm_codecs_registry=codecs)
    plan = _plan(model, {f"t{i}": sharding(i) for i in range(TABLES)}, sharder, 2)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder], **settings)


def _batch(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=[f"f{i}" for i in range(TABLES)],
        values=torch.randint(ROWS, (TABLES * BATCH * BAG,), generator=generator),
        lengths=torch.full((TABLES * BATCH,), BAG, dtype=torch.int32),
    )
    return features, (features.values().view(TABLES, BATCH, BAG)[0, :, 0] % 2).float()


def _train(dmp, steps=STEPS, after=lambda step: None):
    optimizer = torch.optim.SGD([p for n, p in dmp.named_parameters() if "over" in n], lr=0.1)
    losses = []
    for step in range(steps):
        features, labels = _batch(step)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(dmp(features), labels)
        loss.backward()
        optimizer.step()
        after(step)
        losses.append(loss.item())
    return losses


def _bytes_of_rows(dmp):
    """What one rank sends of embeddings in a forward pass, and of their gradients."""
    features, labels = _batch(0)
    with WireMeter() as meter:
        logits = dmp(features)
        there = meter.take()
        binary_cross_entropy_with_logits(logits, labels).backward()
    return there, meter.take()


def _codecs(rank):
    _prepare()
    plain, floats = _parallel(), _parallel(qcomm_codecs(WIDTH, format="float32"))
    losses = _train(plain)
    assert _train(floats) == losses  # bit for bit
    few = _parallel(qcomm_codecs(WIDTH))
    assert _train(few) == pytest.approx(losses, abs=0.02) and _train(few) != losses
    # Two tables here, 16 samples there: rows of 34 bytes as int4, of 10 as sign, not of 256.
    rows = 2 * BATCH
    of_floats, of_few = map(_bytes_of_rows, (floats, few))
    # Ids, their lengths and the gradients of the dense part are among them, alike.
    assert of_floats[0] - of_few[0] == rows * (256 - 34)
    assert of_floats[1] - of_few[1] == rows * (256 - 10)
    by_id = _parallel(qcomm_codecs(WIDTH), pooled=False)
    assert _train(by_id) == pytest.approx(losses, abs=0.02)
    of_floats = _bytes_of_rows(_parallel(qcomm_codecs(WIDTH, format="float32"), pooled=False))
    of_few = _bytes_of_rows(by_id)
    assert of_floats[0] - of_few[0] == rows * BAG * (256 - 34)
    assert of_floats[1] - of_few[1] == rows * BAG * (256 - 10)
    half = _parallel(qcomm_codecs(32, format="int8"), lambda i: column_wise(ranks=[0, 1]))
    assert _train(half) == pytest.approx(losses, abs=0.02)
    text = "dct::qcomm_codecs: sharding must be table-, column- or table-column-wise, got rows on"
    with pytest.raises(ValueError, match=text):
        _train(_parallel(qcomm_codecs(WIDTH), lambda i: row_wise()))
    text = r"widths of shards, summed by rank, must be multiples of width 48, got \[128, 128\]"
    with pytest.raises(ValueError, match=text):
        _train(_parallel(qcomm_codecs(48)), 1)
    with pytest.raises(ValueError, match="dct::qcomm_codecs: format must be "):
        qcomm_codecs(WIDTH, format="int5")
    with pytest.raises(ValueError, match="dct::qcomm_codecs: format must be without a density"):
        qcomm_codecs(WIDTH, format=RowFormat(density=0.1))


def test_rows_in_few_bits():
    run_ranks(_codecs, 2, timeout=300)


def _dense_part(dmp):
    return torch.cat([p.detach().flatten() for n, p in dmp.named_parameters() if "over" in n])


def _dense(rank, folder):
    _prepare()
    dmp = _parallel(qcomm_codecs(WIDTH))
    state = compress_dense(dmp, density=0.05)
    losses = _train(dmp)
    assert losses == pytest.approx(_train(_parallel()), abs=0.05)
    assert_same(_dense_part(dmp))
    assert 0.01 < state.stats()["density"] < 0.07
    # Beside the model's, in torch.distributed.checkpoint.
    dcp.save({"model": dmp.state_dict(), "dct": state}, checkpoint_id=folder)
    residual = next(iter(state.state_dict()["ranks"].values()))["parameters"]
    saved = {name: own["residual"].clone() for name, own in residual.items()}
    assert any(tensor.any() for tensor in saved.values())
    _train(dmp, 2)
    dcp.load({"model": dmp.state_dict(), "dct": state}, checkpoint_id=folder)
    loaded = next(iter(state.state_dict()["ranks"].values()))["parameters"]
    assert all(torch.equal(loaded[name]["residual"], own) for name, own in saved.items())
    with pytest.raises(ValueError, match=r"dmp must be one whose DDP .* got dct_hook"):
        compress_dense(dmp)
    state.close()
    wrapper = DefaultDataParallelWrapper(allreduce_comm_precision="fp16")
    with pytest.raises(ValueError, match=r"has no hook yet .* got fp16_compress_hook"):
        compress_dense(_parallel(data_parallel_wrapper=wrapper))
    text = "dmp must be one whose dense part is in DistributedDataParallel .* got a Model in it"
    with pytest.raises(ValueError, match=text):
        compress_dense(_parallel(init_data_parallel=False))
    with pytest.raises(TypeError, match=r"dmp must be a DistributedModelParallel .* got Linear"):
        compress_dense(nn.Linear(1, 1))


def test_the_hook_on_the_dense_part(tmp_path):
    run_ranks(_dense, 2, str(tmp_path), timeout=300)


def _collection(shards):
    """Replicas of so many ranks each, which start from different weights."""
    torch.manual_seed(0)
    model = Model(RowWiseAdagrad, 0.1)
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=qcomm_codecs(WIDTH))
    shardings = {f"t{i}": table_wise(rank=i % shards) for i in range(TABLES)}
    plan = _plan(model, shardings, sharder, shards)
    ranks = dist.get_world_size()
    return DMPCollection(model, CPU, plan, ranks, shards, dist.group.WORLD, sharders=[sharder])


def _flat(dmp, kind):
    """This rank's weights ("weights_by_dtype") or optimizer state, and the group of replicas."""
    (ctx,) = dmp._ctxs
    (tensors,) = getattr(ctx, kind).values()
    return torch.cat([tensor.detach().flatten() for tensor in tensors]), ctx.replica_pg


def _mean(tensor, group):
    total = tensor.double()
    dist.all_reduce(total, group=group)
    return total / group.size()


_ranks = dist.get_process_group_ranks


def _require_equal(tensor, group):
    """Bitwise, among replicas."""
    ranks = _ranks(group)
    parts = gathered(tensor)
    assert all(torch.equal(parts[rank], tensor) for rank in ranks)


def _waiting(replicas, group):
    """What this rank has not sent, as its share of the replicas' sum."""
    (own,) = replicas.state_dict()["ranks"][str(dist.get_rank())].values()
    return own["residual"] + group.size() * sum(own["owner_residual"])


def _bytes_sent(settings, numel, others):
    """At a sync, of weights alone. Every replica owns a range."""
    times, ranges = (1, 1) if settings["transport"] == "all_gather" else (2, others + 1)
    longest = range_bounds(numel, ranges, 0)[1]
    if settings["density"] == 1:
        return times * others * quantized_payload_bytes(longest, settings["format"])
    capacity = math.ceil(1.25 * settings["density"] * longest)
    return times * others * payload_layout(numel, capacity, torch.bfloat16, ranges).nbytes


def _replicas(rank, folder, shards, settings):
    _prepare()
    allow_cpu()
    dmp = _collection(shards)
    replicas = replica_sync(dmp, **settings)
    state = compress_dense(dmp, density=0.05)
    _, group = _flat(dmp, "weights_by_dtype")
    _require_equal(*_flat(dmp, "weights_by_dtype"))
    waits, others = [], group.size() - 1

    def sync(step):
        if step % 2:
            return
        weights, _ = _flat(dmp, "weights_by_dtype")
        before = _mean(weights + _waiting(replicas, group), group)
        sums, _ = _flat(dmp, "optimizer_tensors_by_dtype")
        expected = _mean(sums, group)
        with WireMeter(group) as meter:
            dmp.sync()
        weights, _ = _flat(dmp, "weights_by_dtype")
        sums, _ = _flat(dmp, "optimizer_tensors_by_dtype")
        for tensor in (weights, sums):
            _require_equal(tensor, group)
        torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=0)
        # Nothing is lost: what was not delivered waits.
        waiting = _waiting(replicas, group)
        now = weights.double() + _mean(waiting, group)
        torch.testing.assert_close(now, before, rtol=0, atol=1e-6)
        ring = 2 * others * 4 * len(sums) // (others + 1)
        more = meter.take() - _bytes_sent(settings, len(weights), others) - ring
        assert more == 0 if waits else 0 <= more < 1000  # at first ranks compare settings
        waits.append(int(waiting.count_nonzero()))

    losses = _train(dmp, after=sync)
    assert len(waits) == STEPS // 2 and losses[-1] < 1
    assert max(waits) == 0 if settings.get("format") == "float32" else max(waits) > 1000
    assert_same(_dense_part(dmp))
    dmp.sync()
    whole = {"model": dmp.state_dict(), "dct": state, "replicas": replicas}
    dcp.save(whole, checkpoint_id=folder)
    waiting = _waiting(replicas, group)
    trained, _ = _flat(dmp, "weights_by_dtype")
    (sums,) = dmp._ctxs[0].optimizer_tensors_by_dtype.values()
    saved_sums = [tensor.clone() for tensor in sums]

    def go_on():  # ends between two syncs
        _train(dmp, 4, lambda step: step != 3 and dmp.sync())
        return _flat(dmp, "weights_by_dtype")[0], _waiting(replicas, group)

    first = go_on()
    dcp.load({**whole, "model": dmp.state_dict()}, checkpoint_id=folder)
    for tensor, saved in zip(sums, saved_sums, strict=True):
        tensor.copy_(saved)
    assert torch.equal(_waiting(replicas, group), waiting)
    assert torch.equal(_flat(dmp, "weights_by_dtype")[0], trained)
    assert all(map(torch.equal, go_on(), first))  # bit for bit
    other = {"ranks": {str(rank + 4): replicas.state_dict()["ranks"][str(rank)]}}
    with pytest.raises(TypeError, match=rf"dct::replica_sync: state of rank {rank} must be a dict"):
        replicas.load_state_dict(other)
    damaged = replicas.state_dict()
    damaged["ranks"][str(rank)]["0"]["residual"][0] = torch.nan
    with pytest.raises(ValueError, match=r"dct::replica_sync: residual must be .* finite numbers"):
        replicas.load_state_dict(damaged)
    weights, _ = _flat(dmp, "weights_by_dtype")
    everything = _mean(weights + _waiting(replicas, group), group)
    replicas.flush()
    weights, _ = _flat(dmp, "weights_by_dtype")
    _require_equal(weights, group)
    torch.testing.assert_close(weights.double(), everything, rtol=0, atol=1e-6)
    assert not _waiting(replicas, group).any()
    state.close()
    if settings["transport"] == "all_gather":
        _damage(dmp, replicas, group)
    _refusals(dmp)


def _damage(dmp, replicas, group):
    """Of the second replica's payload; the error of that sync is that of all later calls."""
    gather = all_gather.all_gather

    def damaging(output, *of, **options):
        work = gather(output, *of, **options)
        if work is not None:
            work.wait()
        output[1, 0] += 1
        return work

    text = f"payload of sync .* must be intact, got status .* from rank {_ranks(group)[1]} in"
    all_gather.all_gather = damaging
    with pytest.raises(RuntimeError, match=text):
        dmp.sync()
    all_gather.all_gather = gather
    load = partial(replicas.load_state_dict, {})
    for call in (dmp.sync, replicas.flush, replicas.state_dict, load):
        with pytest.raises(RuntimeError, match=text):
            call()


def _refusals(dmp):
    text = "dct::replica_sync: dmp must be one without custom_all_reduce, got ReplicaDeltas"
    with pytest.raises(ValueError, match=text):
        replica_sync(dmp)
    with pytest.raises(TypeError, match="dct::replica_sync: dmp must be a DMPCollection, got Line"):
        replica_sync(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="dct::replica_sync: density must be 1 with format int8"):
        replica_sync(dmp, density=0.1, format="int8")
    dmp._all_reduce_hook = dmp._custom_all_reduce = None
    dmp._use_sharded_relay = True
    with pytest.raises(ValueError, match="use_sharded_relay must be False: it averages past any h"):
        replica_sync(dmp)
    dmp._use_sharded_relay = False
    (ctx,) = dmp._ctxs
    ctx.sharding_strategy = ShardingStrategy.FULLY_SHARDED
    with pytest.raises(ValueError, match="sharding_strategy must be DEFAULT or PER_MODULE"):
        replica_sync(dmp)
    ctx.sharding_strategy = ShardingStrategy.DEFAULT
    ctx.hash_zch_modules = [(None, "t1")]
    with pytest.raises(ValueError, match=r"tables must be without hashed ids .* got t1"):
        replica_sync(dmp)


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("ranks", "shards", "settings"),
    [(4, 2, {"density": 0.05})] + [(3, 1, {"format": f, "density": 1}) for f in FORMATS],
)
def test_replicas_of_tables(tmp_path, ranks, shards, settings, transport):
    settings = settings | {"transport": transport}
    run_ranks(_replicas, ranks, str(tmp_path), shards, settings, timeout=400)


def test_the_recipe(tmp_path):
    printed = run(ROOT / "examples/recipes/with_torchrec.py", tmp_path)
    first, last = re.search(r"loss (\S+) -> (\S+) in 200 steps", printed).groups()
    assert float(last) < float(first) / 10
    assert re.search(r"sent 4\.\d\d% of the entries, 16,640 bytes a step", printed)
