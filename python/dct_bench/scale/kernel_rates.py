"""How fast kernels are: measured, or assumed and labelled so."""

import json
from pathlib import Path

from dct_dlrm.errors import UsageError

from .cost_model import MASK_PACK_BYTES, Kernels

_H200_MEMORY = 4.8e12  # bytes per second, NVIDIA's data sheet
# The targets of this project's kernels, as fractions of a copy that moves as many bytes.
ASSUMED = Kernels(
    copy=0.85 * _H200_MEMORY,
    mask_pack=0.9 * 0.85 * _H200_MEMORY,
    scatter_unpack=0.85 * 0.85 * _H200_MEMORY,
    source="assumed: H200 data sheet 4.8 TB/s, a copy at 85 % of it, mask_pack at 90 % and "
    "scatter_unpack at 85 % of the copy; not measured",
)


def load(path: Path) -> Kernels:
    """From the JSON of `dct-bench kernels` or of `dct-bench link`.

    Raises:
        UsageError: it is neither, or has not what is needed.
    """
    content = read_json(path)
    try:
        return _of_link(content) if "cells" in content else _of_kernels(content)
    except (KeyError, TypeError, ValueError, StopIteration, ZeroDivisionError):
        raise UsageError(
            f"{path} must be the JSON of `dct-bench kernels` with mask_pack and scatter_unpack, or "
            "of `dct-bench link` with the modes bf16 and dct"
        ) from None


def read_json(path: Path) -> dict:
    """Raises UsageError where there is no JSON object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} must be a JSON file: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must be a JSON object, got {type(content).__name__}")
    options = content.get("options")
    if isinstance(options, dict) and options.get("local_size", 1) != 1:
        raise UsageError(f"{path} must be of nodes of one rank, got {options['local_size']}")
    return content


def _of_kernels(content: dict) -> Kernels:
    def of(op: str, case: str) -> dict:
        found = [r for r in content["results"] if r["op"] == op and r["case"] == case]
        return max(found, key=lambda r: r["numel"])  # the least of it is overhead

    def rate(result: dict, candidate: str) -> float:
        return 1e3 * result["bytes"] / result["ms"][candidate]["median"]

    pack, unpack = of("mask_pack", "float32 grad, bfloat16 values"), of("scatter_unpack", "P=2")
    backend = next(name for name in ("cuda", "triton", "cpp") if name in pack["ms"])
    machine = content["provenance"]["gpu" if content["device"] == "cuda" else "cpu"]
    return Kernels(
        rate(pack, "copy"),
        rate(pack, backend),
        rate(unpack, backend),
        f"measured: dct-bench kernels, {backend}, {pack['numel']:,} elements, {machine}",
    )


def _of_link(content: dict) -> Kernels:
    numel = content["model"]["parameters"]
    fastest = _fastest(content["cells"])
    bf16, dct = fastest["bf16"], fastest["dct"]
    received = 4 * numel + dct["payload_bytes"] * dct["ranks"] / (dct["ranks"] - 1)
    cpu = content["provenance"]["cpu"]
    return Kernels(
        1e3 * 6 * numel / bf16["phases_ms"]["pack"],
        1e3 * MASK_PACK_BYTES * numel / dct["phases_ms"]["pack"],
        1e3 * received / dct["phases_ms"]["unpack"],
        f"measured: dct-bench link's pack and unpack, dispatch included, {cpu}",
    )


def _fastest(cells: list[dict]) -> dict[str, dict]:
    """{mode: its cell}, of the fewest ranks at the fastest rate: the least disturbed by others."""
    measured = [cell for cell in cells if cell["step_ms"] is not None]
    order = sorted(measured, key=lambda c: (-c["ranks"], c["rate"] or float("inf")))
    return {cell["mode"]: cell for cell in order}
