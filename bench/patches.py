"""Compares formats of weight patches on steps of AdamW."""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

import dct_kernels
from bench import files, provenance
from bench.cli import Parser, announce_backend, count, exit_status, make_folder, positive, several
from bench.experiments.dp_python import PythonTask
from bench.tables import table

DESCRIPTION = """\
Compare the sizes and speeds of formats for patches of bfloat16 weights, on real steps of AdamW.

A small transformer is trained on Python source code, in float32 with a bfloat16 forward pass. Then
training continues at each of the given rates, with the same state of AdamW. After --settle steps,
the program compares the weights before and after the next step, and the next 8 steps. All weights
form one vector. The formats of other projects were implemented from their descriptions. The program
checks that each format restores all bits. Speeds are GB of bfloat16 weights per second of CPU time
on one thread, in the median of 5 calls.
"""
SEED, RATE, SPANS, CALLS = 0, 1e-3, (1, 8), 5
Bits = NDArray[np.uint16]


def _indices(old: Bits, new: Bits) -> list[bytes]:
    at = np.flatnonzero(old != new)
    return [at.astype(np.int32).tobytes(), new[at].tobytes()]


def _set_indices(weights: Bits, at: bytes, values: bytes) -> None:
    weights[np.frombuffer(at, np.int32)] = np.frombuffer(values, np.uint16)


def _apply_xor(weights: Bits, differences: bytes) -> None:
    weights ^= np.frombuffer(differences, np.uint16)


def _gaps(old: Bits, new: Bits, dtype: type) -> tuple[NDArray, NDArray]:
    """(gaps between positions, positions). Unchanged positions divide gaps that are too long."""
    most = np.iinfo(dtype).max
    gaps = np.diff(np.flatnonzero(old != new), prepend=-1)
    ends = np.cumsum((gaps - 1) // most + 1) - 1
    found = np.full(ends[-1] + 1, most)
    found[ends] = (gaps - 1) % most + 1
    return found.astype(dtype), np.cumsum(found) - 1


def _gaps_xor(old: Bits, new: Bits) -> list[bytes]:
    gaps, at = _gaps(old, new, np.uint16)
    return [gaps.tobytes(), (old ^ new)[at].tobytes()]


def _apply_gaps_xor(weights: Bits, gaps: bytes, differences: bytes) -> None:
    at = np.cumsum(np.frombuffer(gaps, np.uint16), dtype=np.int64) - 1
    weights[at] ^= np.frombuffer(differences, np.uint16)


def _gaps_steps(old: Bits, new: Bits) -> list[bytes]:
    """A step that does not fit is -128, and the new value follows."""
    gaps, at = _gaps(old, new, np.uint8)
    step = (new - old).view(np.int16)[at]
    fits = (step > -128) & (step < 128)
    return [
        gaps.tobytes(),
        np.where(fits, step, -128).astype(np.int8).tobytes(),
        new[at[~fits]].tobytes(),
    ]


def _apply_gaps_steps(weights: Bits, gaps: bytes, steps: bytes, values: bytes) -> None:
    step = np.frombuffer(steps, np.int8)
    at = np.cumsum(np.frombuffer(gaps, np.uint8), dtype=np.int64) - 1
    weights[at] += step.astype(np.int16).view(np.uint16)
    weights[at[step == -128]] = np.frombuffer(values, np.uint16)


def _diff_pack(old: Bits, new: Bits) -> list[bytes]:
    patch = torch.empty(dct_kernels.patch_bytes(len(old), len(old)), dtype=torch.uint8)
    dct_kernels.diff_pack(_tensor(new), _tensor(old), patch, None, len(old))
    return [patch[: dct_kernels.patch_info(patch).nbytes].numpy().tobytes()]


def _patch_apply(weights: Bits, patch: bytes) -> None:
    raw = torch.frombuffer(bytearray(patch), dtype=torch.uint8)
    dct_kernels.patch_apply(raw, _tensor(weights))


def _tensor(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


# {format: (encode, decode in place)}. zstd at level 1 follows if the name contains it.
FORMATS: dict[str, tuple[Callable, Callable]] = {
    "int32 position, value": (_indices, _set_indices),
    "xor of all bytes, zstd": (lambda old, new: [(old ^ new).tobytes()], _apply_xor),
    "16-bit gap, xor, zstd": (_gaps_xor, _apply_gaps_xor),
    "8-bit gap, 8-bit step, zstd": (_gaps_steps, _apply_gaps_steps),
    "`diff_pack`": (_diff_pack, _patch_apply),
    "`diff_pack`, zstd": (_diff_pack, _patch_apply),
}


def measure(name: str, old: Bits, new: Bits) -> dict[str, float]:
    """The bytes per changed entry, and GB/s of encoding and decoding."""
    encode, decode = FORMATS[name]
    zstd, seconds = "zstd" in name, []
    for _ in range(CALLS):
        weights, times = old.copy(), [time.thread_time()]
        sent: Sequence[bytes] = encode(old, new)
        if zstd:
            sent = [zstandard.compress(part, 1) for part in sent]
        times.append(time.thread_time())
        decode(weights, *(map(zstandard.decompress, sent) if zstd else sent))
        times.append(time.thread_time())
        seconds.append(np.diff(times))
        if not np.array_equal(weights, new):
            raise SystemExit(f"{name} does not restore the weights")
    pack, apply = (old.nbytes / 1e9 / max(t, 1e-9) for t in np.median(seconds, axis=0))
    nbytes = sum(map(len, sent)) / int((old != new).sum())
    return {"bytes_per_entry": nbytes, "pack": pack, "apply": apply}


def steps(options: argparse.Namespace) -> Iterator[tuple[str, Bits, Bits]]:
    """Train, and yield (rate and number of steps, weights before, weights after)."""
    task = PythonTask(options.width, options.layers)
    model, batches = task.model(SEED), task.batches(SEED, 0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    console = Console(stderr=True)

    def train(rate: float, number: int) -> Bits:
        optimizer.param_groups[0]["lr"] = rate
        for _ in track(range(number), f"{number} steps at {rate:g}", console=console):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = task.loss(model, next(batches))
            loss.backward()
            optimizer.step()
        flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach().bfloat16()
        return flat.view(torch.int16).numpy().view(np.uint16)

    trained = train(RATE, options.trained)
    print(f"{trained.size:,} weights, median magnitude {_tensor(trained).abs().median():.4f}")
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    for rate in options.rates:
        for part, state in zip((model, optimizer), copy.deepcopy(saved), strict=True):
            part.load_state_dict(state)
        before, done = train(rate, options.settle), 0
        for span in SPANS:
            yield f"{rate:g} x {span}", before, train(rate, span - done)
            done = span


def run(options: argparse.Namespace) -> None:
    if options.json:
        make_folder(options.json.parent)
    torch.set_num_threads(1)
    announce_backend("cpu")
    results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in FORMATS}
    columns = []
    for case, old, new in steps(options):
        columns.append(f"{case}: {np.mean(old != new):.2%}")
        for name in FORMATS:
            results[name][columns[-1]] = measure(name, old, new)
    if options.json:
        files.write_json(options.json, {"provenance": provenance.describe(), "results": results})
    for title, text in {
        "Bytes per changed entry (rate x steps: changed)": "{bytes_per_entry:.2f}",
        "GB/s, pack / apply": "{pack:.2f} / {apply:.1f}",
    }.items():
        rows = [[n, *(text.format(**cell) for cell in r.values())] for n, r in results.items()]
        print(f"\n{title}\n\n{table(['format', *columns], rows)}")


def parser() -> Parser:
    parser = Parser(prog="python -m bench.patches", description=DESCRIPTION)
    add, rates = parser.add_argument, {"default": "1e-6,3e-6,1e-5", "metavar": "R,..."}
    add("--rates", type=several(positive), **rates, help="learning rates")
    add("--trained", type=count, default=1000, metavar="N", help=f"first steps, at {RATE:g}")
    add("--settle", type=count, default=50, metavar="N", help="steps at a rate, before comparing")
    add("--width", type=count, default=384, help="width of the transformer")
    add("--layers", type=count, default=6, help="layers of the transformer")
    add("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    return exit_status("patches", lambda: run(parser().parse_args(given)))


if __name__ == "__main__":
    sys.exit(main())
