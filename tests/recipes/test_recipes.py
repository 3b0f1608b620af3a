"""Runs the programs in examples/recipes together with their frameworks (make recipes)."""

import math
import os
import re
import shutil
import subprocess

import pytest

from support.programs import ROOT, TORCHRUN

FOLDER = ROOT / "examples/recipes"

MLP = 128 * 512 + 512 + 512 + 1
LAYER = 12 * 64**2 + 13 * 64  # a layer of a GPT-2 of width 64
GPT2 = (97 + 16) * 64 + 2 * LAYER + 2 * 64
# {recipe: (parameters, steps, checkpoints to delete before the second run)}
RECIPES = {
    "with_accelerate.py": (MLP, 150, "epoch[23]"),
    "with_lightning.py": (MLP, 150, "epoch=[12]*"),
    "with_trainer.py": (GPT2, 150, "checkpoint-150"),
}
RUNS = [(recipe, way) for recipe in RECIPES for way in ((), ("--local-steps",))]
RUNS += [("with_accelerate.py", ("--fsdp2",))]


def test_every_recipe_is_run():
    elsewhere = {"with_torchrec.py"}  # tests/torchrec
    assert {path.name for path in FOLDER.glob("*.py")} == RECIPES.keys() | elsewhere


@pytest.mark.parametrize(("recipe", "options"), RUNS, ids=lambda part: "".join(part) or "hook")
def test_a_recipe_trains_and_resumes(recipe, options, tmp_path):
    framework = recipe[len("with_") : -len(".py")].replace("trainer", "transformers")
    pytest.importorskip(framework, reason=f"{framework} is in the environment of make recipes")
    numel, steps, last = RECIPES[recipe]
    period = 20 if "--local-steps" in options else 1
    printed, counted = _run(FOLDER / recipe, options, tmp_path)

    first, final, done = re.search(r"loss (\S+) -> (\S+), (\d+) steps", printed).groups()
    assert float(final) < float(first) / 4 and int(done) == steps
    # docs/reference/payload.md: a header, and rows of 1,024 entries in int4 or ternary
    nbytes, dense = 64 + math.ceil(numel / 1024) * (544 if period == 1 else 240), 8 * numel
    if "--fsdp2" in options:
        # In int8, three messages contain half of the first layer, two contain half of the second.
        # Biases follow in float32, padded to multiples of 16 bytes.
        halves = 128 * 256 + 256, 512 + 1
        first_layer, second = (64 + math.ceil(half / 1024) * 1056 for half in halves)
        nbytes, dense = 3 * (first_layer + 4 * 256) + 2 * (second + 16), 12 * numel
    assert f"sent {nbytes:,} bytes " in printed
    weights = _weights(printed)

    for path in tmp_path.glob(f"saved/{last}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    resumed, _ = _run(FOLDER / recipe, options, tmp_path)
    assert re.search(r"loss (\S+) ->", resumed)[1] != first or "trainer" in recipe  # saves its log
    assert _weights(resumed) == weights

    if counted is None:
        pytest.skip("the bytes sent are not checked: they need `unshare --net` and `ip`")
    # `messages` counts both ranks. Other bytes are initial weights, two dense steps or the flush,
    # and messages of torchrun and the framework. In float32, a step sends `dense` bytes in total.
    messages = 2 * nbytes * (steps // period)
    assert messages < counted < messages + 24 * numel + 2**20 < dense * steps / 3


def _weights(printed):
    """The printed sum of the weights, which must be the same on both ranks."""
    found = re.findall(r"rank \d: weights (-?\d+\.\d+)", printed)
    assert len(found) == 2 and found[0] == found[1]
    return found[0]


def _run(program, options, folder):
    """(output, bytes sent on a private loopback device, or None if there is no such device).

    Linux counts the bytes, so the count includes everything that a framework sends.
    """
    namespace = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    up = ["sh", "-ec", 'ip link set lo up; "$@"; cat /proc/net/dev', "sh"]
    try:
        possible = not subprocess.run([*namespace, *up, "true"], capture_output=True).returncode
    except FileNotFoundError:
        possible = False
    torchrun = [*(namespace + up if possible else []), *TORCHRUN, "--nproc-per-node=2"]
    command = [*torchrun, program, "saved", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counted = re.search(r"^ *lo: *(\d+)", done.stdout, re.MULTILINE)
    return done.stdout, int(counted[1]) if counted else None
