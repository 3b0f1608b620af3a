"""Every op, and a step of three, captured in a CUDA graph and replayed on changed inputs; and no op
waits for the device.

    python bench/gpu/graphs.py
"""

import torch
from common import Call, calls, gpu_backends, nodes, report, same

REPLAYS = 3


def without_waiting(call: Call, ops) -> list[torch.Tensor]:
    """The results; an error if torch is asked to wait for the device. Capture refuses the rest."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call.run(ops)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Call, ops) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # modules are loaded before capture, which forbids it
        call.run(ops)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        results = call.run(ops)
    return graph, results


def main() -> None:
    backends, failures, sizes = gpu_backends(), [], []
    inputs = [[call.on("cuda") for call in calls(seed)] for seed in range(REPLAYS + 1)]
    for name, ops in backends.items():
        for static, *others in zip(*inputs, strict=True):
            label, static = f"{name} {static.name}", static.on("cuda")
            try:
                without_waiting(static.on("cuda"), ops)
                graph, results = captured(static, ops)
                for other in others:
                    expected = other.on("cuda").run(ops)
                    static.copy_(other)
                    graph.replay()
                    if not same(results, expected):
                        raise RuntimeError("a replay differs from a direct call")
                sizes.append(f"{label} {nodes(graph)}")
                print(
                    f"{label}: {REPLAYS} replays equal, graph of {nodes(graph)} nodes", flush=True
                )
            except (OSError, RuntimeError) as error:
                failures.append(label)
                print(f"{label}: {str(error).splitlines()[0]}", flush=True)
    report(failures, f"all equal, no host sync; nodes: {', '.join(sizes)}")


if __name__ == "__main__":
    main()
