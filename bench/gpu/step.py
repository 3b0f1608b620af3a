"""What a training step pays: step.json and step.md.

    python bench/gpu/step.py OUT [--seconds 65]

Two tables. The ops of a step: 100 M gradients in buckets of 25 MB; every bucket is sampled (one
segment, as many picks as the hook takes), packed, and unpacked from P payloads, copies of its own
that stand for those of other ranks; called, and replayed from a CUDA graph. Beside it, computed by
the model of `dct-bench scale`: what a bfloat16 all-reduce of these gradients takes on links of 50
to 400 GB/s, and what the all-gather of these payloads does. The backward pass: of a transformer and
of DLRM with 100 M parameters, in DDP on one rank, with the hook and without. What the hook adds is
what is exposed of it; no bytes travel on one rank.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from common import BF16, BUCKET, ROOT, device_work, gpu_backends, nodes, report
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(ROOT / "bench"))

from dp_tasks import Block

from dct_bench import provenance
from dct_bench.scale.cost_model import Link, all_gather, all_reduce
from dct_dlrm.data.features import INTS, table_rows
from dct_dlrm.models.dlrm import DLRM
from dct_kernels import payload_layout
from dct_parallel import DCTState, dct_hook
from dct_parallel.compressor import default_capacity, default_samples

NUMEL = 100_000_000
DENSITIES, RANKS = (0.01, 0.001), (2, 8, 64)
RATES = (50, 100, 200, 400)  # of a link, in GB/s each way
ALPHA = 10e-6  # seconds a message; assumed
STEPS, ROUNDS = 10, 5  # of the ops
WARM_UP, TIMED = 12, 20  # of a model
BUCKET_MB = 25

# As the hook calls them.
_sample = torch.ops.dct.sample_threshold.default
_pack = torch.ops.dct.mask_pack.default
_unpack = torch.ops.dct.scatter_unpack.default


class Mark:
    """A moment: of the current stream on a GPU, else of the host."""

    def __init__(self, device: str) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._time = time.perf_counter()

    def ms_to(self, later: "Mark") -> float:
        """Once the device has come to both."""
        if self._event is None or later._event is None:
            return 1e3 * (later._time - self._time)
        return self._event.elapsed_time(later._event)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Bucket:
    """What a bucket of so many gradients has on a rank, and its part of a step."""

    def __init__(self, numel: int, density: float, ranks: int, device: str) -> None:
        self.grad = torch.randn(numel, device=device)
        self.residual, self.out = (torch.zeros(numel, device=device) for _ in range(2))
        self.segments = torch.tensor([0, numel], device=device)
        self.seen = torch.zeros(1, dtype=torch.int32, device=device)
        self.density, self.capacity = density, default_capacity(numel, density)
        self.picks = default_samples(density)
        nbytes = payload_layout(numel, self.capacity, BF16).nbytes
        self.payloads = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=device)
        self.own = self.payloads[0]

    def step(self) -> None:
        threshold = _sample(self.grad, self.residual, self.segments, self.density, self.picks, 7)
        tensors = (self.residual, self.grad, self.segments, threshold, self.own, self.seen)
        _pack(*tensors, self.capacity, BF16)
        _unpack(self.payloads, self.out, self.capacity, BF16, 1 / len(self.payloads))


def spread(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    least, most = ordered[len(ordered) // 5], ordered[4 * len(ordered) // 5]
    return {"median": statistics.median(ordered), "q20": least, "q80": most}


def timed(call: Callable[[], object], device: str) -> dict[str, float]:
    """Milliseconds of a call among others, one after another, however the host keeps up."""
    samples = []
    for _ in range(ROUNDS):
        synchronize(device)
        start = Mark(device)
        for _ in range(STEPS):
            call()
        end = Mark(device)
        synchronize(device)
        samples.append(start.ms_to(end) / STEPS)
    return spread(samples)


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    return graph


def links(sizes: list[int], payload_bytes: list[int], ranks: int) -> dict[str, dict[str, float]]:
    """{GB/s: milliseconds of both collectives, one a bucket}, computed."""
    found = {}
    for rate in RATES:
        link = Link(ALPHA, 1e9 * rate)
        found[str(rate)] = {
            "bf16_all_reduce": 1e3 * sum(all_reduce(link, ranks, 2 * numel) for numel in sizes),
            "all_gather": 1e3 * sum(all_gather(link, ranks, nbytes) for nbytes in payload_bytes),
        }
    return found


def step_of_ops(numel: int, density: float, ranks: int, device: str) -> dict:
    sizes = [BUCKET] * (numel // BUCKET) + [numel % BUCKET] * (numel % BUCKET > 0)
    buckets = [Bucket(size, density, ranks, device) for size in sizes]

    def step() -> None:
        for bucket in buckets:
            bucket.step()

    for _ in range(3):  # the first packs an empty residual
        step()
    for bucket in buckets:
        bucket.payloads[1:] = bucket.own
    payload_bytes = [bucket.own.nbytes for bucket in buckets]
    found = {
        "numel": numel,
        "buckets": len(sizes),
        "density": density,
        "ranks": ranks,
        "state_bytes": 4 * numel + ranks * sum(payload_bytes),
        "links": links(sizes, payload_bytes, ranks),
    }
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    found["called_ms"] = timed(step, device)
    if device == "cuda":
        graph = captured(step)
        graph.replay()  # which instantiates it
        found["graph_ms"], found["launches"] = timed(graph.replay, device), nodes(graph)
    found["sent"] = sum(int(bucket.seen) for bucket in buckets) / numel
    return found


@dataclass
class Task:
    """A model and the loss of a batch, made anew for each run."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]  # of the model and the batch


def tasks(device: str, tiny: bool) -> Iterator[Task]:
    width, heads, layers, words = (32, 2, 2, 50) if tiny else (768, 12, 12, 10_000)
    texts, length = (2, 8) if tiny else (32, 512)

    def transformer() -> nn.Module:
        blocks = [Block(width, heads) for _ in range(layers)]
        ends = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        return nn.Sequential(nn.Embedding(words, width), *blocks, *ends)

    def of_text(model: nn.Module, text: Tensor) -> Tensor:
        with torch.autocast(device, dtype=BF16):
            logits = model(text[:, :-1])
        return cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())

    def text() -> tuple[Tensor, ...]:
        return (torch.randint(words, (texts, length + 1), device=device),)

    yield Task("transformer", transformer, text, of_text)
    rows = table_rows(20 if tiny else 1_150_000)
    batch = 16 if tiny else 8192

    def clicks() -> tuple[Tensor, ...]:
        ids = [torch.randint(n, (batch,), dtype=torch.int32, device=device) for n in rows]
        labels = torch.randint(2, (batch,), device=device).float()
        return torch.randn(batch, INTS, device=device), torch.stack(ids, 1), labels

    def of_clicks(model: nn.Module, ints: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(model(ints, ids), labels)

    yield Task("DLRM", lambda: DLRM(rows, 16, (512, 256, 64), (512, 256)), clicks, of_clicks)


@contextlib.contextmanager
def training(
    task: Task, device: str, hooked: bool
) -> Iterator[Callable[[], tuple[Mark, Mark, Mark]]]:
    """A step of a model in DDP on this rank alone, after WARM_UP of them.

    It returns when it began, when its backward pass did, and when that ended.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = task.model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    state = DCTState(ddp, density=DENSITIES[0], transport="all_gather") if hooked else None
    if state is not None:
        ddp.register_comm_hook(state, dct_hook)
    batch = task.batch()

    def step() -> tuple[Mark, Mark, Mark]:
        start = Mark(device)
        loss = task.loss(ddp, *batch)
        begun = Mark(device)
        loss.backward()
        end = Mark(device)
        ddp.zero_grad()
        return start, begun, end

    for _ in range(WARM_UP):
        step()
    yield step
    synchronize(device)
    if state is not None:
        state.close()


def backward(task: Task, device: str, hooked: bool, steps: int) -> dict:
    found: dict[str, object] = {"task": task.name, "hook": hooked}
    before = allocated(device)
    with training(task, device, hooked) as step:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        marks = [step() for _ in range(steps + 1)]
        synchronize(device)
        if device == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    starts = [start for start, _, _ in marks]
    found["backward_ms"] = [begun.ms_to(end) for _, begun, end in marks[:-1]]
    found["step_ms"] = [start.ms_to(later) for start, later in pairwise(starts)]
    return found


def allocated(device: str) -> int:
    """Bytes, once what was dropped is freed: a DDP is part of reference cycles."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def launches(task: Task, device: str, hooked: bool) -> int:
    """In a step, forward and backward. By the profiler, so after all that is timed."""
    with training(task, device, hooked) as step:
        return len(device_work(step))


def in_turns(task: Task, device: str, steps: int) -> Iterator[dict]:
    """Without the hook and with it, twice, so that a drift of the clock hits both."""
    runs = [backward(task, device, hooked, steps) for hooked in (False, True) * 2]
    for hooked in (False, True):
        first, second = (run for run in runs if run["hook"] is hooked)
        times = {name: spread(first[name] + second[name]) for name in ("backward_ms", "step_ms")}
        yield second | times


def _ms(times: dict[str, float]) -> str:
    return f"{times['median']:.3f} ({times['q20']:.3f}-{times['q80']:.3f})"


def _mb(result: dict, key: str) -> str:
    return f"{result[key] / 1e6:,.0f}" if key in result else ""


def tables(ops: list[dict], models: list[dict]) -> list[str]:
    heads = ["density", "P", "called, ms", "graph, ms", "launches", "state, MB", "peak beside, MB"]
    heads += [f"{rate} GB/s: bf16 all-reduce, gather, ms (computed)" for rate in RATES]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for result in ops:
        cells = [f"{result['density']:.1%}", str(result["ranks"]), _ms(result["called_ms"])]
        cells.append(_ms(result["graph_ms"]) if "graph_ms" in result else "")
        cells += [str(result.get("launches", "")), _mb(result, "state_bytes")]
        cells.append(_mb(result, "peak_bytes"))
        for of_link in result["links"].values():
            cells.append(f"{of_link['bf16_all_reduce']:.2f}, {of_link['all_gather']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    heads = ["model", "DDP", "backward, ms", "exposed, ms", "step, ms", "launches", "peak, MB"]
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    plain = {result["task"]: result for result in models if not result["hook"]}
    for result in models:
        backward_ms = result["backward_ms"]["median"]
        exposed = backward_ms - plain[result["task"]]["backward_ms"]["median"]
        cells = [result["task"], "with the hook" if result["hook"] else "alone"]
        cells += [_ms(result["backward_ms"])]
        cells += [f"{exposed:.3f}" if result["hook"] else "", _ms(result["step_ms"])]
        cells += [str(result.get("launches", "")), _mb(result, "peak_bytes")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=65, help="begin nothing after so long")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that any machine takes at once")
    args = parser.parse_args()
    if args.device == "cuda":
        gpu_backends()
    start, ops, models, failures = time.monotonic(), [], [], []
    about = provenance.describe()
    numel, steps = (100_000, 3) if args.tiny else (NUMEL, TIMED)

    def is_late() -> bool:
        return time.monotonic() - start > args.seconds

    def write() -> None:
        content = {"provenance": about, "alpha": ALPHA, "ops": ops, "models": models}
        (args.out / "step.json").write_text(json.dumps(content, indent=1))
        (args.out / "step.md").write_text("\n".join(tables(ops, models)) + "\n")

    torch.manual_seed(0)
    for density in DENSITIES:
        for ranks in RANKS:
            if not is_late():
                ops.append(step_of_ops(numel, density, ranks, args.device))
                write()
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for task in tasks(args.device, args.tiny):
            if not is_late():
                models += in_turns(task, args.device, steps)
                write()
        for task in tasks(args.device, args.tiny):
            for result in models if args.device == "cuda" and not is_late() else ():
                if result["task"] == task.name:
                    result["launches"] = launches(task, args.device, result["hook"])
                    write()
    except RuntimeError as error:  # out of memory; what there is stays
        failures.append(str(error).splitlines()[0])
    dist.destroy_process_group()
    print("\n".join(tables(ops, models)))
    expected = len(DENSITIES) * len(RANKS), 4
    said = "" if (len(ops), len(models)) == expected else "; the rest is not measured"
    report(failures, f"{len(ops)} steps of ops, {len(models)} backward passes{said}")


if __name__ == "__main__":
    main()
