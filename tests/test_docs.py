"""The documentation holds: its programs and examples run, its signatures are the code's."""

import doctest
import importlib
import inspect
import re

import pytest
import torch
from programs import ROOT, blocks, in_forks

from dct_parallel.rows.all_to_all import whole_rows

PAGES = {page.name: page for page in (ROOT / "docs").glob("*.md")}
# Signatures stand in blocks of their own, without a language.
SIGNATURE_PAGES = {
    "dct_kernels": "ops.md",
    "dct_parallel": "api.md",
    "dct_embeddings": "embeddings.md",
}
PUBLIC = [
    (package, name)
    for package in SIGNATURE_PAGES
    for name in importlib.import_module(package).__all__
]
PROGRAMS = [(page, block) for page in sorted(PAGES) for block in blocks(PAGES[page])]


@pytest.mark.parametrize("name", ["dct_kernels.ops", "dct_kernels.layout"])
def test_docstring_examples(name):
    module = importlib.import_module(name)
    payload_layout = importlib.import_module("dct_kernels").payload_layout
    # Examples of one module may use the other's functions, as a user would.
    result = doctest.testmod(module, extraglobs={"payload_layout": payload_layout})
    assert result.attempted > 0
    assert result.failed == 0


def test_every_program_is_run():
    assert [page for page, _ in PROGRAMS] == [
        "cluster.md",
        "substitution.md",
        *["training.md"] * 6,
    ]


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(0, id="cluster"),
        pytest.param(1, id="substitution"),
        pytest.param(2, id="hook", marks=pytest.mark.large),  # README's and examples/hook.py's, too
        pytest.param(3, id="local-steps"),
        pytest.param(4, id="cut"),
        pytest.param(5, id="pipeline"),
        pytest.param(6, id="exchange"),
        pytest.param(7, id="shards-and-replicas"),
    ],
)
@in_forks
def test_program(run, index, tmp_path):
    program = PROGRAMS[index][1]
    if "pipelining" in program:
        version = torch.torch_version.TorchVersion(torch.__version__)
        if version < "2.13":
            pytest.skip("pipelining takes no integer tensors between stages before torch 2.13")
    script = tmp_path / "program.py"
    script.write_text(program)
    run(script, tmp_path)


def _parameters(signature):
    """[(name, kind, default)]: annotations are the code's alone."""
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_signature(package, name):
    """The page shows the signature as it is, defaults included."""
    public = getattr(importlib.import_module(package), name)
    page = PAGES[SIGNATURE_PAGES[package]].read_text()
    (written,) = re.findall(rf"^```\n{name}(\([^`]*\))\n```$", page, re.MULTILINE)
    namespace = {"torch": torch, "whole_rows": whole_rows}
    exec(f"def documented{written}: pass", namespace)
    documented = inspect.signature(namespace["documented"])
    assert _parameters(documented) == _parameters(inspect.signature(public))


@pytest.mark.parametrize(
    "package, name",
    [
        ("dct_parallel", "DCTState"),
        ("dct_parallel", "DCTAverager"),
        ("dct_parallel", "Compressor"),
        ("dct_parallel", "WireMeter"),
        ("dct_embeddings", "ReplicaSync"),
    ],
)
def test_methods_are_named(package, name):
    page = PAGES[SIGNATURE_PAGES[package]].read_text()
    section = page[page.index(f"## {name}\n") :].split("\n## ")[0]
    public = getattr(importlib.import_module(package), name)
    for name, member in vars(public).items():
        if not name.startswith("_"):
            named = f"`{name}`" if isinstance(member, property) else f"`{name}("
            assert named in section or f"`{name}`," in section, name


@pytest.mark.parametrize(
    "page", [*sorted(PAGES), "../README.md", "../CHANGELOG.md", "../bench/README.md"]
)
def test_links_lead_somewhere(page):
    path = ROOT / "docs" / page
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        file, _, section = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        headings = re.findall(r"^#+ (.*)$", found.read_text() if section else "", re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
        assert not section or section in anchors, target


def test_paths_named_exist():
    """Files of the repository that a page names in code marks are where it says."""
    folders = ("", "python/")
    for page in [*PAGES.values(), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`([\w/]+/[\w.]+\.(?:py|cu|cuh|h|cpp|sh))\b", page.read_text()):
            assert any((ROOT / folder / name).exists() for folder in folders), f"{page}: {name}"


def test_the_version_is_the_same_everywhere():
    version = importlib.import_module("dct_kernels").__version__
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == version
