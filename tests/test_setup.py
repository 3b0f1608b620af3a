"""setup.py reports in one line why it cannot build, and selects the libraries to build."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parent.parent
TOOLS = 'pip install "setuptools>=64,<82" wheel'
TORCH = "pip install 'torch>=2.11', and then pip install --no-build-isolation ."


@pytest.fixture
def setup(monkeypatch):
    """setup.py as a module. Its list `built` collects the arguments of setuptools.setup."""
    flags = ["DCT_BUILD", "DCT_CUDA", "DCT_DEBUG", "DCT_SANITIZE", "TORCH_CUDA_ARCH_LIST"]
    for name in [*flags, "CUDA_HOME", "CUDA_PATH", "CXX"]:
        monkeypatch.setenv(name, "")  # so that a value which setup.py sets is removed afterwards
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("dct_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.built = []
    monkeypatch.setattr(module.setuptools, "setup", lambda **given: module.built.append(given))
    return module


def install(setup, monkeypatch, packages):
    """Pretend that only these packages are installed."""

    def version(package):
        if package not in packages:
            raise importlib.metadata.PackageNotFoundError(package)
        return packages[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(setup.setuptools, "__version__", packages["setuptools"])


def nvcc(home, release):
    """Write a fake nvcc that supports --version and --dryrun, which setup.py calls."""
    path = home / "bin/nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'release {release}, V1'; echo '#$ TOP={home}/bin/..' >&2\n")
    path.chmod(0o755)


def refusal(setup):
    with pytest.raises(SystemExit) as stopped:
        setup.main()
    assert not setup.built
    return stopped.value.code


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({"setuptools": "63.4.3", "wheel": "1", "torch": "3"}, "setuptools>=64, found 63.4.3"),
        ({"setuptools": "70.0.0", "torch": "2.11"}, "wheel, found none"),
        ({"setuptools": "70.0.0"}, "wheel, found none and torch>=2.11, found none"),
        ({"setuptools": "64", "wheel": "0.37", "torch": "2.10+cpu"}, "torch>=2.11, found 2.10+cpu"),
    ],
)
def test_missing_and_old_packages_are_refused_together(setup, monkeypatch, packages, reason):
    install(setup, monkeypatch, packages)
    tools, torch = not reason.startswith("torch"), "torch" in reason
    advice = "; ".join([TOOLS] * tools + [TORCH] * torch)
    assert refusal(setup) == f"setup.py: the build needs {reason}: {advice}"


def test_a_missing_compiler_is_refused(setup, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++ -pthread")
    assert refusal(setup) == (
        "setup.py: there is no C++ compiler (/nowhere/g++ is not on PATH): apt-get install g++, or "
        "set CXX; DCT_BUILD=0 builds no kernels, which makes the ops about 100 times slower"
    )


def test_pure_python_needs_no_torch_and_no_compiler(setup, monkeypatch):
    install(setup, monkeypatch, {"setuptools": "70.1.0"})
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("DCT_BUILD", "0")
    setup.main()
    assert setup.built == [{"license": "BSD-3-Clause"}]


def test_nvcc_must_have_the_cuda_version_of_torch(setup, tmp_path, monkeypatch, capsys):
    """Without a matching nvcc, no CUDA kernels are built, and with DCT_CUDA=1 the build fails."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvcc(tmp_path, "12.8")
    versions = f"CUDA is 13.0 in torch and 12.8 in {tmp_path}/bin/nvcc"
    assert not setup.find_cuda("13.0")
    line = f"building no CUDA kernels, because {versions}; CUDA_HOME selects the toolkit"
    assert capsys.readouterr().err == f"setup.py: {line}\n"
    monkeypatch.setenv("DCT_CUDA", "1")
    advice = "install a CUDA torch, and set CUDA_HOME to its toolkit"
    assert refusal(setup) == f"setup.py: DCT_CUDA=1, but {versions}: {advice}"


@pytest.mark.parametrize("flag", [None, "1", "0"])
def test_cuda_kernels_are_a_separate_library(setup, tmp_path, monkeypatch, capsys, flag):
    """nvcc and torch may differ in the minor version of CUDA, and no GPU is needed."""
    nvcc(tmp_path, "13.2")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))  # read once per process
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if flag:
        monkeypatch.setenv("DCT_CUDA", flag)
    setup.main()
    folders, line = {"dct_kernels._C": {"cpu", "bindings"}}, ""
    if flag != "0":
        folders["dct_kernels._cuda"] = {"cuda", "bindings"}
        versions = f"CUDA is 13.0 in torch and 13.2 in {tmp_path}/bin/nvcc"
        line = f"setup.py: building CUDA kernels, because {versions}; DCT_CUDA=0 skips them\n"
    modules = setup.built[0]["ext_modules"]
    assert capsys.readouterr().err == line
    assert {m.name: {Path(s).parent.name for s in m.sources} for m in modules} == folders
    assert [m.define_macros for m in modules] == [[], [("USE_CUDA", None)]][: len(modules)]


def test_compiler_flags(setup, monkeypatch):
    monkeypatch.setenv("DCT_SANITIZE", "thread")
    monkeypatch.setenv("DCT_CUDA", "0")
    setup.main()
    (module,) = setup.built[0]["ext_modules"]
    assert module.extra_link_args == ["-fsanitize=thread"]
    assert {
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
        "-fsanitize=thread",
    } <= {*module.extra_compile_args["cxx"]}


def test_the_oldest_versions_are_the_same_everywhere():
    """The errors in the tests above name the same versions."""
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dependencies = ["torch>=2.11"]' in project
    assert 'requires = ["setuptools>=64", "wheel"]' in project
    assert "torch >= 2.11 and a C++17 compiler" in (ROOT / "README.md").read_text()
