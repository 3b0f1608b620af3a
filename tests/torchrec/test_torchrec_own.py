"""TorchRec's own tests of sharding on gloo, with our sharders in float32 (make torchrec).

The tests compare a training step of a sharded model with a step of an unsharded model. In
TorchRec's own suite, they need GPUs, and skip row-wise and table-row-wise tables on gloo. This file
calls the code of the tests directly, on CPUs. Grid sharding and kernels that need CUDA (UVM) are
not included. Batch sizes do not vary between features, because FBGEMM on the CPU does not support
this with bounds checks.
"""

import sys
import types

import pytest
import torch.distributed as dist

from support.ranks import run_ranks

pytest.importorskip("fbgemm_gpu", reason="TorchRec is in the environment of make torchrec")

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from models import CPU, prepare
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.test_utils.test_model import TestSparseNN as SparseNN
from torchrec.types import DataType

from dct_embeddings.torchrec import compressed_sharders


def _own_tests():
    """Import TorchRec's tests, with a stub for a module that its wheel does not contain."""
    absent = types.ModuleType("torchrec.distributed.tests.test_sequence_model")
    absent.TestEmbeddingCollectionSharder = None
    sys.modules[absent.__name__] = absent
    from torchrec.distributed.test_utils import test_model_parallel, test_sharding

    return test_model_parallel.ModelParallelTestShared, test_sharding


def _run_own_test(rank, kind, mean, half, options):
    shared, tests = _own_tests()
    ranks = dist.get_world_size()
    prepare(local_size=ranks // 2 if kind == "table_row_wise" else ranks)
    case = shared()
    case.setUp("gloo")
    case._build_tables_and_groups(DataType.FP16 if half else DataType.FP32)
    sharder, _ = compressed_sharders(format="float32", fused_params={"learning_rate": 0.1})
    sharder.sharding_types = lambda device: [kind]
    tests.sharding_single_rank_test_single_process(
        dist.group.WORLD,
        CPU,
        rank,
        ranks,
        SparseNN,
        case.embedding_groups,
        case.mean_tables if mean else case.tables,
        [sharder],
        EmbOptimType.EXACT_SGD,
        weighted_tables=case.weighted_tables,
        constraints={name: ParameterConstraints(min_partition=4) for name in case.table_names},
        local_size=ranks // 2 if kind == "table_row_wise" else ranks,
        **options,
    )


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [
        ("row_wise", 2, {}),
        ("row_wise", 2, {"variable_batch_size": True}),
        ("row_wise", 4, {}),
        ("table_row_wise", 4, {}),
        ("table_wise", 2, {"variable_batch_size": True}),
        ("column_wise", 2, {"variable_batch_size": True}),
        ("table_column_wise", 2, {"variable_batch_size": True}),
        ("data_parallel", 2, {}),
    ],
)
def test_sharding_with_compressed_sharders(kind, ranks, options, mean, half):
    run_ranks(_run_own_test, ranks, kind, mean, half, options, timeout=200)
