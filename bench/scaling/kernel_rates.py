"""How fast kernels were measured to be, from one file."""

import json
from pathlib import Path

from dlrm.errors import UsageError

from .cost_model import MASK_PACK_BYTES, Kernels

H100 = "bench/scaling/h100.json"  # what ships: two results of a run on an H100
_ROOT = Path(__file__).parents[2]


def load(path: Path | None) -> Kernels:
    """From the JSON of bench/kernels.py, bench/gpu/check.py or bench/link.py; None: H100's.

    Raises:
        UsageError: it is none of them, or has not what is needed.
    """
    path, name = (_ROOT / H100, H100) if path is None else (path, path)
    content = read_json(path)
    try:
        kernels = _of_link(content) if "cells" in content else _of_kernels(content)
        return kernels._replace(source=f"{kernels.source} ({name})")
    except (KeyError, TypeError, ValueError, StopIteration, ZeroDivisionError):
        raise UsageError(
            f"{path} must be the JSON of bench/kernels.py with mask_pack and scatter_unpack, or "
            "of bench/link.py with the modes bf16 and dct"
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
        called = (r for r in content["results"] if not r.get("graphs"))
        found = [r for r in called if r["op"] == op and r["case"] == case]
        return max(found, key=lambda r: r["numel"])  # the least of it is overhead

    def rate(result: dict, candidate: str) -> float:
        return 1e3 * result["bytes"] / result["ms"][candidate]["median"]

    pack, unpack = of("mask_pack", "float32 grad, float32 values"), of("scatter_unpack", "P=2")
    backend = next(name for name in ("cuda", "triton", "cpp") if name in pack["ms"])
    machine = content["provenance"]["cpu" if backend == "cpp" else "gpu"]
    return Kernels(
        rate(pack, "copy"),
        rate(pack, backend),
        rate(unpack, backend),
        f"measured: bench/kernels.py, {backend}, {pack['numel']:,} elements, {machine}",
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
        f"measured: bench/link.py's pack and unpack, dispatch included, {cpu}",
    )


def _fastest(cells: list[dict]) -> dict[str, dict]:
    """{mode: its cell}, of the fewest ranks at the fastest rate: the least disturbed by others."""
    measured = [cell for cell in cells if cell["step_ms"] is not None]
    order = sorted(measured, key=lambda c: (-c["ranks"], c["rate"] or float("inf")))
    return {cell["mode"]: cell for cell in order}
