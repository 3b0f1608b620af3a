"""torch.set_default_dtype and set_default_device do not change any result of an entry point."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_leaves

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FactorizationMachine,
    FeatureRows,
    FirstLayer,
    LinearTerms,
    MomentumScaledRowWiseAdagrad,
    ReplicaSync,
    RowWiseAdagrad,
    ShardedEmbeddingBags,
    SumPooledEmbedding,
    merge_feature_rows,
    plan_shards,
)
from dct_parallel import (
    Compressor,
    RowDequantize,
    RowFormat,
    RowPack,
    RowQuantize,
    RowUnpack,
    all_gather_rows,
    all_reduce_compressed,
    all_to_all_rows,
    merge_states,
)
from support.entry_points import Hook, LocalSteps, NodeMesh, Sharded
from support.library_defaults import seen_by_packages
from support.ranks import run_ranks, shard_mesh, through_a_file

SIZES, NUMEL = ((40, 25), (17,), (70_000,)), 71_017  # several ranks own blocks
ROWS, WIDTH, BATCH = (20, 11), 6, 3
INT4_SIGN = RowFormat("int4", backward="sign")


def _random(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def _step(rank, entry, number):
    return entry.step(_random(NUMEL, seed=10 * number + rank)), entry.pending()


def _steps(rank, _, make, **settings):
    entry, resumed = (make(SIZES, start_step=0, **settings) for _ in range(2))
    figures = "stats" if make in (LocalSteps, Sharded) else "parameter_stats"
    results = [_step(rank, entry, 0), entry.state.stats(), getattr(entry.state, figures)()]
    saved = entry.file()
    resumed.load(saved)
    results += [saved, _step(rank, resumed, 1)]
    resumed.state.flush() if make is LocalSteps else resumed.state.take_back()
    return *results, resumed.state.state_dict(), _step(rank, resumed, 2)


def _folders(rank, folder, make, **settings):
    """Load this rank's state and the merged state from a DCP folder."""
    entry, resumed = (make(SIZES, start_step=0, **settings) for _ in range(2))
    results = [_step(rank, entry, 0)]
    dcp.save(entry.parts(), checkpoint_id=folder)
    dcp.load(resumed.parts(), checkpoint_id=folder)
    results += [resumed.state.state_dict(), _step(rank, resumed, 1)]
    if make is Sharded:
        resumed.state.load_merged(folder)
    else:
        resumed.state.load_state_dict(merge_states(folder))
    return *results, resumed.state.state_dict(), _step(rank, resumed, 1)


def _all_reduce(rank, _, **settings):
    tensor, residual = _random(NUMEL, seed=rank), torch.zeros(NUMEL)
    all_reduce_compressed(tensor, residual, **settings)
    return tensor, residual


def _rows(rank, _, format):
    x = _random(8, WIDTH, seed=rank).requires_grad_()
    received = all_to_all_rows(x, [1, 2, 3, 2], format=format)
    wide = all_gather_rows(x, format=format)
    (received.sin().sum() + wide.sin().sum()).backward()
    return received, wide, x.grad


def _modules(rank, _, encode, decode):
    x = _random(8, WIDTH, seed=rank).requires_grad_()
    message = encode(x)
    rows = decode(*message) if isinstance(message, tuple) else decode(message)
    rows.sin().sum().backward()
    return message, rows, x.grad


def _compressor(rank, _, **settings):
    compressor, out = Compressor(NUMEL, 0.05, **settings), torch.zeros(NUMEL)
    payload = compressor.pack(_random(NUMEL, seed=rank))
    status = compressor.unpack(payload.unsqueeze(0), out)
    compressor.take_back()
    return status, out, compressor.threshold, compressor.residual


def _fixed_rows():
    return FeatureRows(_random(ROWS[0], 1 + WIDTH))


def _substitution(rank, _, make, **settings):
    def made():
        torch.manual_seed(0)
        rows = make()
        operators = [LinearTerms(), FactorizationMachine(WIDTH, 1), SumPooledEmbedding(WIDTH, 1)]
        operators += [FirstLayer(2, WIDTH, 5, 1)]
        optimizer = RowWiseAdagrad([rows.weight], 0.1)
        if isinstance(rows, DynamicFeatureRows):
            rows.attach("sum", optimizer, "sum")
        return rows, EquivalentSubstitution(rows, operators, **settings), optimizer

    rows, layer, optimizer = made()
    seed = 0 if settings else rank  # with "all_reduce" all ranks pass the same batch
    ids = torch.randint(ROWS[0], (4 * BATCH,), generator=torch.Generator().manual_seed(seed))
    results = layer(ids, torch.full((2, BATCH), 2))
    sum(result.sin().sum() for result in results).backward()
    optimizer.step()
    saved = through_a_file(layer.state_dict())
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, dict(rows.state_dict()))
    again, resumed, optimizer = made()
    resumed.load_state_dict(saved)
    results = [*results, saved, resumed.state_dict(), resumed(ids, torch.full((2, BATCH), 2))]
    if isinstance(rows, DynamicFeatureRows):
        merged = merge_feature_rows(states)
        again.load_state_dict(merged)
        results += [merged, optimizer.state_dict()["state"]]
    return *results, again.state_dict(), [p.grad.to_dense() for p in layer.parameters()]


def _tables(rank, _, settings, **bag_options):
    tables = [_random(rows, WIDTH) for rows in ROWS]
    mesh = shard_mesh()
    bags, resumed = (
        ShardedEmbeddingBags(tables, plan_shards(ROWS, 2, [1]), mesh, **bag_options)
        for _ in range(2)
    )
    optimizer = MomentumScaledRowWiseAdagrad([bags.weight], 0.1, scale=2, delayed=True)
    sync, results = ReplicaSync(bags, optimizer=optimizer, **settings), []
    for seed in (rank, rank + 10):
        ids = torch.randint(ROWS[1], (4 * BATCH,), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        pooled = bags(ids, torch.full((2, BATCH), 2))
        pooled.sin().sum().backward()
        optimizer.step()
        sync.step()
        results += [pooled, bags.weight.detach().clone(), bags.weight.grad.to_dense()]
    sync.flush()
    saved = through_a_file((bags.state_dict(), optimizer.state_dict()["state"]))
    resumed.load_state_dict(saved[0])
    return *results, saved, resumed.state_dict()


OWNERS, SPARSE = {"transport": "reduce_scatter"}, {"density": 0.05}
BITS = {"density": 1, "format": "int4"}
TERNARY = {"density": 1, "format": "ternary"} | OWNERS
ENTRY_POINTS = [
    *((_steps, {"make": Hook} | settings) for settings in (SPARSE, SPARSE | OWNERS, BITS, TERNARY)),
    *((_steps, {"make": NodeMesh} | settings) for settings in (SPARSE | OWNERS, BITS)),
    *((_steps, {"make": Sharded} | settings) for settings in (SPARSE | OWNERS, BITS)),
    *((_steps, {"make": LocalSteps} | settings) for settings in ({}, SPARSE | OWNERS)),
    (_steps, {"make": LocalSteps, "step_ahead": True} | SPARSE),
    *((_folders, {"make": make} | SPARSE | OWNERS) for make in (Hook, Sharded, LocalSteps)),
    (_all_reduce, {"format": "int4"}),
    (_all_reduce, {"format": "ternary", "op": dist.ReduceOp.AVG}),
    *((_rows, {"format": format}) for format in ("int8", INT4_SIGN, RowFormat(density=0.4))),
    (_modules, {"encode": RowPack(k=2), "decode": RowUnpack(WIDTH)}),
    (_modules, {"encode": RowQuantize(INT4_SIGN), "decode": RowDequantize(WIDTH, INT4_SIGN)}),
    *((_compressor, {"refresh_every": every}) for every in (1, 3)),
    (_substitution, {"make": lambda: DynamicFeatureRows(1 + WIDTH, 100, 0.3, seed=3)}),
    (_substitution, {"make": _fixed_rows}),
    (_substitution, {"make": _fixed_rows, "aggregate": "all_reduce"}),
    *((_tables, {"settings": settings}) for settings in ({}, {"format": "int4"})),
    (_tables, {"settings": SPARSE | {"format": "bfloat16"}, "dedup": True}),
    (_tables, {"settings": {"format": "bfloat16"}, "sparse": False}),
]


def _compare_bits(rank, dtype, device, folder):
    warnings.filterwarnings("ignore", category=FutureWarning)  # raised by DCP
    for number, (entry_point, settings) in enumerate(ENTRY_POINTS):
        expected = _bits(entry_point(rank, folder / f"{number}", **settings))
        with seen_by_packages(dtype, device):
            found = _bits(entry_point(rank, folder / f"{number} again", **settings))
        assert len(found) == len(expected) > 0
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert ours == theirs, (entry_point, settings, index)


def _raw(tensor):
    return tensor.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def _bits(results):
    """Return (dtype, device, bytes) of each tensor, and all other values except strings."""
    leaves = (getattr(leaf, "_local_tensor", leaf) for leaf in tree_leaves(results))
    return [
        (leaf.dtype, leaf.device, _raw(leaf)) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
        if not isinstance(leaf, str)
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype, device",
    [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")],
)
def test_torch_defaults_change_no_bit(dtype, device, tmp_path):
    run_ranks(_compare_bits, 4, dtype, device, tmp_path, timeout=300)
