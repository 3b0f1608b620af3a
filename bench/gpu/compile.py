"""torch.compile(fullgraph=True, dynamic=True) of every op on CUDA tensors, at two sizes: equal to a
plain call, bit for bit. And torch.library.opcheck of every op.

    python bench/gpu/compile.py
"""

import torch
from common import Call, calls, gpu_backends, report, same

import dct_kernels


def compiled_equals_plain(small: Call, large: Call) -> None:
    """The public functions, so that their checks are traced as well; Inductor compiles for real."""
    torch.compiler.reset()  # every op counts as another version of the same function
    function = torch.compile(
        lambda args: small.function(dct_kernels, **args), fullgraph=True, dynamic=True
    )
    for call in (small, large):
        plain, traced = call.on("cuda"), call.on("cuda")
        traced.function = lambda ops, **args: function(args)
        if not same(traced.run(dct_kernels), plain.run(dct_kernels)):
            raise RuntimeError("the compiled call differs from a plain one")


def opcheck(small: Call, large: Call) -> None:
    if small.name != "step":
        op = getattr(torch.ops.dct, small.name).default
        torch.library.opcheck(op, (), small.on("cuda").args)


def main() -> None:
    gpu_backends()
    failures = []
    for pair in zip(calls(0, 50_021, 300), calls(1, 200_003, 500), strict=True):
        for check in (compiled_equals_plain, opcheck):
            try:
                check(*pair)
                print(f"{pair[0].name}: {check.__name__} passed", flush=True)
            except Exception as error:  # dynamo's have many types, and the next op is tried as well
                failures.append(f"{check.__name__} {pair[0].name}")
                print(f"{failures[-1]}: {error}", flush=True)
    report(failures, "compiled calls equal plain ones, opcheck passed")


if __name__ == "__main__":
    main()
