"""Autograd: gradients of the row ops, version counters of the ops that write their arguments.

The row ops are linear once the positions are chosen, and their gradients are the row ops again:
pack and gather go back through unpack, unpack through gather, always at the same positions. So the
backward message is k values a row and no positions (DCT, arXiv 2010.08899: one mask, both ways).
"""

import torch

from ._schemas import SCHEMAS, library


def _save_width(ctx, inputs, output):
    x, positions = inputs[0], output[1] if isinstance(output, tuple) else inputs[1]
    ctx.save_for_backward(positions)
    ctx.width, ctx.dtype = x.shape[1], x.dtype


def _save_k(ctx, inputs, output):
    values, positions, _, _ = inputs
    ctx.save_for_backward(positions)
    ctx.k, ctx.dtype = values.shape[1], values.dtype


# Incoming gradients may be expanded views (of a sum, say): the ops take contiguous tensors.
def _row_pack_backward(ctx, grad_values, _):
    (positions,) = ctx.saved_tensors
    unpack = torch.ops.dct.row_unpack.default
    return unpack(grad_values.contiguous(), positions, ctx.width, ctx.dtype), None, None


def _row_gather_backward(ctx, grad_values):
    (positions,) = ctx.saved_tensors
    unpack = torch.ops.dct.row_unpack.default
    return unpack(grad_values.contiguous(), positions, ctx.width, ctx.dtype), None, None, None


def _row_unpack_backward(ctx, grad):
    (positions,) = ctx.saved_tensors
    gather = torch.ops.dct.row_gather.default
    return gather(grad.contiguous(), positions, ctx.k, ctx.dtype), None, None, None


for _name, _backward, _setup in (
    ("row_pack", _row_pack_backward, _save_width),
    ("row_gather", _row_gather_backward, _save_width),
    ("row_unpack", _row_unpack_backward, _save_k),
):
    torch.library.register_autograd(f"dct::{_name}", _backward, setup_context=_setup, lib=library)


def _bump_versions(name: str):
    """define + impl does not tell autograd what an op wrote: do so, then go on to the kernel."""
    op = getattr(torch.ops.dct, name).default
    written = [
        index
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def bump(keyset, *args, **kwargs):
        torch.autograd.graph.increment_version([args[index] for index in written])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            below = keyset & torch._C._after_ADInplaceOrView_keyset
            return op.redispatch(below, *args, **kwargs)

    library.impl(name, bump, "ADInplaceOrView", with_keyset=True)


for _name, _schema in SCHEMAS.items():
    if "!" in _schema:
        _bump_versions(_name)
