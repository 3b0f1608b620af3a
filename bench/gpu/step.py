"""Measures the cost of training steps with 100 million gradient entries, and writes step.json.

First calls the ops of the hook for each 25 MiB bucket, directly and in a CUDA graph. The sparse ops
sample a threshold, pack the bucket, and unpack one payload per rank. The quantization ops pack the
bucket and sum one payload per rank. The payloads of a bucket are copies of the same payload. Then
trains a transformer in DDP on one rank, without a hook, with an empty hook, with torch's
bf16_compress_hook, and with dct_hook. One rank sends no bytes, so the added time is the part of the
hook that does not overlap. The host time excludes the wait for the results of the previous step. If
it equals the step time, the host is the bottleneck. One hook calls the variant "hidden sampling" of
variants.py. Compare it with the hook that calls the default ops in the same way, through ctypes.

Also calls the collectives of compress_fully_shard for a layer of the transformer. Rank 0 of 8 packs
and unpacks all messages, but they are copied on the device instead of sent.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench import files, provenance
from bench.cli import exit_status
from bench.gpu import variants
from bench.gpu.common import BF16, BUCKET, PICKS, captured, gpu_backends, nodes, report
from dct_kernels import payload_layout, quantized_payload_bytes
from dct_parallel import DCTState, compressor, dct_hook
from dct_parallel.exchange.results import StepResults
from dct_parallel.fsdp2 import collectives
from dct_parallel.fsdp2.collectives import GradientReduceScatter, WeightGather

NUMEL, DENSITIES, RANKS = 100_000_000, (0.01, 0.001), (2, 8, 64)
FORMATS = ("int4", "ternary")
CALLS, STEPS, ROUNDS, WARM_UP = 10, 2, 10, 12
SHARDS = 8
# The overloads that the hook calls.
sample_threshold = torch.ops.dct.sample_threshold.default
mask_pack = torch.ops.dct.mask_pack.default
scatter_unpack = torch.ops.dct.scatter_unpack.default
quantize_pack = torch.ops.dct.quantize_pack.default
dequantize_sum = torch.ops.dct.dequantize_sum.default


def empty_hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Do nothing, to measure the cost of calling a Python hook."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# A hook, or the options of DCTState for dct_hook.
HOOKS = {
    "none": None,
    "empty": empty_hook,
    "bf16_compress_hook": bf16_compress_hook,
    "1 %": {"density": DENSITIES[0]},
    "int4": {"format": "int4"},
}
# Hooks that call variants of variants.py: {hook: variant}
VARIANT_OF = {"1 %, by ctypes": variants.DEFAULT, "1 %, hidden sampling": "hidden sampling"}
HOOKS |= dict.fromkeys(VARIANT_OF, HOOKS["1 %"])


class Bucket:
    """The tensors of a bucket on one rank. `step` calls the ops of one training step."""

    def __init__(self, numel: int, density: float, ranks: int, device: str) -> None:
        self.grad = torch.randn(numel, device=device)
        self.residual, self.out = (torch.zeros(numel, device=device) for _ in range(2))
        self.seen = torch.zeros(1, dtype=torch.int32, device=device)
        self.density, self.capacity = density, int(1.25 * density * numel)
        nbytes = payload_layout(numel, self.capacity, BF16).nbytes
        self.payloads = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=device)

    def step(self) -> None:
        threshold = sample_threshold(self.grad, self.residual, self.density, 1, PICKS, 7)
        tensors = self.residual, self.grad, threshold, self.payloads[0], self.seen
        mask_pack(*tensors, self.capacity, BF16)
        scatter_unpack(self.payloads, self.out, self.capacity, BF16, 1 / len(self.payloads))


class QuantizedBucket:
    """A bucket whose entries are all sent in a quantized format."""

    def __init__(self, numel: int, format: str, ranks: int, device: str) -> None:
        self.grad = torch.randn(numel, device=device)
        self.residual, self.out = (torch.zeros(numel, device=device) for _ in range(2))
        self.format = format
        nbytes = quantized_payload_bytes(numel, format)
        self.payloads = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=device)

    def step(self) -> None:
        quantize_pack(self.residual, self.grad, self.payloads[0], self.format)
        dequantize_sum(self.payloads, self.out, self.format, 1 / len(self.payloads))


def step_of_shards(width: int, device: str) -> dict:
    """Time two all-gathers of weights and a reduce-scatter, for one layer on rank 0 of SHARDS."""
    layer = nn.TransformerEncoderLayer(width, 2, 4 * width, device="meta")
    shapes = [(-(-len(p) // SHARDS), p[0].numel(), p.dim() < 2) for p in layer.parameters()]
    layout = tuple((rows * columns, is_vector) for rows, columns, is_vector in shapes)
    unit = SimpleNamespace(
        layout=lambda trained=False: layout, shard_group=lambda: None, device=torch.device(device)
    )
    with mock.patch.object(dist, "get_process_group_ranks", return_value=range(SHARDS)):
        gather, reduce = (
            collective(unit, None, "int8", lambda nbytes: None)
            for collective in (WeightGather, GradientReduceScatter)
        )
    numel = sum(numel for numel, _ in layout)
    shard, flat = (torch.randn(ranks * numel, device=device) for ranks in (1, SHARDS))

    def step() -> None:
        for _ in range(2):
            gather(flat, shard, None)
        reduce(shard, flat, None, dist.ReduceOp.AVG)

    found = {"parameters": SHARDS * numel, "shards": SHARDS}
    with (
        mock.patch.object(collectives, "all_gather", lambda out, sent, _: out.copy_(sent)),
        mock.patch.object(dist, "all_to_all_single", lambda out, sent, **_: out.copy_(sent)),
    ):
        found |= called_and_captured(step, device)
    return found


def called_and_captured(step: Callable[[], None], device: str) -> dict:
    """Time the step, called directly and in a CUDA graph."""
    step()
    found = {"called_ms": timed(step, device)}
    if device == "cuda":
        graph, _ = captured(step)
        found |= {"graph_ms": timed(graph.replay, device), "launches": nodes(graph)}
    return found


def timed(call: Callable[[], object], device: str, calls: int = CALLS) -> dict[str, float]:
    """Quartiles of the milliseconds per call in ROUNDS rounds, and the median "host" time."""
    samples, hosts, read, waits = [], [], StepResults.read, []

    def timed_read(results: StepResults) -> dict:
        waits.append(-time.perf_counter())
        found = read(results)
        waits.append(time.perf_counter())
        return found

    for _ in range(ROUNDS):
        waits.clear()
        start = time.perf_counter()
        with mock.patch.object(StepResults, "read", timed_read):
            for _ in range(calls):
                call()
        hosts.append(1e3 * (time.perf_counter() - start - sum(waits)) / calls)
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - start) / calls)
    low, median, high = statistics.quantiles(samples, n=4)
    return {"low": low, "median": median, "high": high, "host": statistics.median(hosts)}


def step_of_ops(numel: int, sent: float | str, ranks: int, device: str) -> dict:
    """Time the ops of a step. `sent` is a density, or a format in which all entries are sent."""
    sizes = [BUCKET] * (numel // BUCKET) + [numel % BUCKET] * (numel % BUCKET > 0)
    make, name = (QuantizedBucket, "format") if isinstance(sent, str) else (Bucket, "density")
    buckets = [make(size, sent, ranks, device) for size in sizes]

    def step() -> None:
        for bucket in buckets:
            bucket.step()

    for _ in range(3):  # the first call packs an empty residual
        step()
    for bucket in buckets:
        bucket.payloads[1:] = bucket.payloads[0].clone()
    found = {name: sent, "ranks": ranks, "buckets": len(sizes)}
    found["payload_bytes"] = sum(bucket.payloads[0].nbytes for bucket in buckets)
    found |= called_and_captured(step, device)
    if name == "density":
        found["sent"] = sum(int(bucket.seen) for bucket in buckets) / numel
    return found


@contextlib.contextmanager
def ops_of_variant(name: str, device: str) -> Iterator[None]:
    """In this context, hooks call the ops of a variant of variants.py, through ctypes."""
    cuda = device == "cuda"
    gpu = int("{}{}".format(*torch.cuda.get_device_capability())) if cuda else None
    path, scratch = variants.library(name, variants.SAMPLED, gpu), torch.empty(2**28 * cuda)
    ops = variants.ops_of(variants.SAMPLED, path, scratch.to(device))
    packing = {"_sample_threshold": ops.sample_threshold, "_mask_pack": ops.mask_pack}
    with mock.patch.multiple(compressor, **packing):
        yield


@contextlib.contextmanager
def training(device: str, tiny: bool, name: str) -> Iterator[Callable[[], None]]:
    """Yield a function that runs a step of a transformer with 100 million parameters."""
    width, heads, layers, words = (32, 2, 2, 50) if tiny else (768, 12, 12, 10_000)
    shape = (2, 8) if tiny else (64, 512)  # large, so that the GPU is slower than the host
    torch.manual_seed(0)
    with torch.device(device):
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        blocks = nn.TransformerEncoder(layer, layers)
        model = nn.Sequential(nn.Embedding(words, width), blocks, nn.Linear(width, words))
        x, y = (torch.randint(words, shape) for _ in range(2))
    ddp = DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    hook, state = HOOKS[name], None
    if isinstance(hook, dict):
        state, hook = DCTState(ddp, transport="all_gather", **hook), dct_hook
    if hook is not None:
        ddp.register_comm_hook(state, hook)

    def step() -> None:
        with torch.autocast(device, dtype=BF16):
            loss = cross_entropy(ddp(x).flatten(0, 1), y.flatten())
        loss.backward()
        ddp.zero_grad()

    with ops_of_variant(VARIANT_OF[name], device) if name in VARIANT_OF else nullcontext():
        for _ in range(WARM_UP):
            step()
        yield step
    if state is not None:
        state.close()


def format_ms(ms: dict[str, float]) -> str:
    """Format the median, the quartiles and the median host time, in ms."""
    return f"{ms['median']:.3f} ({ms['low']:.3f}-{ms['high']:.3f}, host {ms['host']:.3f}) ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the program")
    args = parser.parse_args()
    if args.device == "cuda":
        gpu_backends()
    torch.manual_seed(0)
    content = {"provenance": provenance.describe(), "ops": [], "shards": [], "models": []}

    def keep(kind: str, found: dict) -> None:
        content[kind].append(found)
        times = [f"{key} {format_ms(ms)}" for key, ms in found.items() if key.endswith("_ms")]
        print({key: value for key, value in found.items() if not key.endswith("_ms")}, *times)
        files.write_json(args.out / "step.json", content)

    for sent in DENSITIES + FORMATS:
        for ranks in RANKS:
            numel = 2_000 if args.tiny else NUMEL
            keep("ops", step_of_ops(numel, sent, ranks, args.device))
    keep("shards", step_of_shards(32 if args.tiny else 768, args.device))
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if args.device == "cpu":
        del HOOKS["bf16_compress_hook"]  # torch refuses this hook without NCCL
    for name in 2 * tuple(HOOKS):  # twice, to detect a drift of the GPU's clocks
        with training(args.device, args.tiny, name) as step:
            keep("models", {"hook": name, "step_ms": timed(step, args.device, STEPS)})
    dist.destroy_process_group()
    medians = {found["hook"]: found["step_ms"]["median"] for found in content["models"]}
    added = [f"{ms - medians['none']:.3f} by {name}" for name, ms in medians.items()]
    report([], f"median step: {medians['none']:.3f} ms; ms added: {', '.join(added[1:])}")


if __name__ == "__main__":
    raise SystemExit(exit_status("step.py", main))
