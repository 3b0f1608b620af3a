"""Backend selection: DCT_BACKEND, missing libraries, the output of `python -m dct_kernels`."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dct_kernels
import dct_parallel
from conformance.arguments import OPS, arguments
from dct_kernels import _load, _ops, testing

PACKAGE = Path(dct_kernels.__file__).parent
BACKENDS = ("eager", "cpp", "cuda", "triton")


def python(*args, backend=None, package=PACKAGE, **variables):
    """Run a new Python process that imports `package`, with DCT_BACKEND=`backend` or unset."""
    environment = {name: value for name, value in os.environ.items() if name != "DCT_BACKEND"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path]), **variables}
    if backend is not None:
        environment["DCT_BACKEND"] = backend
    return subprocess.run(
        [sys.executable, *args],
        cwd=package.parent,  # which Python searches first
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


# One process imports torch, and each case runs in a fork of this process.
FORKS = """
import contextlib, io, json, multiprocessing, os, sys, traceback, torch
def run(case):
    backend, code = case
    if backend is not None:
        os.environ["DCT_BACKEND"] = backend
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            exec(code, {})
        except Exception:
            traceback.print_exc()
    return out.getvalue(), error.getvalue()
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(run, json.loads(sys.argv[1]), chunksize=1)))
"""


def outputs(cases, package):
    """{name: (stdout, stderr)} for each (DCT_BACKEND or None, code) of `cases`."""
    result = python("-c", FORKS, json.dumps(list(cases.values())), package=package)
    assert result.returncode == 0, result.stderr
    return dict(zip(cases, json.loads(result.stdout), strict=True))


COMMAND = (None, "import runpy; runpy.run_module('dct_kernels', run_name='__main__')")
FORCED = (*BACKENDS, "EAGER", "")
SERVING = {n: backend.device for n, backend in testing.backends().items() if n in BACKENDS}
LAYER = (
    "import dct_kernels, dct_parallel; print(dct_kernels.backend_of('cpu'));"
    "[dct_parallel.Compressor(8) for _ in range(2)]"
)


@pytest.fixture(scope="module")
def installed():
    has = "torch._C._dispatch_has_kernel_for_dispatch_key('dct::mask_pack', key)"
    keys = ("CPU", "CompositeExplicitAutograd")
    cases = {
        "command": COMMAND,
        "kernels of eager": (
            "eager",
            f"import torch, dct_kernels; print([{has} for key in {keys}])",
        ),
        "ops": (None, "import torch, dct_kernels; print(*dir(torch.ops.dct))"),
    }
    for name in FORCED:
        cases[f"forcing {name}"] = (name, "import dct_kernels; print('imported')")
    for name, device in SERVING.items():
        code = f"import dct_kernels; print(dct_kernels.backend_of('{device}:0'))"
        cases[f"serving {name}"] = (name, code)
    return outputs(cases, PACKAGE)


BROKEN = [pytest.param(name, marks=pytest.mark.large) for name in ("empty", "garbage")]


@pytest.fixture(scope="module", params=["without", *BROKEN])
def uncompiled(request, tmp_path_factory):
    """Outputs of a copy of the package whose compiled libraries are missing or do not load."""
    copy = tmp_path_factory.mktemp("uncompiled") / "dct_kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(Path(dct_parallel.__file__).parent, copy.parent / "dct_parallel")
    content = {"garbage": b"not a library", "empty": b""}.get(request.param)
    for name in ("_C", "_cuda") if content is not None else ():
        (copy / f"{name}.abi3.so").write_bytes(content)
    pack = "import torch, dct_kernels as d; print(d.row_pack(torch.ones(1, 4), 1, torch.half))"
    cases = {"command": COMMAND, "pack": (None, pack)}
    cases |= {"layer": (None, LAYER), "layer on eager": ("eager", LAYER)}
    cases |= {name: (name, "import dct_kernels; print('imported')") for name in ("cpp", "cuda")}
    return outputs(cases, copy) | {"path": copy}


def availability(output):
    """{backend: whether it is available}, from the output of `python -m dct_kernels`."""
    text, error = output
    assert not error
    lines = re.findall(r"^  (\w+) +(yes|no: .+?)(?:, built with torch (.+))?$", text, re.MULTILINE)
    assert tuple(name for name, _, _ in lines) == BACKENDS
    for name, answer, built in lines:
        compiled = answer == "yes" and name in ("cpp", "cuda")
        assert bool(re.match(r"2\.\d+\.\d+", built)) == compiled
    assert torch.__version__ in text
    assert dct_kernels.__version__ in text
    return {name: answer == "yes" for name, answer, _ in lines}


def test_the_command_lists_every_backend(installed):
    available = availability(installed["command"])
    assert available["eager"]
    assert available["cpp"] == bool(list(PACKAGE.glob("_C*.so")))
    # The conformance suite must use every backend that can run on this machine.
    runnable = {name for name, there in available.items() if there}
    if not torch.cuda.is_available():
        runnable.discard("cuda")
    assert set(SERVING) == runnable


def test_a_backend_has_every_op_and_a_device():
    for backend in testing.backends().values():
        assert set(vars(backend)) == {*OPS, "device"}
        torch.empty(0, device=backend.device)


def test_a_forced_backend_is_used_or_the_import_fails(installed):
    """The error states the reason. There is no fallback."""
    available = availability(installed["command"])
    for name in FORCED:
        output, error = installed[f"forcing {name}"]
        if name not in BACKENDS:
            assert "DCT_BACKEND must be one of eager, cpp, cuda, triton, got " in error
        elif available[name]:
            assert output == "imported\n"
        else:
            assert f"DCT_BACKEND={name}, but that backend is not available: " in error


def test_backend_of_a_device(installed):
    for name in SERVING:
        assert installed[f"serving {name}"][0] == f"{name}\n"


def test_forcing_eager_registers_no_compiled_kernel(installed):
    """With eager forced, the ops run the reference implementation."""
    assert installed["kernels of eager"][0] == "[False, True]\n"


def test_dir_lists_the_ops_before_their_first_use(installed):
    assert set(OPS) <= set(installed["ops"][0].split())


def test_eager_is_used_without_a_compiled_library(uncompiled):
    available = availability(uncompiled["command"])
    assert available["eager"]
    assert not available["cpp"]
    assert not available["cuda"]
    output, error = uncompiled["pack"]
    assert output.startswith("(tensor([[1.]], dtype=torch.float16)"), error
    for name in ("cpp", "cuda"):
        expected = f"ImportError: DCT_BACKEND={name}, but that backend is not available: "
        assert expected in uncompiled[name][1]


@pytest.mark.parametrize(
    "value, error", [("", "must be one of"), ("cpp", "=cpp, but that backend")]
)
def test_the_command_explains_a_value_with_which_the_import_fails(uncompiled, value, error):
    result = python("-m", "dct_kernels", backend=value, package=uncompiled["path"])
    assert f"DCT_BACKEND: {value!r}\nimport dct_kernels fails: DCT_BACKEND" in result.stdout
    assert error in result.stdout
    assert not availability((result.stdout, result.stderr))["cpp"]


def test_dct_parallel_warns_once_that_eager_is_used(uncompiled):
    """The warning contains the path of the installation. Forcing eager suppresses the warning."""
    output, error = uncompiled["layer"]
    assert output == "eager\n", error
    assert error.count("<string>:1: UserWarning: DCT: backend eager on cpu") == 1, error
    assert f"says what is missing; this installation is in {uncompiled['path']}." in error
    assert uncompiled["layer on eager"] == ["eager\n", ""]
    damaged = r"_C\S+, built with torch unknown, does not load"
    missing = r"nothing is compiled in .*: install again without DCT_BUILD=0"
    assert re.search(rf"cpp +no: ({missing}|{damaged})", uncompiled["command"][0])


def test_a_library_built_for_other_schemas_is_not_loaded(tmp_path):
    """The ops of such a library would misread their arguments."""
    older = tmp_path / "_C.abi3.so"
    older.write_bytes(b"dct_kernels built with torch 2.13.0\0")
    assert "compiled for other schemas" in _load._why_not_loaded("cpp", older)


def run_again(files, *options, **environment):
    """Run test files of this folder in a new process with these environment variables."""
    paths = [str(Path(__file__).parent / f"test_{name}.py") for name in files]
    result = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *paths, **environment)
    assert result.returncode == 0, result.stdout[-3000:]  # 5 if nothing ran


@pytest.mark.large
def test_forced_eager_passes_opcheck_and_autograd():
    """Without DCT_BACKEND, the two test files may run on a compiled backend."""
    run_again(("opcheck", "autograd"), backend="eager")


@pytest.mark.parametrize("op", OPS)
def test_public_functions_and_ops_give_equal_results(op):
    public, raw = arguments(op), arguments(op)
    results = getattr(dct_kernels, op)(**public), getattr(torch.ops.dct, op).default(**raw)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert a is b is None or torch.equal(a, b)
    for name, value in public.items():
        assert torch.equal(value, raw[name]) if isinstance(value, torch.Tensor) else True


def test_the_schema_digest_is_current():
    """If a schema changes, change its function in ops.cpp, then the digest in built_with.cpp."""
    built_with = Path(__file__).parents[2] / "csrc" / "bindings" / "built_with.cpp"
    assert f' for schemas {_ops.schemas_digest()}"' in built_with.read_text()


@pytest.mark.skipif("cpp" not in testing.backends(), reason="no compiled CPU kernels")
@pytest.mark.large  # by default, only the native tests run on every instruction set
@pytest.mark.parametrize("isa", ["default", "avx2"])
def test_older_instruction_sets(isa):
    """The CPU kernels use the best instruction set unless ATEN_CPU_CAPABILITY limits it."""
    ops = ("mask_pack", "overflow", "scatter_unpack", "sample_threshold")
    ops += ("quantize_pack", "dequantize_sum", "diff_pack", "untrusted_patch")
    ops += ("row_pack", "row_unpack", "row_quantize", "row_dequantize", "row_dequantize_sum")
    run_again(ops, "-k", "cpp", ATEN_CPU_CAPABILITY=isa)
