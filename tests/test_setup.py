"""setup.py refuses, in one line, what cannot be built, and finds the CUDA toolkit."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
# Makes a torch for CPUs pass for one of CUDA 13 on a machine without a GPU.
AS_CUDA = """
import runpy, sys, torch
torch.version.cuda = "13.0"
torch.cuda._is_compiled, torch.cuda.is_available = lambda: True, lambda: False
sys.argv = ["setup.py", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
"""
# Answers setup.py's questions, and compiles nothing.
NVCC = """#!/bin/sh
case "$*" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  --dryrun*) echo '#$ TOP={home}/bin/..' >&2 ;;
  *) echo "error: this is no compiler" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def setup(monkeypatch):
    """setup.py as a module, without the variables that it reads."""
    for name in [name for name in os.environ if name.startswith(("DCT_", "CUDA_"))]:
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("dct_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.setuptools, "setup", _nothing_is_built)
    return module


def _nothing_is_built(**_):
    raise AssertionError("setuptools was asked to build")


def _toolkit(folder, release="13.0"):
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime_api.h").touch()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(release=release, home=folder))
    nvcc.chmod(0o755)
    return folder


def _old_setuptools(monkeypatch, setup):
    monkeypatch.setattr(setup.setuptools, "__version__", "63.4.3")


def _no_wheel(monkeypatch, setup):
    from setuptools.errors import ModuleError

    def without_wheel(self, command):
        raise ModuleError(f"invalid command {command!r}")

    monkeypatch.setattr(setup.setuptools.Distribution, "get_command_class", without_wheel)


def _old_torch(monkeypatch, setup):
    monkeypatch.setenv("DCT_BUILD", "0")  # also where nothing is compiled
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.10.0+cu128")


def _build_isolation(monkeypatch, setup):
    monkeypatch.setitem(sys.modules, "torch", None)


def _no_compiler(monkeypatch, setup):
    monkeypatch.setenv("CXX", "/nowhere/g++ -pthread")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            _old_setuptools,
            'setuptools 63.4.3 is older than 64: pip install "setuptools>=64,<82" wheel',
        ),
        (_no_wheel, "needs the package wheel: pip install wheel"),
        (_old_torch, "torch 2.10.0+cu128 is older than 2.11: pip install --upgrade torch"),
        (_build_isolation, "the build needs your torch: pip install --no-build-isolation . ("),
        (_no_compiler, "there is no C++ compiler (/nowhere/g++ is not on PATH): apt-get"),
    ],
)
def test_refused_in_one_line(setup, monkeypatch, make, line):
    make(monkeypatch, setup)
    with pytest.raises(SystemExit, match=f"^setup.py: .*{re.escape(line)}.*$"):
        setup.main()


def test_kernels_are_left_out_on_request(setup, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-c++")
    monkeypatch.setenv("DCT_BUILD", "0")
    given = []
    monkeypatch.setattr(setup.setuptools, "setup", lambda **keywords: given.append(keywords))
    setup.main()
    assert given == [{"license": "BSD-3-Clause"}]
    assert capsys.readouterr().err.startswith("setup.py: DCT_BUILD=0: nothing is compiled")


def test_the_oldest_versions_are_the_same_everywhere(setup):
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={setup.OLDEST_TORCH}"' in project
    assert f'"setuptools>={setup.OLDEST_SETUPTOOLS}"' in project
    assert f"torch >= {setup.OLDEST_TORCH} and a C++17 compiler" in (ROOT / "README.md").read_text()


def test_nvcc_on_the_path_may_be_a_script(setup, tmp_path, monkeypatch):
    """The toolkit is where nvcc says, unless CUDA_HOME is set."""
    home, path = _toolkit(tmp_path / "cuda"), tmp_path / "path"
    path.mkdir()
    (path / "nvcc").write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    (path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    assert setup.find_toolkit("13.2") == (home, "")
    mine = _toolkit(tmp_path / "mine")
    monkeypatch.setenv("CUDA_HOME", str(mine))
    assert setup.find_toolkit("13.0") == (mine, "")
    (mine / "bin" / "nvcc").unlink()
    assert setup.find_toolkit("13.0") == (None, f"{mine} has no bin/nvcc")


@pytest.mark.parametrize("wanted", [None, "1"])
@pytest.mark.parametrize("lack", ["headers", "major"])
def test_an_unsuitable_toolkit_is_named(setup, tmp_path, monkeypatch, capsys, lack, wanted):
    home = _toolkit(tmp_path / "cuda", release="12.8" if lack == "major" else "13.0")
    if lack == "headers":
        (home / "include" / "cuda_runtime_api.h").unlink()
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    reason = {"headers": "has no include/cuda_runtime_api.h", "major": "is CUDA 12"}[lack]
    text = f"the toolkit of CUDA 13 ({home} {reason}; CUDA_HOME says where it is)"
    if wanted is None:
        assert setup.cuda_toolkit(torch) is None
        line = f"setup.py: no CUDA kernels are built, these are missing: {text}\n"
        assert capsys.readouterr().err == line
    else:
        monkeypatch.setenv("DCT_CUDA", wanted)
        line = f"setup.py: DCT_CUDA=1, but these are missing: {text}"
        with pytest.raises(SystemExit, match=f"^{re.escape(line)}$"):
            setup.cuda_toolkit(torch)


def test_a_failed_build_ends_with_a_hint(tmp_path):
    """Builds the extension with CUDA kernels up to the first call of nvcc, which fails."""
    home = _toolkit(tmp_path / "cuda")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc/cuda", "csrc/cpu", "python"):
        (tmp_path / name).mkdir(parents=True)
    sources = "csrc/cpu/empty.cpp\ncsrc/cuda/mask_pack.cu\n"
    (tmp_path / "csrc" / "sources.txt").write_text(sources)
    for source in sources.split():
        (tmp_path / source).touch()
    environment = {**os.environ, "CUDA_HOME": str(home), "TORCH_CUDA_ARCH_LIST": "9.0"}
    environment.pop("DCT_CUDA", None)
    command = [sys.executable, "-c", AS_CUDA]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "error: this is no compiler" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("setup.py: ") and last.endswith("DCT_CUDA=0 builds without CUDA kernels")
