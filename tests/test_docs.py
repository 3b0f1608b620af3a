"""Programs in the documentation run. Calls and names in the documentation match the packages.

`make docs` checks links, and generates the reference from docstrings.
"""

import ast
import contextlib
import doctest
import importlib
import inspect
import re

import pytest
import torch

import dct_kernels
from dct_kernels._ops import OPS
from support.programs import ROOT, blocks, in_forks

DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md"))}
# {package: page that documents all its public names}
REFERENCE = {
    "dct_kernels": "reference/kernels.md",
    "dct_parallel": "reference/parallel.md",
    "dct_embeddings": "reference/embeddings.md",
    "dct_patches": "reference/patches.md",
}
# On these pages, later programs continue the first one.
CONTINUED = ("guide/coming_from.md", "guide/recipes.md")

# Without this code, a rank might exit while the other rank is still connecting to it.
END = """
store = dist.distributed_c10d._get_default_store()
store.set(f"done{dist.get_rank()}", "")
store.wait(["done0", "done1"])
dist.destroy_process_group()
"""


def _programs(page):
    found = blocks(PAGES[page])
    if page not in CONTINUED:
        return found
    first, *others = found
    return [f"{first}{other}{END}" for other in others]


PROGRAMS = [
    pytest.param(program, id=f"{page}-{number}")
    for page in PAGES
    for number, program in enumerate(_programs(page), 1)
]


@pytest.mark.parametrize("name", [*OPS, "patch_bytes", "payload_layout", "quantized_payload_bytes"])
def test_docstring_examples(name):
    names = {"torch": torch, **vars(dct_kernels)}  # examples of one function may use others
    (examples,) = doctest.DocTestFinder().find(names[name], name, module=False, globs=names)
    result = doctest.DocTestRunner().run(examples)
    assert result.failed == 0 < result.attempted


@pytest.mark.parametrize("program", PROGRAMS)
@in_forks
def test_program(run, program, tmp_path):
    if "pipelining" in program and torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        pytest.skip("pipelining supports no integer tensors between stages before torch 2.13")
    script = tmp_path / "program.py"
    script.write_text(program)
    run(script, tmp_path)


@pytest.mark.parametrize("package", REFERENCE)
def test_every_public_name_is_on_its_page(package):
    generated = re.findall(rf"^::: {package}\.(\w+)$", PAGES[REFERENCE[package]].read_text(), re.M)
    assert sorted(generated) == sorted(importlib.import_module(package).__all__)


def _calls(text):
    """The calls in the Python code of a page: in inline code, code blocks and their lines."""
    fenced = re.findall(r"```(?:python)?\n(.*?)```", text, re.S)
    lines = [line.partition("  #")[0] for block in fenced for line in block.splitlines()]
    for code in {*fenced, *lines, *re.findall(r"`([^`\n]+)`", text)}:
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(ast.parse(code.strip())):
                if isinstance(node, ast.Call):
                    yield node


def test_calls_match_the_signatures():
    """Also checks signatures on the pages, and code that no test runs."""
    packages = map(importlib.import_module, REFERENCE)
    public = {name: getattr(package, name) for package in packages for name in package.__all__}
    signatures, found = {name: inspect.signature(made) for name, made in public.items()}, 0
    for page in [*PAGES.values(), ROOT / "README.md"]:
        for call in _calls(page.read_text()):
            signature = signatures.get(getattr(call.func, "id", None))
            if signature is None or any(isinstance(a, ast.Starred) for a in call.args):
                continue
            found += 1
            places = [...] * len(call.args)
            names = {keyword.arg: ... for keyword in call.keywords if keyword.arg}
            try:
                signature.bind_partial(*places, **names)
            except TypeError as error:
                pytest.fail(f"{page}: {ast.unparse(call)}: {error}")
    assert found > 40


def test_the_timeout_in_the_guide_is_that_of_the_program():
    timeout = "timeout=timedelta(minutes=5)"
    assert f'init_process_group("gloo", {timeout})' in (ROOT / "examples/hook.py").read_text()
    page = PAGES["guide/cluster.md"].read_text()
    assert f"`{timeout}`" in page and "within 300 s" in page


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *ROOT.glob("*/README.md")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_link_targets_exist(page):
    """`make docs` checks the links in docs/."""
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_version_is_the_same_everywhere():
    version = importlib.import_module("dct_kernels").__version__
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == version
