"""setup.py: what it refuses, in one line, before anything is built; the CUDA toolkit it finds."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
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
# What is compiled says so, and does not compile.
NVCC = """#!/bin/sh
case "$*" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  --dryrun*) echo '#$ TOP={home}/bin/..' >&2 ;;
  *) echo "error: this is no compiler" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def setup(monkeypatch):
    """setup.py as a module, in an environment that says nothing."""
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


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The only folder on PATH beside the system's, for commands named nvcc."""
    folder = tmp_path / "path" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.mark.parametrize("version", ["57.4.0", "63.4.3"])
def test_setuptools_that_do_not_read_pyproject_are_refused(setup, monkeypatch, version):
    monkeypatch.setattr(setup.setuptools, "__version__", version)
    line = f'setuptools {version} is older than 64: pip install "setuptools>=64,<82" wheel'
    with pytest.raises(SystemExit, match=f"^setup.py: {re.escape(line)}$"):
        setup.main()


def test_setuptools_that_make_no_wheel_are_refused(setup, monkeypatch):
    def without_wheel(self, command):
        raise DistutilsModuleError(f"invalid command {command!r}")

    from setuptools.errors import ModuleError as DistutilsModuleError

    monkeypatch.setattr(setup.setuptools.Distribution, "get_command_class", without_wheel)
    with pytest.raises(SystemExit, match=r"needs the package wheel: pip install wheel$"):
        setup.main()


@pytest.mark.large
def test_a_bare_environment_is_answered_in_one_line(tmp_path):
    """With the setuptools that Python brings: up to 3.11, and they make no wheel."""
    venv.create(tmp_path / "bare", with_pip=True)
    pip = [tmp_path / "bare" / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    has_setuptools = subprocess.run([*pip, "show", "setuptools"], capture_output=True, text=True)
    if has_setuptools.returncode:
        pytest.skip("no setuptools in a new environment of this Python")
    given = ["install", "--no-build-isolation", "--no-deps", "--no-index", ROOT]
    done = subprocess.run([*pip, *given], capture_output=True, text=True, timeout=300)
    version = re.search(r"Version: (.*)", has_setuptools.stdout)[1]
    assert f"setup.py: setuptools {version} needs the package wheel: pip ins" in done.stderr
    assert "[1 lines of output]" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("build", ["0", None])
@pytest.mark.parametrize("version", ["1.13.1", "2.10.0+cu128"])
def test_an_older_torch_is_left_as_it_is(setup, tmp_path, monkeypatch, version, build):
    """Before pip reads what the package depends on, and replaces it; without kernels as well."""
    folder = tmp_path / f"torch-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if build is not None:
        monkeypatch.setenv("DCT_BUILD", build)
    line = f"setup.py: torch {version} is older than 2.11: pip install --upgrade torch"
    with pytest.raises(SystemExit, match=f"^{re.escape(line)}$"):
        setup.main()


def test_without_a_torch_it_says_how_to_get_one(setup, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    """Nor is there one in pip's own environment for builds, where the user has one."""
    line = (
        r"^setup.py: the build needs your torch: pip install --no-build-isolation \. \(and before"
    )
    with pytest.raises(SystemExit, match=line):
        setup.main()


@pytest.mark.parametrize("compiler", ["no-such-c++", "/nowhere/g++ -pthread"])
def test_without_a_compiler_it_stops(setup, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    name = compiler.partition(" ")[0]
    line = rf"^setup.py: there is no C\+\+ compiler \({re.escape(name)} is not on PATH\): .*DCT_BUI"
    with pytest.raises(SystemExit, match=line):
        setup.main()


def test_kernels_are_left_out_where_that_was_asked_for(setup, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-c++")
    monkeypatch.setenv("DCT_BUILD", "0")
    given = []
    monkeypatch.setattr(setup.setuptools, "setup", lambda **keywords: given.append(keywords))
    setup.main()
    assert given == [{"license": "BSD-3-Clause"}]
    assert capsys.readouterr().err.startswith("setup.py: DCT_BUILD=0: nothing is compiled")


def test_the_oldest_torch_is_the_same_everywhere(setup):
    (required,) = re.findall(r'"torch>=(.*?)"', (ROOT / "pyproject.toml").read_text())
    assert required == setup.OLDEST_TORCH
    assert f"torch >= {required} and a C++17 compiler" in (ROOT / "README.md").read_text()


def test_setuptools_of_every_age_read_the_license(setup):
    """Before 77 they refuse this table with `license-files`, and with `license` as a text."""
    text = (ROOT / "pyproject.toml").read_text()
    project = text.partition("[project]\n")[2].partition("\n[")[0]
    assert not re.search(r"^license", project, re.MULTILINE)
    assert 'dynamic = ["license"]' in project
    assert f'"setuptools>={setup.OLDEST_SETUPTOOLS}"' in text


@pytest.mark.parametrize("kind", ["link", "script", "itself"])
def test_nvcc_on_the_path_may_be_a_link_or_a_script(setup, tmp_path, monkeypatch, path, kind):
    home = _toolkit(tmp_path / "cuda")
    if kind == "link":
        (path / "nvcc").symlink_to(home / "bin" / "nvcc")
    elif kind == "script":
        (path / "nvcc").write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
        (path / "nvcc").chmod(0o755)
    else:
        monkeypatch.setenv("PATH", f"{home}/bin:/usr/bin:/bin")
    assert setup.find_toolkit("13.2") == (home, "")


def test_headers_that_lie_beside_nvcc_serve(setup, path):
    """As Debian has them: nvcc names a folder that holds none."""
    home = _toolkit(path.parent / "other")
    shutil.rmtree(home / "include")
    shutil.copy(home / "bin" / "nvcc", path)
    _toolkit(path.parent / "headers")
    (path.parent / "headers" / "include").rename(path.parent / "include")
    assert setup.find_toolkit("13.0") == (path.parent, "")


def test_what_the_environment_says_comes_first(setup, tmp_path, monkeypatch, path):
    _toolkit(path.parent / "other")
    shutil.copy(path.parent / "other" / "bin" / "nvcc", path)
    home = _toolkit(tmp_path / "mine")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert setup.find_toolkit("13.0") == (home, "")
    (home / "bin" / "nvcc").unlink()
    assert setup.find_toolkit("13.0") == (None, f"{home} has no bin/nvcc")


@pytest.mark.parametrize("wanted", [None, "1"])
@pytest.mark.parametrize("lack", ["headers", "major"])
def test_a_toolkit_that_will_not_do_is_named(setup, tmp_path, monkeypatch, capsys, lack, wanted):
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


def test_a_failed_build_ends_with_the_way_around(tmp_path):
    """The extension with its CUDA kernels, up to the first that nvcc is given."""
    home = _toolkit(tmp_path / "cuda")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "csrc" / "cuda").mkdir(parents=True)
    (tmp_path / "csrc" / "cpu").mkdir()
    (tmp_path / "csrc" / "sources.txt").write_text("csrc/cpu/empty.cpp\ncsrc/cuda/mask_pack.cu\n")
    (tmp_path / "csrc" / "cpu" / "empty.cpp").touch()
    (tmp_path / "csrc" / "cuda" / "mask_pack.cu").touch()
    (tmp_path / "python").mkdir()
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
    assert last.startswith("setup.py: ")
    assert last.endswith("; DCT_CUDA=0 builds without CUDA kernels")
