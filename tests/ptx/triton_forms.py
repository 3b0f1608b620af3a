"""What Triton's kernels for sm_90 are made of: those of `aot.cases`, every kernel and dtype."""

import re
from collections import Counter

import triton
from aot.cases import CASES
from aot.compiler import compiled_launches

from dct_kernels import triton as ops

from . import triton_backend
from .backend import executor

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s.*;$|^\s*(ret);$", re.MULTILINE)


def lines() -> list[str]:
    kernels = _load()
    for kernel in kernels:
        executor().decode(kernel)
    found = [Counter(forms(executor().text(kernel))) for kernel in kernels]
    times, of_kernels = Counter(), Counter()
    for counter in found:
        times.update(counter)
        of_kernels.update(counter.keys())
    bases = {form.partition(".")[0] for form in times}
    return [
        f"triton {triton.__version__}: {len(kernels)} kernels, {len(bases)} opcodes, "
        f"{len(times)} forms",
        "times kernels form",
        *(f"{times[form]:5} {of_kernels[form]:7} {form}" for form in sorted(times)),
    ]


def forms(text: str) -> list[str]:
    """The instruction of each line of PTX that has one, with all that is behind its dots."""
    return [
        opcode or alone for opcode, alone in _INSTRUCTION.findall(text.partition(".section")[0])
    ]


def _load() -> list[str]:
    """All that are launched; their names."""
    return sorted(
        {
            triton_backend.load(kernel.name, kernel.asm["ptx"])
            for case in CASES.values()
            for kernel in compiled_launches("sm_90", lambda case=case: case.call(ops))
        }
    )
