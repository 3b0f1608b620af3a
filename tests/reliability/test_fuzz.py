"""The fuzzer finds each defect that is planted in the readers."""

import json
import shlex
import subprocess

import pytest

from reliability import ROOT, fuzz

# {defect: (op, text in the op's source file, replacement)}
DEFECTS = {
    "position past the end": ("scatter_unpack", "|| positions[entries - 1] >= length", ""),
    "position twice": ("scatter_unpack", "<= positions[i - 1]", "< positions[i - 1]"),
    "start past the count": ("scatter_unpack", "&& end <= head.count", "&& end <= args_.capacity"),
    "end of the tensor": ("dequantize_sum", "std::min(args.numel - begin, kScaled)", "kScaled"),
    "status": ("dequantize_sum", "args.status[p] = 0;", "args.status[p] = 2;"),
    "column past the width": ("row_unpack", "encoding, args.width", "encoding, args.width + 1"),
    "read past the width": ("row_gather", "encoding, args.width", "encoding, args.width + 1"),
    "place of the scale": ("row_dequantize", "of<kFormat>(row,", "of<kFormat>(row + 1,"),
    "next full value": ("patch_apply", "*value++", "*value"),
    "last row": ("row_dequantize_sum", "total_bytes - bytes - kMostColumns", "total_bytes - bytes"),
}


@pytest.mark.large
@pytest.mark.parametrize("defect", DEFECTS)
def test_fuzzer_finds_planted_defects(defect, tmp_path):
    op, right, wrong = DEFECTS[defect]
    build = fuzz.program().parent
    source = ROOT / "csrc" / "cpu" / f"{op}.cpp"
    text = source.read_text()
    assert text.count(right) == 1
    mutant = tmp_path / source.name
    included = f'#include "{source.parent}/'
    mutant.write_text(text.replace(right, wrong).replace('#include "', included))
    commands = json.loads((build / "compile_commands.json").read_text())
    (command,) = (each["command"] for each in commands if each["file"] == str(source))
    words = shlex.split(command)
    words[words.index("-c") + 1], words[words.index("-o") + 1] = mutant, tmp_path / "mutant.o"
    subprocess.run(words, check=True)
    parts = [build / "CMakeFiles/fuzz.dir/tests/native/fuzz.cpp.o", tmp_path / "mutant.o"]
    link = ["g++", "-fsanitize=address,undefined", *parts, build / "libdct_cpu.a"]
    subprocess.run([*link, "-o", tmp_path / "fuzz"], check=True)
    found = fuzz.fuzz(tmp_path / "fuzz", op, 0, 200_000, seed=0, most=1)
    print(found)
    assert found["failures"]
