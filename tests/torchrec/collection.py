"""Runs DMPCollection on the CPU. TorchRec requires CUDA in one assertion and one device name."""

import inspect
import textwrap

from torch.distributed.remote_device import _remote_device
from torchrec.distributed import model_parallel
from torchrec.distributed.model_parallel import DMPCollection

_ASSERTION = """        assert (
            device.type == "cuda" or device.type == "mtia"
        ), "DMPCollection only supports CUDA or MTIA"
"""


def allow_cpu():
    """Remove only TorchRec's CUDA assertion. python -O would remove all assertions."""
    source = inspect.getsource(DMPCollection.__init__)
    assert source.count(_ASSERTION) == 1
    source = textwrap.dedent(source.replace(_ASSERTION, ""))
    program = "def make(__class__):\n" + textwrap.indent(source, "    ") + "    return __init__\n"
    names = {}
    exec(program, vars(model_parallel), names)
    DMPCollection.__init__ = names["make"](DMPCollection)
    DMPCollection._remap_sharding_plan = _remap(DMPCollection._remap_sharding_plan)


def _remap(original):
    def remap(self, plan, *arguments, **named):
        """Place shards on "cpu" instead of "cpu:0"."""
        original(self, plan, *arguments, **named)
        for module in plan.plan.values():
            for sharding in module.values():
                for shard in sharding.sharding_spec.shards:
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    return remap
