"""python -m tests.aot ARCHITECTURE: compile every case and print its kernels as JSON."""

import dataclasses
import functools
import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled

from dct_kernels import triton as backend

from .cases import CASES
from .compiler import compile_launches

facts = {
    name: [
        dataclasses.asdict(kernel)
        for kernel in compile_launches(sys.argv[1], functools.partial(case.call, backend))
    ]
    for name, case in CASES.items()
}
print(json.dumps(facts))
