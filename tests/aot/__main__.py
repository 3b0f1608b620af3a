"""Compile every case for the architectures named, all by default, and print what came out."""

import argparse
import dataclasses
import json
import os

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled


from dct_kernels import triton as backend

from . import bad_kernels
from .cases import ARCHITECTURES, CASES
from .compiler import Kernel, compile_launches

BAD_KERNELS = (bad_kernels.fused, bad_kernels.narrow, bad_kernels.spilling)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.aot", description=__doc__)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=str(ARCHITECTURES))
    parser.add_argument("--json", action="store_true", help="for programs, not as a table")
    arguments = parser.parse_args()
    architectures = arguments.architectures or ARCHITECTURES
    if arguments.json:
        print(json.dumps({architecture: _facts(architecture) for architecture in architectures}))
        return
    columns = [field.name for field in dataclasses.fields(Kernel)]
    print("| architecture | call | " + " | ".join(map(_title, columns)) + " |")
    print("|---" * (len(columns) + 2) + "|")
    for architecture in architectures:
        for case in CASES.values():
            for kernel in compile_launches(architecture, lambda case=case: case.call(backend)):
                cells = [architecture, case.name, *dataclasses.astuple(kernel)]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _facts(architecture: str) -> dict[str, list[dict]]:
    """{case or bad kernel: the facts of its kernels}."""
    calls = {name: lambda case=case: case.call(backend) for name, case in CASES.items()}
    calls |= {call.__name__: call for call in BAD_KERNELS}
    return {
        name: [dataclasses.asdict(kernel) for kernel in compile_launches(architecture, call)]
        for name, call in calls.items()
    }


def _title(column: str) -> str:
    return column.replace("_", " ")


if __name__ == "__main__":
    main()
