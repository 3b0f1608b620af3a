"""bench/gpu without a GPU: a dry run of check.py, and the patches of variants.py."""

import json
import sys
import tarfile
from pathlib import Path

import pytest
from ptx import toolkit

from bench.gpu import variants

GPU = Path(__file__).parents[2] / "bench" / "gpu"


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    yield __import__("check")
    del sys.modules["check"]


def test_a_dry_run_finds_a_mistyped_argument(check, tmp_path):
    """A dry run needs no GPU. It uses small sizes, and collects tests without running them."""
    plan = {each.name: check.dry(each) for each in check.STAGES}
    sizes = plan["sizes"]
    wrong = sizes._replace(name="wrong", command=(*sizes.command, "--scael", "2"))
    stages = [plan[name] for name in ("environment", "counters", "sizes", "memcheck")]
    archive = tmp_path / "results.tgz"
    assert check.run([*stages, wrong], tmp_path / "out", 900, archive) == 1
    with tarfile.open(archive) as file:
        assert {"out/summary.json", "out/wrong.log", "out/sizes.json"} <= {*file.getnames()}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [each["status"] for each in summary] == ["passed"] * len(stages) + ["failed"]
    assert "--scael" in summary[-1]["message"]
    timed = json.loads((tmp_path / "out" / "sizes.json").read_text())["results"]
    assert len({each["numel"] for each in timed if each["op"] == "mask_pack"}) > 3


def test_expected_times_leave_a_margin(check):
    expected = {stage.name: stage.expected for stage in check.STAGES}
    assert check.LIMITS == {"plan": 560, "layer": 300}
    for name, stages in check.SETS.items():
        assert sum(expected[stage] for stage in stages) < 0.85 * check.LIMITS[name]
    for stage in check.STAGES:
        assert 1.1 * stage.expected < stage.limit
        if "--seconds" in stage.command:  # the program stops itself, and prints its results
            assert int(stage.command[stage.command.index("--seconds") + 1]) < stage.limit - 5


def test_every_patch_replaces_text_and_a_wrong_one_is_refused(tmp_path):
    for i, variant in enumerate(variants.VARIANTS.values()):
        folder = variants.patched(toolkit.CSRC, variant, tmp_path / f"{i}")
        for where, old, new in variant.patches:
            left = [path.read_text().count(old) for path in folder.glob(where)]
            assert sum(left) == 0 or old in new
    wrong = variants.Variant((), (("**/mask_pack.cu", "no such text", ""),))
    with pytest.raises(
        ValueError, match=r"must replace a text of .*mask_pack.cu, got 'no such text'"
    ):
        variants.patched(toolkit.CSRC, wrong, tmp_path / "wrong")
