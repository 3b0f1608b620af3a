"""The weights of a module as one flat tensor, which ranks average."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from ..exchange.parameters import unwrapped


class FlatWeights:
    """The parameters of a module that require grad, one after another, in float32.

    Args:
        op: their owner, for errors.
        module: float32, bfloat16 or float16 parameters, on one CPU or CUDA device; no DDP.

    Attributes:
        names: {parameter: name} of those that require grad.
        frozen: {parameter: name} of the others.
        sizes: elements of each.
        device: of all.

    Raises:
        ValueError, TypeError: the module is not like this.
    """

    def __init__(self, op: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            checks.fail(op, "module", "an nn.Module", type(module).__name__, TypeError)
        if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
            rule = "without DistributedDataParallel, which averages all gradients (pass ddp.module)"
            checks.fail(op, "module", rule, type(module).__name__, TypeError)
        self._module = module
        self.names, self.frozen = self._named(trained=True), self._named(trained=False)
        if not self.names:
            checks.fail(op, "module", "parameters that require grad", "none", verb="have")
        for parameter, name in self.names.items():
            checks.require_dtype(op, f"parameter {name}", parameter.dtype, checks.FLOATS)
        devices = {parameter.device for parameter in self.names | self.frozen}
        self.device = next(iter(devices))
        if len(devices) > 1 or self.device.type not in ("cpu", "cuda"):
            got = ", ".join(sorted(map(str, devices)))
            checks.fail(op, "module", "on one device, the CPU or CUDA", got)
        self.sizes = tuple(parameter.numel() for parameter in self.names)

    def require_same(self, op: str) -> None:
        """Raise if different parameters require grad than at the start: each rank would train its
        own."""
        now = self._named(trained=True)
        names = now | self.names
        different = [names[parameter] for parameter in now.keys() ^ self.names.keys()]
        if different:
            rule = "the same parameters that require grad as when this averager was made"
            got = f"a difference in {', '.join(sorted(set(different)))}: make a new averager"
            checks.fail(op, "module", rule, got, verb="have")

    @torch.no_grad()
    def take_those_of_first_rank(self, group: dist.ProcessGroup) -> None:
        """Broadcast all parameters of the first rank, frozen ones as well, to the others."""
        first = dist.get_global_rank(group, 0)
        for parameter in self._module.parameters():
            flat = parameter.detach().flatten().contiguous()  # its memory, if that is
            dist.broadcast(flat.view(torch.uint8), first, group)  # of any dtype
            parameter.copy_(flat.view_as(parameter))

    def read(self) -> Tensor:
        """A copy."""
        return torch.cat([parameter.detach().flatten().float() for parameter in self.names])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy them into the parameters, rounded to each one's dtype."""
        for parameter, part in zip(self.names, flat.split(self.sizes), strict=True):
            parameter.copy_(part.view_as(parameter))

    def moved_from(self, base: Tensor) -> Tensor:
        """The difference between them and `base` rounded to their dtype.

        So the base's rounding error is in no difference: the base keeps it.
        """
        moved = self.read()
        parts = zip(self.names, moved.split(self.sizes), base.split(self.sizes), strict=True)
        for parameter, part, of_base in parts:
            part.sub_(of_base.to(parameter.dtype))
        return moved

    def non_finite(self) -> list[str]:
        """Names of parameters with NaN or Inf. Waits for the device."""
        return [name for parameter, name in self.names.items() if not parameter.isfinite().all()]

    def _named(self, trained: bool) -> dict[Parameter, str]:
        named = self._module.named_parameters()
        return {p: unwrapped(name) for name, p in named if p.requires_grad == trained}
