"""dct_parallel: distributed training with compressed communication.

DDP: send only the largest gradients, or all of them in a quantized format.

    state = DCTState(ddp, density=0.005)  # or format="int4"
    ddp.register_comm_hook(state, dct_hook)

DDP on a cluster: dense inside a node, compressed between nodes.

    state = DCTState(ddp, density=0.005, mesh=node_mesh())

Local steps (local SGD): average the changes of the weights every few optimizer steps.

    averager = DCTAverager(module, period=10)
    averager.average_parameters()

FSDP2: compress gradients between the replicas of a model.

    state = dct_fully_shard_hook(model, mesh=mesh, density=0.005)

FSDP2: compress weights and gradients between the shards of a model.

    state = compress_fully_shard(model, weights="int8", gradients="int8")

Without a hook: a quantized all-reduce.

    all_reduce_compressed(tensor, residual, format="int4")

Without a hook: every reduction of a framework.

    import dct_parallel.process_group
    torch.distributed.init_process_group("dct")

Model parallelism: send the largest activations of each row, and their gradients.

    values, positions = pack_rows(x, k)  # on one device, for any transport
    y = unpack_rows(values, positions, width)
    y = all_to_all_rows(x, splits, format=RowFormat(density=0.05))

Or send all entries of each row in a quantized format.

    y = all_to_all_rows(x, splits, format="int4")

The folder `exchange` averages a flat tensor over ranks. The folders `ddp`, `fsdp2` and
`local_steps` use it. The folder `rows` sends activations between the parts of a model. All of them
share the modules `formats`, `compressor`, `collectives`, `groups` and `mesh`. docs/design/layer.md
follows a bucket through the files.
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
from .rows.codecs import RowFormat
from .rows.packing import RowPack, RowUnpack, pack_rows, unpack_rows
from .rows.quantizing import RowDequantize, RowQuantize

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
