"""Every program in examples/ runs and prints the results that its docstring states."""

import math
import re
import runpy
import sys

import pytest

from dct_kernels import backend_of
from support.programs import ROOT, in_forks, run

EXAMPLES = ROOT / "examples"
BACKEND = f"backend: {backend_of('cpu')}"
STARTED_BY_TORCHRUN = [
    path for path in sorted(EXAMPLES.glob("*.py")) if "torchrun --nproc" in path.read_text()
]


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.iterdir()} - {"__pycache__"} == {
        *("hook.py", "checkpoint.py", "amp.py", "hybrid.py", "fsdp2.py"),
        *("local_steps.py", "sharded_local_steps.py", "columns.py"),
        "weight_patches.py",
        "recipes",  # tests/recipes
        *("train_dlrm.py", "dlrm", "two_dimensional.py", "substitution.py"),  # tests/dlrm
        "wire_meter.py",  # tests/parallel/test_collectives.py
    }


@pytest.mark.parametrize("program", STARTED_BY_TORCHRUN, ids=lambda path: path.stem)
def test_without_torchrun_the_error_shows_the_command(program, monkeypatch, capsys):
    """The error appears even if required arguments are missing."""
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.delenv("RANK", raising=False)
    if "FOLDER" in program.read_text():
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    output = f"{ended.value}{capsys.readouterr().err}"
    assert re.search(rf"torchrun --nproc-per-node \d examples/{program.name}", output)


@in_forks
def test_hook(run, tmp_path):
    printed = run(EXAMPLES / "hook.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert "fewer bytes than the all-reduce" in printed
    assert re.search(r"sent 0\.\d\d% of the entries, 1,792 bytes per step", printed)


@in_forks
def test_amp(run, tmp_path):
    printed = run(EXAMPLES / "amp.py", tmp_path)  # lines of two ranks may be mixed
    assert BACKEND in printed
    skipped = re.findall(r"rank (\d), step (\d): skipped, scale 1024\.0 -> 512\.0", printed)
    assert sorted(skipped) == [("0", "5"), ("1", "5")]
    weights = re.findall(r"weights (-?\d+\.\d+)", printed)
    assert len(weights) == 2 and weights[0] == weights[1]


@in_forks
def test_local_steps(run, tmp_path):
    printed = run(EXAMPLES / "local_steps.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert "Every 10 steps: " in printed and "fewer than the all-reduce in every step." in printed
    assert re.search(r"sent \d+\.\d% of the entries, [\d,]+ bytes per averaging", printed)
    weights = re.findall(r"weights (-?\d+\.\d+)", printed)
    assert len(weights) == 2 and weights[0] == weights[1]


@pytest.mark.large
def test_hybrid(tmp_path):
    printed = run(EXAMPLES / "hybrid.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([^,]+)", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert "3,248 bytes" in printed and "float32: 83,972 bytes" in printed


@in_forks
def test_columns(run, tmp_path):
    printed = run(EXAMPLES / "columns.py", tmp_path)
    assert BACKEND in printed
    losses = [float(loss) for loss in re.findall(r"loss ([^,]+)", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 5
    assert "16,640 bytes" in printed and "float32: 65,536 bytes" in printed
    heads = re.findall(r"head (-?\d+\.\d+)", printed)
    assert len(heads) == 2 and heads[0] == heads[1]


@in_forks
def test_fsdp2(run, tmp_path):
    given = ["--gradients", "int4", "--replicas", "2"]
    printed = run(EXAMPLES / "fsdp2.py", tmp_path, "whole", "80", *given, ranks=4)
    assert BACKEND in printed
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 20
    # (elements, elements of vectors) in a shard of each block and of the rest.
    # docs/reference/payload.md: a header, and rows of 1,024 entries in int8 or int4.
    halves = [(24992, 416), (24992, 416), (4128, 32)]
    int8, int4 = (
        [64 + row * math.ceil(numel / 1024) for numel, _ in halves] for row in (1056, 544)
    )
    vectors = [4 * numel for _, numel in halves]
    sent = sum(int8) + sum(int8[:2]) + sum(int4)  # the backward pass gathers the blocks again
    sent += 3 * sum(vectors) - vectors[2]
    assert f"between shards: {sent:,} bytes" in printed
    assert f"between replicas: {sum(int4):,} bytes" in printed


@in_forks
def test_sharded_local_steps(run, tmp_path):
    printed = run(EXAMPLES / "sharded_local_steps.py", tmp_path, "whole", "80", ranks=4)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert "starts at step 0" in printed and "Every 10 steps: " in printed
    weights = re.findall(r"stops after step 80, weights (-?\d+\.\d+)", printed)
    assert len(weights) == 4 and len(set(weights)) == 1


@in_forks
def test_weight_patches(run, tmp_path):
    printed = run(EXAMPLES / "weight_patches.py", tmp_path, ranks=3)
    line = (
        r"version \d: (\S+)% changed, patch (\S+) bytes, full copy (\S+) bytes, equal bits on all "
    )
    versions = re.findall(line + r"ranks, losses (\S+) and (\S+)\n", printed)
    assert len(versions) == 5 and "different" not in printed
    for share, *sizes, first, second in versions:
        patch, full = (int(size.replace(",", "")) for size in sizes)
        changed = float(share) / 100 * full / 2
        assert changed > 0 and 2 * changed < 1.01 * patch < 3 * changed
        assert first == second and float(first) < 3


@pytest.mark.large
@pytest.mark.parametrize(
    ("program", "steps", "ranks"),
    [("checkpoint", 4, 2), ("fsdp2", 40, 2), ("sharded_local_steps", 40, 4)],
)
def test_a_program_resumes(program, steps, ranks, tmp_path):
    """A run that stops and is resumed ends with the weights of an uninterrupted run."""

    def printed(folder, last):
        return run(EXAMPLES / f"{program}.py", tmp_path, folder, str(last), ranks=ranks)

    first, second = printed("interrupted", steps), printed("interrupted", 2 * steps)
    whole = printed("whole", 2 * steps)
    assert "starts at step 0" in first and f"starts at step {steps}" in second
    weights = [set(re.findall(r"weights (-?\d+\.\d+)", text)) for text in (first, second, whole)]
    assert weights[0] != weights[1] == weights[2] and weights[0]
