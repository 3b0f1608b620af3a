"""Programs in examples/recipes, beside the frameworks that they are for (make recipes)."""

import re

import pytest
from programs import ROOT, run

RECIPES = ROOT / "examples/recipes"
FRAMEWORKS = ("lightning", "accelerate")


def test_every_recipe_is_run():
    elsewhere = {"with_torchrec.py"}  # tests/torchrec
    found = {path.name for path in RECIPES.glob("*.py")}
    assert found == {f"with_{f}.py" for f in FRAMEWORKS} | elsewhere


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_recipe(framework, tmp_path):
    pytest.importorskip(framework, reason=f"{framework} is in the environment of make recipes")
    printed = run(RECIPES / f"with_{framework}.py", tmp_path)
    first, last = re.search(r"loss (\S+) -> (\S+) in 200 steps", printed).groups()
    assert float(last) < float(first) / 2
    assert re.search(r"sent 0\.9\d% of the entries, 3,456 bytes a step", printed)
