"""Every op on two streams at once, many times over: the results are those of serial calls.

python bench/gpu/streams.py
"""

import torch
from common import calls, gpu_backends, report, same

ITERATIONS = 50
SLEEP_CYCLES = 100_000_000  # 50 ms: all calls are queued by then, and the streams do overlap


def main() -> None:
    backends, failures = gpu_backends(), []
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [[call.on("cuda") for call in calls(seed)] for seed in range(len(streams))]
    for name, ops in backends.items():
        for pair in zip(*inputs, strict=True):
            expected = [call.on("cuda").run(ops) for call in pair]
            torch.cuda.synchronize()
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SLEEP_CYCLES)
            got = []
            for _ in range(ITERATIONS):
                for stream, call in zip(streams, pair, strict=True):
                    with torch.cuda.stream(stream):
                        got.append(call.on("cuda").run(ops))
            torch.cuda.synchronize()
            wrong = sum(not same(g, expected[i % len(streams)]) for i, g in enumerate(got))
            print(f"{name} {pair[0].name}: {wrong} of {len(got)} differ", flush=True)
            if wrong:
                failures.append(f"{name} {pair[0].name}")
    report(failures, f"{ITERATIONS} calls on each of two streams equal serial ones")


if __name__ == "__main__":
    main()
