"""How fast kernels were measured to be, from one file."""

import json
from pathlib import Path

from dlrm.errors import UsageError

from .cost_model import PACK_BYTES, Kernels

# What is taken without --kernels: runs on an H200, and on 2 busy cores.
DEFAULTS = {
    "gpu": "bench/results/2026-11-26-h200/bench.json",
    "cpu": "bench/results/2026-11-25-cpu/link_few_bits.json",
}
_ROOT = Path(__file__).parents[2]


def load(path: Path | None, device: str) -> Kernels:
    """From the JSON of bench/kernels.py, bench/gpu/check.py or bench/link.py.

    Args:
        path: None: the one in DEFAULTS.
        device: "gpu" or "cpu".

    Raises:
        UsageError: it is none of them, or has not what is needed.
    """
    name = path or DEFAULTS[device]
    path = _ROOT / name
    content = read_json(path)
    try:
        kernels = _of_link(content) if "cells" in content else _of_kernels(content)
        assumed = "; every entry in few bits: as fast as a copy, assumed"
        few_bits = assumed if kernels.quantize == kernels.copy else ""
        return kernels._replace(source=f"{kernels.source} ({name}){few_bits}")
    except (KeyError, TypeError, ValueError, StopIteration, ZeroDivisionError):
        raise UsageError(
            f"{path} must be the JSON of bench/kernels.py with mask_pack and scatter_unpack, or "
            "of bench/link.py with the modes bf16 and dct"
        ) from None


def read_json(path: Path) -> dict:
    """A program's result, or the first one of an experiment in bench/results.

    Raises:
        UsageError: there is no JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} must be a JSON file: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must be a JSON object, got {type(content).__name__}")
    runs = content.get("runs")
    if isinstance(runs, list) and runs and isinstance(runs[0], dict):
        content = runs[0]
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

    def few_bits(op: str, case: str) -> float:
        timed = any(r["op"] == op for r in content["results"])
        return rate(of(op, case), backend) if timed else copy

    pack, unpack = of("mask_pack", "float32 grad, float32 values"), of("scatter_unpack", "P=2")
    backend = next(name for name in ("cuda", "triton", "cpp") if name in pack["ms"])
    machine = content["provenance"]["cpu" if backend == "cpp" else "gpu"]
    copy = rate(pack, "copy")
    return Kernels(
        copy,
        rate(pack, backend),
        rate(unpack, backend),
        few_bits("quantize_pack", "float32 grad, int4"),
        few_bits("dequantize_sum", "P=2, int4"),
        f"measured: bench/kernels.py, {backend}, {pack['numel']:,} elements, {machine}",
    )


def _of_link(content: dict) -> Kernels:
    numel = content["model"]["parameters"]
    fastest = _fastest(content["cells"])
    copy = 1e3 * 6 * numel / fastest["bf16"]["phases_ms"]["pack"]

    def rates(mode: str, every: bool) -> tuple[float, float]:
        cell = fastest[mode]
        payload = cell["payload_bytes"] / (cell["ranks"] - 1)
        packed, unpacked = PACK_BYTES * numel + every * payload, 4 * numel + payload * cell["ranks"]
        phases = cell["phases_ms"]
        return 1e3 * packed / phases["pack"], 1e3 * unpacked / phases["unpack"]

    few_bits = rates("dct-int4", every=True) if "dct-int4" in fastest else (copy, copy)
    cpu = content["provenance"]["cpu"]
    source = f"measured: bench/link.py's pack and unpack, dispatch included, {cpu}"
    return Kernels(copy, *rates("dct", every=False), *few_bits, source)


def _fastest(cells: list[dict]) -> dict[str, dict]:
    """{mode: its cell}, of the fewest ranks at the fastest rate: the least disturbed by others."""
    measured = [cell for cell in cells if cell["step_ms"] is not None]
    order = sorted(measured, key=lambda c: (-c["ranks"], c["rate"] or float("inf")))
    return {cell["mode"]: cell for cell in order}
