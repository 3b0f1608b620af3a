"""python -m tests.aot ARCHITECTURE: compile every case and print its kernels as JSON."""

import dataclasses
import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled

from dct_kernels import triton as backend

from . import bad_kernels
from .cases import CASES
from .compiler import compile_launches

calls = {name: lambda case=case: case.call(backend) for name, case in CASES.items()}
calls |= {
    bad.__name__: bad for bad in (bad_kernels.fused, bad_kernels.narrow, bad_kernels.spilling)
}
facts = {
    name: [dataclasses.asdict(kernel) for kernel in compile_launches(sys.argv[1], call)]
    for name, call in calls.items()
}
print(json.dumps(facts))
