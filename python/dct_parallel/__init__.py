"""dct_parallel: training with Dynamic Communication Thresholding.

Data parallel: send only the largest gradients, or all of them in few bits.

    state = DCTState(ddp, density=0.005)  # or format="int4"
    ddp.register_comm_hook(state, dct_hook)

On a cluster: dense inside a node, compressed between nodes.

    state = DCTState(ddp, density=0.005, mesh=node_mesh())

Local steps: each rank's own optimizer, and every few steps an average of the weights' changes.

    averager = DCTAverager(module, period=10)
    averager.average_parameters()

FSDP2: between replicas of a model that fully_shard has cut.

    state = dct_fully_shard_hook(model, mesh=mesh, density=0.005)

FSDP2: between the shards of a model.

    state = compress_fully_shard(model, weights="int8", gradients="int8")

Without a hook: torch's all-reduce, with every entry in few bits.

    all_reduce_compressed(tensor, residual, format="int4")

Model parallel: the largest activations of every row, and their gradients.

    values, positions = pack_rows(x, k)  # on one device; send them as you like
    y = unpack_rows(values, positions, width)
    y = all_to_all_rows(x, splits, format=RowFormat(density=0.05))

Or every entry of every row, in few bits.

    y = all_to_all_rows(x, splits, format="int4")

The folders: exchange turns a flat tensor into its mean over ranks; ddp (gradients of
DistributedDataParallel), fsdp2 (gradients of fully_shard) and local_steps (weights) use it; rows
sends activations at a cut of a model. All use the modules here: formats, compressor (one tensor, no
network), collectives, groups and mesh. docs/design/layer.md follows a bucket through them.
"""

from .compressor import Compressor
from .ddp import DCTState, dct_hook
from .exchange import merge_states
from .exchange.all_reduce import all_reduce_compressed
from .fsdp2 import compress_fully_shard, dct_fully_shard_hook
from .local_steps import DCTAverager
from .mesh import node_mesh
from .rows.all_gather import all_gather_rows, all_gather_rows_async
from .rows.all_to_all import all_to_all_rows, all_to_all_rows_async
from .rows.packing import RowPack, RowUnpack, pack_rows, unpack_rows
from .rows.quantizing import RowDequantize, RowQuantize
from .rows.row_format import RowFormat

__all__ = [
    "Compressor",
    "DCTAverager",
    "DCTState",
    "RowDequantize",
    "RowFormat",
    "RowPack",
    "RowQuantize",
    "RowUnpack",
    "all_gather_rows",
    "all_gather_rows_async",
    "all_reduce_compressed",
    "all_to_all_rows",
    "all_to_all_rows_async",
    "compress_fully_shard",
    "dct_fully_shard_hook",
    "dct_hook",
    "merge_states",
    "node_mesh",
    "pack_rows",
    "unpack_rows",
]


def __dir__() -> list[str]:
    return __all__
