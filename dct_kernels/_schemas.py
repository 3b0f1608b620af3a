"""Every op of the library, one schema each: the contract that all backends implement.

Schemas are defined here, in Python, so that the ops exist (and run eagerly) even where no compiled
library could be built. Sizes are SymInt, because a plain int would make torch.compile recompile for
every new value.
"""

import torch

SCHEMAS = {
    "sample_threshold": (
        "(Tensor grad, Tensor residual, float density, SymInt ranges=1, SymInt max_samples=65536, "
        "SymInt seed=0, Tensor? inv_scale=None) -> Tensor"
    ),
    "mask_pack": (
        "(Tensor(a!) residual, Tensor grad, Tensor threshold, Tensor(b!) payload, "
        "Tensor(c!) seen, SymInt capacity, ScalarType value_dtype, Tensor? inv_scale=None) -> ()"
    ),
    "scatter_unpack": (
        "(Tensor payloads, Tensor(a!) out, SymInt capacity, ScalarType value_dtype, "
        "float scale=1.0, Tensor? out_scale=None) -> Tensor"
    ),
    "quantize_pack": (
        "(Tensor(a!)? residual, Tensor grad, Tensor(b!) payload, str format, "
        "Tensor? inv_scale=None) -> ()"
    ),
    "dequantize_sum": (
        "(Tensor payloads, Tensor(a!) out, str format, float scale=1.0, Tensor? out_scale=None) "
        "-> Tensor"
    ),
    "dequantize_sum_pack": (
        "(Tensor payloads, Tensor(a!) residual, Tensor(b!) payload, str format, float scale=1.0) "
        "-> Tensor"
    ),
    "row_pack": "(Tensor x, SymInt k, ScalarType value_dtype) -> (Tensor values, Tensor positions)",
    "row_gather": "(Tensor x, Tensor positions, SymInt k, ScalarType value_dtype) -> Tensor",
    "row_unpack": "(Tensor values, Tensor positions, SymInt width, ScalarType dtype) -> Tensor",
    "row_quantize": "(Tensor x, str format) -> Tensor",
    "row_dequantize": "(Tensor rows, SymInt width, str format, ScalarType dtype) -> Tensor",
}

OPS = tuple(SCHEMAS)

# Kept alive for the life of the process: a Library takes its registrations with it when collected.
library = torch.library.Library("dct", "DEF")

for _name, _schema in SCHEMAS.items():
    library.define(
        _name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    )
