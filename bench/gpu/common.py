"""What the programs of this folder share: every op on known inputs, and comparison bit for bit."""

import ctypes
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
# Stopped at a stage's limit: the log then ends with what was done last.
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

from dct_kernels import payload_layout, testing  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
NUMEL = 2**20 + 3
ROWS, WIDTH, K = 1000, 200, 9
RANKS = 3
BUCKET = 25 * 2**20 // 4  # elements of one of DDP's buckets in float32
PICKS = 4096  # of a payload that is sampled in every step


def gpu_backends() -> dict[str, SimpleNamespace]:
    """{name: ops} of what takes CUDA tensors; ends the program where our CUDA kernels do not."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is False")
    found = {name: ops for name, ops in testing.backends().items() if ops.device == "cuda"}
    if "cuda" not in found:
        raise SystemExit(f"no cuda backend: {testing.available()['cuda']}")
    return found


@dataclass
class Call:
    """A call of one op, or of a few: `run` returns all results and all that was written."""

    name: str
    args: dict[str, object]
    written: tuple[str, ...]
    function: Callable[..., object]

    def run(self, ops: SimpleNamespace) -> list[Tensor]:
        results = self.function(ops, **self.args)
        if not isinstance(results, tuple):
            results = () if results is None else (results,)
        return [*results, *(self.args[name] for name in self.written)]

    def on(self, device: str) -> "Call":
        """The same call on copies of its tensors."""
        copies = {
            name: value.to(device, copy=True) if isinstance(value, Tensor) else value
            for name, value in self.args.items()
        }
        return replace(self, args=copies)

    def copy_(self, other: "Call") -> None:
        """Take over the values of another call, in the memory there is."""
        for name, value in self.args.items():
            if isinstance(value, Tensor):
                value.copy_(other.args[name])


WRITTEN = {
    "track_threshold": ("threshold",),
    "mask_pack": ("residual", "payload", "seen"),
    "scatter_unpack": ("out",),
}


def call(op: str, **args: object) -> Call:
    return Call(op, args, WRITTEN.get(op, ()), lambda ops, **kw: getattr(ops, op)(**kw))


def calls(seed: int, numel: int = NUMEL, rows: int = ROWS) -> list[Call]:
    """All ops and one data-parallel step, on CPU tensors drawn from `seed`; no NaN."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    count, capacity = 5, max(1, numel // 60)
    inner = torch.randint(numel + 1, (count - 1,), generator=draw).sort().values
    segments = torch.cat([torch.zeros(1, dtype=torch.int64), inner, torch.tensor([numel])])
    pack = {
        "residual": normal(numel),
        "grad": normal(numel, dtype=BF16),
        "segments": segments,
        "threshold": 3 + 0.2 * torch.rand(count, generator=draw),
        "payload": torch.zeros(payload_layout(numel, capacity, BF16).nbytes, dtype=torch.uint8),
        "seen": torch.zeros(count, dtype=torch.int32),
        "capacity": capacity,
        "value_dtype": BF16,
    }
    eager = testing.backends()["eager"]
    payloads = []
    for _ in range(RANKS):
        rank = call("mask_pack", **pack | {"residual": normal(numel)}).on("cpu")
        payloads.append(rank.run(eager)[1])
    track = {"target": torch.full((count,), numel / 400), "reference": torch.full((count,), 3.0)}
    unpack = {"capacity": capacity, "value_dtype": BF16, "scale": 1 / RANKS}
    x = normal(rows, WIDTH)
    values, positions = eager.row_pack(x, K, BF16)
    sample = {"density": 0.01, "max_samples": 20000, "seed": 7}
    sampled = {"x": pack["grad"], "residual": normal(numel), "segments": segments}
    return [
        call("sample_threshold", **sampled, **sample),
        call("track_threshold", threshold=pack["threshold"], seen=pack["seen"] + 900, **track),
        call("mask_pack", **pack),
        call("scatter_unpack", payloads=torch.stack(payloads), out=normal(numel), **unpack),
        call("row_pack", x=x, k=K, value_dtype=BF16),
        call("row_gather", x=normal(rows, WIDTH), positions=positions, k=K, value_dtype=F32),
        call("row_unpack", values=values, positions=positions, width=WIDTH, dtype=F32),
        call("row_quantize", x=x, format="int4"),
        call(
            "row_dequantize",
            rows=eager.row_quantize(x, "ternary"),
            width=WIDTH,
            format="ternary",
            dtype=BF16,
        ),
        Call(
            "step",
            pack | {"out": normal(numel)},
            (*WRITTEN["mask_pack"], "out"),
            step,
        ),
    ]


def step(ops: SimpleNamespace, out: Tensor, **pack) -> Tensor:
    """What a rank does in a step: sample_threshold, mask_pack, scatter_unpack."""
    owed = pack["grad"], pack["residual"], pack["segments"]
    threshold = ops.sample_threshold(*owed, 0.01, PICKS, 7)
    ops.mask_pack(**pack | {"threshold": threshold})
    payloads = pack["payload"].unsqueeze(0)
    return ops.scatter_unpack(payloads, out, pack["capacity"], pack["value_dtype"], 0.5)


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Equal bits, any NaN like any other."""
    return len(actual) == len(expected) and all(
        torch.equal(_bits(a.to(e.device)), _bits(e)) for a, e in zip(actual, expected, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
    return tensor.view(torch.uint8)


def nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Launches and memory sets in a graph that was captured with keep_graph=True."""
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    error = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count))
    if error:
        raise RuntimeError(f"cuGraphGetNodes returned {error}")
    return count.value


def device_work(function: Callable[[], object]) -> list[tuple[str, float]]:
    """(name, microseconds) of the kernels, memsets and copies that a call has the GPU do."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return work_in(json.loads(path.read_text()))


def work_in(trace: dict) -> list[tuple[str, float]]:
    """The same of a trace of torch.profiler, in the order in which it began."""
    kinds = ("kernel", "gpu_memset", "gpu_memcpy")
    found = [event for event in trace["traceEvents"] if event.get("cat") in kinds]
    return [(event["name"], event["dur"]) for event in sorted(found, key=lambda e: e["ts"])]


def report(failures: list[str], passed: str) -> None:
    """End the program: one line that says it all, last."""
    names = ", ".join(dict.fromkeys(failures))
    print(f"{len(failures)} failed: {names}" if failures else passed)
    raise SystemExit(1 if failures else 0)
