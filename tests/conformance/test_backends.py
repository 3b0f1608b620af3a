"""Which backend serves: DCT_BACKEND, what is missing, and what `python -m dct_kernels` says."""

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
from dct_kernels import testing

PACKAGE = Path(dct_kernels.__file__).parent
BACKENDS = ("eager", "cpp", "cuda", "triton")


def python(*args, backend=None, package=PACKAGE, **variables):
    """A fresh Python that imports `package`; DCT_BACKEND is `backend` or not set."""
    environment = {name: value for name, value in os.environ.items() if name != "DCT_BACKEND"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path]), **variables}
    if backend is not None:
        environment["DCT_BACKEND"] = backend
    return subprocess.run(
        [sys.executable, *args],
        cwd=package.parent,  # which Python looks through first
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


# Torch is imported once, the package in a process for each DCT_BACKEND.
IMPORTS = """
import json, multiprocessing, os, sys, traceback, torch
def importing(name):
    os.environ["DCT_BACKEND"] = name
    try:
        import dct_kernels
    except Exception:
        return traceback.format_exc()
    return "imported"
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(importing, sys.argv[1:], chunksize=1)))
"""


def imported(names, **options):
    """{DCT_BACKEND: "imported", or how importing the package failed}."""
    result = python("-c", IMPORTS, *names, **options)
    assert result.returncode == 0, result.stderr
    return dict(zip(names, json.loads(result.stdout), strict=True))


def run_again(files, *options, **environment):
    """These files of this suite, in a process of another environment."""
    paths = [str(Path(__file__).parent / f"test_{name}.py") for name in files]
    result = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *paths, **environment)
    assert result.returncode == 0, result.stdout[-3000:]  # 5 if nothing ran


def found(**options):
    """{backend: whether it is there}, as `python -m dct_kernels` tells it."""
    result = python("-m", "dct_kernels", **options)
    assert result.returncode == 0, result.stderr
    lines = re.findall(
        r"^  (\w+) +(yes|no: .+?)(?:, built with torch (.+))?$", result.stdout, re.MULTILINE
    )
    assert tuple(name for name, _, _ in lines) == BACKENDS
    for name, said, built in lines:
        compiled = said == "yes" and name in ("cpp", "cuda")
        assert bool(re.match(r"2\.\d+\.\d+", built)) == compiled
    assert torch.__version__ in result.stdout
    assert dct_kernels.__version__ in result.stdout
    return {name: said == "yes" for name, said, _ in lines}


@pytest.fixture(scope="module")
def available():
    return found()


LARGE = [pytest.param(name, marks=pytest.mark.large) for name in ("empty", "garbage")]


@pytest.fixture(params=["without", *LARGE])
def uncompiled(request, tmp_path):
    """The package without its compiled library, and with ones that do not load."""
    copy = tmp_path / "dct_kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    held = {"garbage": b"not a library", "empty": b""}.get(request.param)
    for name in ("_C", "_cuda") if held is not None else ():
        (copy / f"{name}.abi3.so").write_bytes(held)
    return copy


def test_the_command_lists_every_backend(available):
    assert available["eager"]
    compiled = bool(list(PACKAGE.glob("_C*.so")))
    assert available["cpp"] == compiled
    # What can run here is what the conformance suite runs on.
    runnable = {name for name, there in available.items() if there}
    if not torch.cuda.is_available():
        runnable.discard("cuda")
    assert set(testing.backends()) & set(BACKENDS) == runnable


def test_a_backend_is_its_ops_and_a_device():
    for backend in testing.backends().values():
        assert set(vars(backend)) == {*OPS, "device"}
        torch.empty(0, device=backend.device)


def test_forcing_a_backend(available):
    """It serves, or importing fails and says why; nothing else steps in."""
    for name, said in imported([*BACKENDS, "EAGER", ""]).items():
        if name not in BACKENDS:
            assert "DCT_BACKEND must be one of eager, cpp, cuda, triton, got " in said
        elif available[name]:
            assert said == "imported"
        else:
            assert f"DCT_BACKEND={name}, but that backend is not available: " in said


def test_without_a_compiled_library_eager_serves(uncompiled):
    there = found(package=uncompiled)
    assert there["eager"]
    assert not there["cpp"]
    assert not there["cuda"]
    code = "import torch, dct_kernels; print(dct_kernels.row_pack(torch.ones(1, 4), 1, torch.half))"
    result = python("-c", code, package=uncompiled)
    assert result.stdout.startswith("(tensor([[1.]], dtype=torch.float16)"), result.stderr


def test_the_layer_warns_of_eager_once_and_says_what_to_do(uncompiled):
    """In a wheel; where eager was asked for it does not."""
    layer = Path(dct_parallel.__file__).parent
    code = (
        "import dct_kernels, dct_parallel; print(dct_kernels.backend_of('cpu'));"
        "[dct_parallel.Compressor(8) for _ in range(2)]"
    )
    shutil.copytree(layer, uncompiled.parent / "dct_parallel")
    result = python("-c", code, package=uncompiled)
    assert result.stdout == "eager\n"
    assert result.stderr.count("Warning: DCT: backend eager on cpu") == 1, result.stderr
    assert f"says what is missing; this installation is in {uncompiled}." in result.stderr
    assert "backend eager" not in python("-c", code, package=uncompiled, backend="eager").stderr
    said = python("-m", "dct_kernels", package=uncompiled).stdout
    damaged = r"_C\S+, built with torch unknown, does not load"
    assert re.search(
        rf"cpp +no: (nothing is compiled in .*: install again without DCT_BUILD=0|{damaged})", said
    )


@pytest.mark.parametrize("backend", [name for name in testing.backends() if name in BACKENDS])
def test_which_backend_serves_a_device(backend):
    device = testing.backends()[backend].device
    code = f"import dct_kernels; print(dct_kernels.backend_of('{device}:0'))"
    assert python("-c", code, backend=backend).stdout == f"{backend}\n"


def test_forcing_what_is_not_there_fails_loudly(uncompiled):
    for name, said in imported(["cpp", "cuda"], package=uncompiled).items():
        assert f"ImportError: DCT_BACKEND={name}, but that backend is not available: " in said


def test_eager_forced_is_eager():
    """No compiled kernel is registered, and the reference is what the ops run."""
    code = (
        "import torch, dct_kernels;"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key;"
        "print([has('dct::mask_pack', key) for key in ('CPU', 'CompositeExplicitAutograd')])"
    )
    result = python("-c", code, backend="eager")
    assert result.stdout == "[False, True]\n", result.stderr


@pytest.mark.large
def test_eager_forced_passes_opcheck_and_autograd():
    """Elsewhere these tests run on whatever the dispatcher picks, which may be compiled."""
    run_again(("opcheck", "autograd"), backend="eager")


@pytest.mark.parametrize("op", OPS)
def test_the_dispatcher_runs_the_public_function(op):
    """A public function is its op: same results from the same arguments."""
    public, raw = arguments(op), arguments(op)
    results = getattr(dct_kernels, op)(**public), getattr(torch.ops.dct, op).default(**raw)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert a is b is None or torch.equal(a, b)
    for name, value in public.items():
        assert torch.equal(value, raw[name]) if isinstance(value, torch.Tensor) else True


def test_the_ops_are_listed_before_any_is_used():
    result = python("-c", "import torch, dct_kernels; print(*dir(torch.ops.dct))")
    assert set(OPS) <= set(result.stdout.split()), result.stderr


def test_schemas():
    """The contract, word for word: names, order, defaults, and what is written."""
    expected = {
        "sample_threshold": "(Tensor grad, Tensor residual, float density, SymInt ranges=1, SymInt "
        "max_samples=65536, SymInt seed=0, Tensor? inv_scale=None) -> Tensor",
        "mask_pack": "(Tensor(a!) residual, Tensor grad, Tensor threshold, Tensor(b!) payload, "
        "Tensor(c!) seen, SymInt capacity, ScalarType value_dtype, Tensor? inv_scale=None) -> ()",
        "scatter_unpack": "(Tensor payloads, Tensor(a!) out, SymInt capacity, ScalarType "
        "value_dtype, float scale=1., Tensor? out_scale=None) -> Tensor",
        "quantize_pack": "(Tensor(a!)? residual, Tensor grad, Tensor(b!) payload, str format, "
        "Tensor? inv_scale=None) -> ()",
        "dequantize_sum": "(Tensor payloads, Tensor(a!) out, str format, float scale=1., Tensor? "
        "out_scale=None) -> Tensor",
        "dequantize_sum_pack": "(Tensor payloads, Tensor(a!) residual, Tensor(b!) payload, str "
        "format, float scale=1.) -> Tensor",
        "row_pack": "(Tensor x, SymInt k, ScalarType value_dtype) -> (Tensor values, Tensor "
        "positions)",
        "row_gather": "(Tensor x, Tensor positions, SymInt k, ScalarType value_dtype) -> Tensor",
        "row_unpack": "(Tensor values, Tensor positions, SymInt width, ScalarType dtype) -> Tensor",
        "row_quantize": "(Tensor x, str format) -> Tensor",
        "row_dequantize": "(Tensor rows, SymInt width, str format, ScalarType dtype) -> Tensor",
    }
    actual = {op: str(getattr(torch.ops.dct, op).default._schema) for op in OPS}
    assert actual == {op: f"dct::{op}{schema}" for op, schema in expected.items()}


@pytest.mark.skipif("cpp" not in testing.backends(), reason="no compiled CPU kernels")
@pytest.mark.large  # the native tests run on every instruction set by default
@pytest.mark.parametrize("isa", ["default", "avx2"])
def test_older_instruction_sets(isa):
    """The compiled CPU kernels take the best there is: here less than that, by torch's switch."""
    ops = ("mask_pack", "overflow", "scatter_unpack", "sample_threshold")
    ops += ("quantize_pack", "dequantize_sum", "dequantize_sum_pack")
    ops += ("row_pack", "row_unpack", "row_quantize", "row_dequantize")
    run_again(ops, "-k", "cpp", ATEN_CPU_CAPABILITY=isa)
