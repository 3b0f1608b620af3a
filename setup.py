"""Builds dct_kernels/_C.abi3.so against the stable ABI of the installed torch. With CUDA kernels it
also builds dct_kernels/_cuda.abi3.so, which only a CUDA build of torch loads.

    pip install --no-build-isolation .    CPU kernels, and CUDA kernels with a CUDA torch and nvcc
    DCT_CUDA=0 or 1                       never build CUDA kernels, or fail if they cannot be built
    DCT_BUILD=0                           pure Python, without compiler and torch; correct but slow
    DCT_DEBUG=1                           compile with -O0 -g
    DCT_SANITIZE=address,undefined        sanitizers; LD_PRELOAD their runtimes to run it
    TORCH_CUDA_ARCH_LIST="9.0"            CUDA architectures; the default is 8.0;9.0;10.0+PTX
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path
from typing import NoReturn

import setuptools

ROOT = Path(__file__).parent.resolve()
TORCH = "torch>=2.11"


def stop(text: str) -> NoReturn:
    sys.exit(f"setup.py: {text}")


def flag(name: str) -> bool | None:
    """The value of an environment variable as a bool, or None if it is not set."""
    value = os.environ.get(name)
    if value not in (None, "0", "1"):
        stop(f"{name} must be 0 or 1, got {value!r}")
    return None if value is None else value == "1"


def numbers(version: str) -> tuple[int, ...]:
    """The major and the minor version number."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def require(advice: dict[str, str]) -> None:
    """Check {requirement: what to do}. Without build isolation, pip does not check packages."""
    wrong = {}
    for requirement, action in advice.items():
        package, _, oldest = requirement.partition(">=")
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found == "none" or numbers(found) < numbers(oldest):
            wrong[f"{requirement}, found {found}"] = action
    if wrong:
        actions = "; ".join(dict.fromkeys(wrong.values()))
        stop(f"the build needs {' and '.join(wrong)}: {actions}")


def check_compiler() -> None:
    name = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")[0]
    if shutil.which(name) is None:
        stop(
            f"there is no C++ compiler ({name} is not on PATH): apt-get install g++, or set CXX; "
            "DCT_BUILD=0 builds no kernels, which makes the ops about 100 times slower"
        )


def cuda_home() -> str:
    """The folder of the CUDA toolkit. The nvcc on PATH may be a script outside that folder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home:
        plan = subprocess.getoutput("nvcc --dryrun -x cu /dev/null")
        top = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)
        home = os.path.realpath(top[1]) if top else "/usr/local/cuda"
    return home


def find_cuda(version: str | None) -> bool:
    """Return whether to build CUDA kernels, and set CUDA_HOME for torch. No GPU is needed."""
    wanted = flag("DCT_CUDA")
    if wanted is False or (wanted is None and version is None):
        return False
    home = os.environ["CUDA_HOME"] = cuda_home()
    nvcc = f"{home}/bin/nvcc"
    release = re.search(r"release ([\d.]+)", subprocess.getoutput(shlex.join([nvcc, "--version"])))
    found = release[1] if release else "missing"
    matches = version is not None and numbers(version)[:1] == numbers(found)[:1]
    versions = f"CUDA is {version or 'missing'} in torch and {found} in {nvcc}"
    if wanted and not matches:
        stop(f"DCT_CUDA=1, but {versions}: install a CUDA torch, and set CUDA_HOME to its toolkit")
    kernels = "CUDA kernels" if matches else "no CUDA kernels"
    advice = "DCT_CUDA=0 skips them" if matches else "CUDA_HOME selects the toolkit"
    print(f"setup.py: building {kernels}, because {versions}; {advice}", file=sys.stderr)
    return matches


def sources_of(library: str) -> list[str]:
    """Return the kernels of `_C` or `_cuda`, and the bindings, which both libraries compile."""
    other = "csrc/cuda/" if library == "_C" else "csrc/cpu/"
    listed = (ROOT / "csrc/sources.txt").read_text().split()
    return [source for source in listed if not source.startswith(other)]


def extensions() -> dict:
    check_compiler()
    import torch

    cuda = find_cuda(torch.version.cuda)
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension, include_paths

    target = "-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*numbers(TORCH))
    common = [target, "-std=c++17", *(["-O0", "-g"] if flag("DCT_DEBUG") else ["-O3"])]
    nvcc = [*common, "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
    cxx = ["-g0", *common, "-Wall", "-Wextra", "-fvisibility=hidden"]
    # Without fused multiply-add, because all backends must return equal bits. Without trapping
    # math, so that the compiler vectorizes loops with conditions on AVX2. This changes no value.
    cxx += ["-ffp-contract=off", "-fno-trapping-math"]
    cxx += [f"-isystem{path}" for path in include_paths()]  # no warnings from torch's headers
    # Keep local folders out of error messages. The compiler resolves symbolic links to headers.
    headers = Path(torch.__file__).parent
    cxx += [f"-ffile-prefix-map={path}/=" for path in (ROOT, headers, headers.resolve())]
    sanitize = [f"-fsanitize={names}" for names in os.environ.get("DCT_SANITIZE", "").split()]
    cxx += [*sanitize, "-fno-omit-frame-pointer", "-O1", "-g"] if sanitize else []
    options = {
        "depends": glob("csrc/**/*.*", root_dir=ROOT, recursive=True),
        "extra_compile_args": {"cxx": cxx, "nvcc": nvcc},
        "extra_link_args": sanitize,
        "py_limited_api": True,
    }
    modules = [CppExtension("dct_kernels._C", sources_of("_C"), **options)]
    if cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX")
        options["define_macros"] = [("USE_CUDA", None)]
        modules += [CUDAExtension("dct_kernels._cuda", sources_of("_cuda"), **options)]
    return {
        "ext_modules": modules,
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def link_packages() -> None:
    """Link all packages into python/, so that an editable install adds that folder to sys.path.
    With an import finder, a folder dct_kernels next to a program would hide the package."""
    link = ROOT / "python/dct_kernels"
    if not link.exists():
        link.symlink_to("../dct_kernels")


def main() -> None:
    tools = 'pip install "setuptools>=64,<82" wheel'  # torch 2.11 refuses setuptools 82
    needed, builds = {"setuptools>=64": tools}, flag("DCT_BUILD") is not False
    if numbers(setuptools.__version__) < (70, 1):  # later versions do not need it
        needed["wheel"] = tools
    if builds:
        needed[TORCH] = f"pip install '{TORCH}', and then pip install --no-build-isolation ."
    require(needed)
    link_packages()
    built = extensions() if builds else {}
    # Not in pyproject.toml, because the form that setuptools < 77 needs makes later versions warn.
    setuptools.setup(license="BSD-3-Clause", **built)


if __name__ == "__main__":
    main()
