"""The documentation holds: its programs run, its names, messages, links and paths are there.

`make docs` checks the rest: the site is generated from docstrings and from what --help prints.
"""

import ast
import contextlib
import doctest
import importlib
import inspect
import re
import shlex

import pytest
import torch
from programs import ROOT, blocks, in_forks

import cli

DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page for page in DOCS.rglob("*.md")}
# The page on which every public name of a package is generated from its docstring.
GENERATED = {
    "dct_kernels": "reference/kernels.md",
    "dct_parallel": "reference/parallel.md",
    "dct_embeddings": "reference/embeddings.md",
}
PUBLIC = [
    (package, name) for package in GENERATED for name in importlib.import_module(package).__all__
]
# Programs of these pages continue the first one of their page.
CONTINUED = ("guide/coming_from.md", "guide/recipes.md")

# Some programs end at once, and the other rank may still be connecting to this one.
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


PROGRAMS = [(page, program) for page in sorted(PAGES) for program in _programs(page)]


@pytest.mark.parametrize("name", ["dct_kernels.ops", "dct_kernels.layout"])
def test_docstring_examples(name):
    module = importlib.import_module(name)
    package = importlib.import_module("dct_kernels")
    sizes = {name: getattr(package, name) for name in ("payload_layout", "quantized_payload_bytes")}
    # Examples of one module may use the other's functions, as a user would.
    result = doctest.testmod(module, extraglobs=sizes)
    assert result.attempted > 0
    assert result.failed == 0


# Where programs are, and their names.
NAMES = {
    "guide/cluster.md": "cluster",
    "guide/coming_from.md": "deepspeed bf16 torchft averagers",
    "guide/ddp.md": "hook",
    "guide/des.md": "substitution",
    "guide/embeddings.md": "shards-and-replicas",
    "guide/recipes.md": "amp clipping scheduler accumulation parameter-groups freezing compile "
    "evaluation ema uneven-inputs tensorboard two-models",
    "guide/rows.md": "cut pipeline exchange",
    "guide/transformers.md": "local-steps",
    "reference/ops.md": "ops",
}
NAMED = [(page, name) for page, names in NAMES.items() for name in names.split()]


def test_every_program_is_run():
    assert [page for page, _ in PROGRAMS] == [page for page, _ in NAMED]


# README's and examples/hook.py's, too, so that one is left to make check-all.
@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, id=name, marks=[pytest.mark.large] if name == "hook" else [])
        for index, (_, name) in enumerate(NAMED)
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


@pytest.mark.parametrize("package", GENERATED)
def test_every_public_name_is_on_its_page(package):
    """And no other: of a name that is not there the strict build of the site complains."""
    generated = re.findall(rf"^::: {package}\.(\w+)$", PAGES[GENERATED[package]].read_text(), re.M)
    assert sorted(generated) == sorted(importlib.import_module(package).__all__)


TEXT = {**GENERATED, "dct_kernels": "reference/ops.md"}  # where signatures stand as text


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda part: part)
def test_every_public_name_stands_with_its_arguments_as_text(package, name):
    """For who reads the pages in a checkout, where `:::` shows nothing."""
    page = PAGES[TEXT[package]].read_text()
    block = re.search(rf"<!-- signatures: {package} -->\n(.*?)<!-- end", page, re.S)[1]
    said = re.search(rf"^{name}\((.*?)\)(?: -> .*)?\n    [A-Z`]", block, re.S | re.M)[1]
    named = [re.search(r"\w+(?==|$)", part)[0] for part in re.split(r",\s+", said) if part != "*"]
    function = getattr(importlib.import_module(package), name)
    assert named == list(inspect.signature(function).parameters)
    ops, _, python_only = block.partition("In Python only")
    if package == "dct_kernels":
        has_op = hasattr(torch.ops.dct, name)
        assert f"\n{name}(" in (ops if has_op else python_only)


def _calls(text):
    """Calls in the code of a page: of spans, blocks and lines of blocks that are Python."""
    fenced = re.findall(r"```(?:python)?\n(.*?)```", text, re.S)
    lines = [line.partition("  #")[0] for block in fenced for line in block.splitlines()]
    for code in {*fenced, *lines, *re.findall(r"`([^`\n]+)`", text)}:
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(ast.parse(code.strip())):
                if isinstance(node, ast.Call):
                    yield node


def test_calls_fit_the_signatures():
    """Also in code that no test runs: arguments are those that the function has."""
    public = {name: getattr(importlib.import_module(package), name) for package, name in PUBLIC}
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


def _source_texts():
    """The texts of all messages: string literals that follow one another are one."""
    folders = (ROOT / "dct_kernels", ROOT / "python", ROOT / "csrc")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    text = "\n".join(path.read_text() for path in [*files, ROOT / "setup.py"])
    return re.sub(r'"\n\s*f?"', "", text)


def test_messages_quoted_are_those_of_the_code():
    """Of a line that troubleshooting.md quotes all that is not <...>, piece by piece."""
    page = PAGES["guide/troubleshooting.md"].read_text()
    quoted = "\n".join(re.findall(r"```\n(.*?)```", page, re.S)).splitlines()
    ours = [line for line in quoted if line.startswith(("dct::", "DCT:", "setup.py:"))]
    assert len(ours) > 10
    source = _source_texts()
    for line in ours:
        line = re.sub(r"^(dct::[^:]*|setup.py):", "", line)
        for piece in re.split(r"<.*?>| must (?:be|do) |, got |every rank", line):
            assert piece.strip() in source, f"{line}: {piece}"


@pytest.mark.parametrize(
    "page", [*sorted(PAGES), "../README.md", "../CHANGELOG.md", "../bench/README.md"]
)
def test_links_lead_somewhere(page):
    path = DOCS / page
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        file, _, section = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        headings = re.findall(r"^#+ (.*)$", found.read_text() if section else "", re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
        anchors |= set(re.findall(r"^::: (\S+)$", found.read_text() if section else "", re.M))
        assert not section or section in anchors, target


def _bench_commands():
    """(program, its arguments) of every command line of bench/ in the documentation."""
    for page in [*PAGES.values(), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        if page.parent.name == "results":  # as it was run then
            continue
        text = page.read_text().replace("\\\n", " ")
        yield from re.findall(
            r"^(?:sudo \$\(which python\)|python) bench/(\w+)\.py(.*)$", text, re.M
        )


def test_commands_of_bench():
    commands = sorted(set(_bench_commands()))
    assert {name for name, _ in commands} == set(cli.FOLDERS)
    for name, arguments in commands:
        parser = importlib.import_module(f"{cli.FOLDERS[name]}.arguments").parser()
        parser.parse_args(shlex.split(arguments, comments=True))


def test_paths_named_exist():
    """Files of the repository that a page names in code marks are where it says."""
    folders = ("", "python/", "python/dct_parallel/")
    for page in [*PAGES.values(), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        if page.parent.name == "results":  # as it was then
            continue
        for name in re.findall(r"`([\w/]+/[\w.]+\.(?:py|cu|cuh|h|cpp|sh))\b", page.read_text()):
            assert any((ROOT / folder / name).exists() for folder in folders), f"{page}: {name}"


def test_the_version_is_the_same_everywhere():
    version = importlib.import_module("dct_kernels").__version__
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == version
