"""dct_embeddings.torchrec together with TorchRec (make torchrec)."""

import math
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from support.programs import ROOT, run
from support.ranks import assert_same, gathered, run_ranks

pytest.importorskip("fbgemm_gpu", reason="TorchRec is in the environment of make torchrec")

from collection import allow_cpu
from models import CPU, STEPS, TABLES, Model, parallel, plan_of, prepare, train
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.types import ShardingStrategy
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dct_embeddings.torchrec import compress_dense, compressed_sharders, replica_sync
from dct_kernels.layout import payload_layout, quantized_payload_bytes, range_bounds
from dct_parallel.exchange import transport as all_gather
from dct_parallel.exchange.settings import FORMATS
from wire_meter import WireMeter


def _dense_part(dmp):
    return torch.cat([p.detach().flatten() for n, p in dmp.named_parameters() if "over" in n])


def _dense(rank, folder):
    prepare()
    dmp = parallel(compressed_sharders())
    state = compress_dense(dmp, density=0.05)
    losses = train(dmp)
    assert losses == pytest.approx(train(parallel()), abs=0.05)
    assert_same(_dense_part(dmp))
    assert 0.01 < state.stats()["density"] < 0.07
    # torch.distributed.checkpoint saves and loads the state together with the model.
    dcp.save({"model": dmp.state_dict(), "dct": state}, checkpoint_id=folder)
    residual = next(iter(state.state_dict()["ranks"].values()))["parameters"]
    saved = {name: part["residual"].clone() for name, part in residual.items()}
    assert any(tensor.any() for tensor in saved.values())
    train(dmp, 2)
    dcp.load({"model": dmp.state_dict(), "dct": state}, checkpoint_id=folder)
    loaded = next(iter(state.state_dict()["ranks"].values()))["parameters"]
    assert all(torch.equal(loaded[name]["residual"], part) for name, part in saved.items())
    with pytest.raises(ValueError, match=r"dmp must be one whose DDP .* got dct_hook"):
        compress_dense(dmp)
    state.close()
    text = "dmp must be one whose dense part is in DistributedDataParallel .* got a Model in it"
    with pytest.raises(ValueError, match=text):
        compress_dense(parallel(init_data_parallel=False))


def test_the_hook_on_the_dense_part(tmp_path):
    run_ranks(_dense, 2, str(tmp_path), timeout=300)


def _collection(shards):
    """A model in replicas of `shards` ranks each."""
    torch.manual_seed(0)
    model = Model(RowWiseAdagrad, 0.1)
    sharders = compressed_sharders()
    shardings = {f"t{i}": table_wise(rank=i % shards) for i in range(TABLES)}
    plan = plan_of(model.bags, shardings, sharders[0], shards)
    ranks = dist.get_world_size()
    return DMPCollection(model, CPU, plan, ranks, shards, dist.group.WORLD, sharders=sharders)


def _flat(dmp, kind):
    """(this rank's weights ("weights_by_dtype") or optimizer state, the group of replicas)."""
    (ctx,) = dmp._ctxs
    (tensors,) = getattr(ctx, kind).values()
    return torch.cat([tensor.detach().flatten() for tensor in tensors]), ctx.replica_pg


def _mean(tensor, group):
    total = tensor.double()
    dist.all_reduce(total, group=group)
    return total / group.size()


_ranks = dist.get_process_group_ranks


def _check_equal(tensor, group):
    """Check that all replicas have bitwise equal tensors."""
    ranks = _ranks(group)
    parts = gathered(tensor)
    assert all(torch.equal(parts[rank], tensor) for rank in ranks)


def _pending(replicas, group):
    """The changes that this rank has not sent, in units of the sum over replicas."""
    (state,) = replicas.state_dict()["ranks"][str(dist.get_rank())].values()
    return state["residual"] + group.size() * sum(state["owner_residual"])


def _bytes_sent(settings, numel, others):
    """The bytes of weights that a rank sends per sync. With reduce_scatter, a rank owns a range."""
    times, ranges = (1, 1) if settings["transport"] == "all_gather" else (2, others + 1)
    longest = range_bounds(numel, ranges, 0)[1]
    if settings["density"] == 1:
        return times * others * quantized_payload_bytes(longest, settings["format"])
    capacity = math.ceil(1.25 * settings["density"] * longest)
    return times * others * payload_layout(numel, capacity, torch.bfloat16, ranges).nbytes


def _replicas(rank, folder, shards, settings):
    prepare()
    allow_cpu()
    dmp = _collection(shards)
    replicas = replica_sync(dmp, **settings)
    state = compress_dense(dmp, density=0.05)
    _, group = _flat(dmp, "weights_by_dtype")
    _check_equal(*_flat(dmp, "weights_by_dtype"))
    counts, others = [], group.size() - 1

    def sync(step):
        if step % 2:
            return
        weights, _ = _flat(dmp, "weights_by_dtype")
        before = _mean(weights + _pending(replicas, group), group)
        sums, _ = _flat(dmp, "optimizer_tensors_by_dtype")
        expected = _mean(sums, group)
        with WireMeter(group) as meter:
            dmp.sync()
        weights, _ = _flat(dmp, "weights_by_dtype")
        sums, _ = _flat(dmp, "optimizer_tensors_by_dtype")
        for tensor in (weights, sums):
            _check_equal(tensor, group)
        torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=0)
        # All changes are sent or pending.
        pending = _pending(replicas, group)
        now = weights.double() + _mean(pending, group)
        torch.testing.assert_close(now, before, rtol=0, atol=1e-6)
        ring = 2 * others * 4 * len(sums) // (others + 1)
        more = meter.take() - _bytes_sent(settings, len(weights), others) - ring
        assert more == 0 if counts else 0 <= more < 1000  # the first sync also compares settings
        counts.append(int(pending.count_nonzero()))

    losses = train(dmp, after=sync)
    assert len(counts) == STEPS // 2 and losses[-1] < 1
    assert max(counts) == 0 if settings.get("format") == "float32" else max(counts) > 1000
    assert_same(_dense_part(dmp))
    dmp.sync()
    whole = {"model": dmp.state_dict(), "dct": state, "replicas": replicas}
    dcp.save(whole, checkpoint_id=folder)
    pending = _pending(replicas, group)
    trained, _ = _flat(dmp, "weights_by_dtype")
    (sums,) = dmp._ctxs[0].optimizer_tensors_by_dtype.values()
    saved_sums = [tensor.clone() for tensor in sums]

    def resume():  # ends between two syncs
        train(dmp, 4, lambda step: step != 3 and dmp.sync())
        return _flat(dmp, "weights_by_dtype")[0], _pending(replicas, group)

    first = resume()
    dcp.load({**whole, "model": dmp.state_dict()}, checkpoint_id=folder)
    for tensor, saved in zip(sums, saved_sums, strict=True):
        tensor.copy_(saved)
    assert torch.equal(_pending(replicas, group), pending)
    assert torch.equal(_flat(dmp, "weights_by_dtype")[0], trained)
    assert all(map(torch.equal, resume(), first))  # bit for bit
    other = {"ranks": {str(rank + 4): replicas.state_dict()["ranks"][str(rank)]}}
    with pytest.raises(TypeError, match=rf"dct::replica_sync: state of rank {rank} must be a dict"):
        replicas.load_state_dict(other)
    damaged = replicas.state_dict()
    damaged["ranks"][str(rank)]["0"]["residual"][0] = torch.nan
    with pytest.raises(ValueError, match=r"dct::replica_sync: residual must be .* finite numbers"):
        replicas.load_state_dict(damaged)
    weights, _ = _flat(dmp, "weights_by_dtype")
    total = _mean(weights + _pending(replicas, group), group)
    replicas.flush()
    weights, _ = _flat(dmp, "weights_by_dtype")
    _check_equal(weights, group)
    torch.testing.assert_close(weights.double(), total, rtol=0, atol=1e-6)
    assert not _pending(replicas, group).any()
    best, _ = _flat(dmp, "weights_by_dtype")
    train(dmp, 2, lambda step: step or dmp.sync())
    (tensors,) = dmp._ctxs[0].weights_by_dtype.values()
    for tensor, part in zip(tensors, best.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view_as(tensor))
    dmp.load_state_dict(dmp.state_dict())  # the tables are then the new base
    replicas.flush()
    assert torch.equal(_flat(dmp, "weights_by_dtype")[0], best)
    state.close()
    if settings["transport"] == "all_gather":
        _damage(dmp, replicas, group)
    _refusals(dmp)


def _damage(dmp, replicas, group):
    """Damage the payload of the second replica. This sync and all later calls raise the error."""
    gather = all_gather.all_gather

    def damaging(output, *arguments, **options):
        work = gather(output, *arguments, **options)
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
    dmp._all_reduce_hook = dmp._custom_all_reduce = None
    dmp._use_sharded_relay = True
    with pytest.raises(ValueError, match="use_sharded_relay must be False, because it bypasses h"):
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
    printed = run(ROOT / "examples/recipes/with_torchrec.py", tmp_path, ranks=4)
    assert "t0: row_wise on ranks [0, 1, 2, 3]\nt1: table_wise on ranks [0]\n" in printed
    first, last = re.search(r"loss (\S+) -> (\S+) in 200 steps", printed).groups()
    assert float(last) < float(first) / 10
    assert re.search(r"sent (4\.9|5\.0)\d% of the entries, 12,720 bytes per step", printed)
