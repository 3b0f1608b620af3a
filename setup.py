"""Builds libraries against the stable ABI of the torch that is installed: dct_kernels/_C.abi3.so,
and with CUDA kernels dct_kernels/_cuda.abi3.so beside it, which only a CUDA torch loads.

    pip install --no-build-isolation .    CPU kernels, and CUDA's with a CUDA torch and nvcc
    DCT_CUDA=0 or 1                       never build CUDA kernels, or stop if it cannot be done
    DCT_BUILD=0                           pure Python, for correctness only: no compiler, no torch
    DCT_DEBUG=1                           -O0 -g
    DCT_SANITIZE=address,undefined        instrumented; runs under LD_PRELOAD of the runtimes
    TORCH_CUDA_ARCH_LIST="9.0"            CUDA architectures; default 8.0;9.0;10.0+PTX

Without a C++ compiler the build stops, unless DCT_BUILD=0 asks for pure Python. Everything else
about the package is in pyproject.toml; the sources are listed in csrc/sources.txt.
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

import setuptools

ROOT = Path(__file__).parent.resolve()
OLDEST_SETUPTOOLS = 64
OLDEST_TORCH = "2.11"  # that loads the library


def flag(name: str) -> bool | None:
    """True, False, or None where the environment does not say."""
    value = os.environ.get(name)
    if value not in (None, "0", "1"):
        stop(f"{name} must be 0 or 1, got {value!r}")
    return None if value is None else value == "1"


def stop(text: str) -> NoReturn:
    sys.exit(f"setup.py: {text}")


def note(text: str) -> None:
    print(f"setup.py: {text}", file=sys.stderr)


def numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def check_setuptools() -> None:
    """Without build isolation nobody compares it with what pyproject.toml requires."""
    version = setuptools.__version__
    if numbers(version)[0] < OLDEST_SETUPTOOLS:
        wanted = f'"setuptools>={OLDEST_SETUPTOOLS},<82" wheel'  # torch 2.11 refuses 82
        stop(f"setuptools {version} is older than {OLDEST_SETUPTOOLS}: pip install {wanted}")
    if not makes_wheels():
        stop(f"setuptools {version} needs the package wheel: pip install wheel")


def makes_wheels() -> bool:
    """From 70.1 on by itself, before with the package `wheel`."""
    from setuptools.errors import ModuleError  # which the oldest do not have

    try:
        setuptools.Distribution().get_command_class("bdist_wheel")
    except ModuleError:
        return False
    return True


def check_torch() -> None:
    """Stop before pip replaces a torch that is too old, and its CUDA libraries with it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    if numbers(version) < numbers(OLDEST_TORCH):
        stop(f"torch {version} is older than {OLDEST_TORCH}: pip install --upgrade torch")


def check_compiler() -> None:
    """Stop where there is none: without kernels a step takes some hundred times as long."""
    command = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    name = shlex.split(command)[0]
    if shutil.which(name) is None:
        stop(
            f"there is no C++ compiler ({name} is not on PATH): apt-get install g++, or name yours "
            "in CXX; DCT_BUILD=0 installs without kernels, some hundred times slower"
        )


def toolkits() -> list[Path]:
    """Where the CUDA toolkit may be: what the environment says, or where it usually is."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return [Path(home)]
    found = []
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        # It may be a link or a script, far from its toolkit, and says itself where that is.
        plan = output(nvcc, "--dryrun", "-x", "cu", os.devnull)
        found = [Path(top).resolve() for top in re.findall(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)]
        found.append(Path(nvcc).parents[1])
    return [*found, Path("/usr/local/cuda")]


def why_not(toolkit: Path, cuda: str) -> str | None:
    """Why the toolkit does not build for a torch of this CUDA version, or None."""
    nvcc = toolkit / "bin" / "nvcc"
    if not nvcc.exists():
        return f"{toolkit} has no bin/nvcc"
    # Conda's compilers look into targets/.
    headers = ("include/cuda_runtime_api.h", "targets/*/include/cuda_runtime_api.h")
    if not any(any(toolkit.glob(header)) for header in headers):
        return f"{toolkit} has no include/cuda_runtime_api.h"
    release = re.search(r"release (\d+)\.", output(nvcc, "--version"))
    if release is None or int(release[1]) != numbers(cuda)[0]:
        return f"{toolkit} is CUDA {release[1] if release else 'of no known version'}"
    return None


def output(*command: str | Path) -> str:
    """stdout and stderr: nvcc writes its plan to the latter."""
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout


def find_toolkit(cuda: str) -> tuple[Path | None, str]:
    """The first that will do for a torch of this CUDA version, or why the first of all will not."""
    reasons = []
    for toolkit in toolkits():
        reason = why_not(toolkit, cuda)
        if reason is None:
            return toolkit, ""
        reasons.append(reason)
    return None, reasons[0]


def cuda_toolkit(torch) -> Path | None:
    """The toolkit to build CUDA kernels with, or None if there are to be none."""
    # Not torch.cuda.is_available(): build machines often have no GPU.
    wanted, cuda = flag("DCT_CUDA"), torch.version.cuda
    if wanted is False or (wanted is None and cuda is None):
        return None
    toolkit, missing = None, []
    if cuda is None:
        missing.append("a torch built for CUDA")
    else:
        toolkit, reason = find_toolkit(cuda)
        if toolkit is None:
            name = f"the toolkit of CUDA {numbers(cuda)[0]}"
            missing.append(f"{name} ({reason}; CUDA_HOME says where it is)")
    if wanted and missing:
        stop(f"DCT_CUDA=1, but these are missing: {', '.join(missing)}")
    if missing:
        note(f"no CUDA kernels are built, these are missing: {', '.join(missing)}")
        return None
    return toolkit


def sources() -> list[str]:
    return (ROOT / "csrc" / "sources.txt").read_text().split()


def sources_of(library: str) -> list[str]:
    """Of `_C` or `_cuda`: its kernels, its registrations, and the bindings that both have."""
    other = (
        ("csrc/cuda/", "csrc/bindings/cuda.")
        if library == "_C"
        else ("csrc/cpu/", "csrc/bindings/cpu.")
    )
    return [source for source in sources() if not source.startswith(other)]


def extensions():
    try:
        import torch
    except ImportError as error:
        stop(
            "the build needs your torch: pip install --no-build-isolation . "
            f"(and before it pip install 'torch>={OLDEST_TORCH}', if you have none: {error})"
        )
    toolkit = cuda_toolkit(torch)
    if toolkit is not None:
        os.environ["CUDA_HOME"] = str(toolkit)  # read by the import that follows
    from torch.utils import cpp_extension

    debug = flag("DCT_DEBUG")
    sanitizers = os.environ.get("DCT_SANITIZE", "")
    define = ["-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*numbers(OLDEST_TORCH))]
    common = [*define, "-std=c++17", *(["-O0", "-g"] if debug else ["-O3"])]
    torch_folder = Path(torch.__file__).parent
    # The compiler names a header behind a link by where it really lies.
    sources = [ROOT, torch_folder, torch_folder.resolve()]
    cxx = [
        *common,
        *([] if debug else ["-g0"]),
        "-Wall",
        "-Wextra",
        "-ffp-contract=off",  # equal bits on every backend: no fused multiply-add
        "-fvisibility=hidden",
        *(f"-ffile-prefix-map={path}/=" for path in sources),  # none of this machine in messages
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),  # no warnings of theirs
    ]
    link = []
    if sanitizers:
        cxx += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-O1", "-g"]
        link += [f"-fsanitize={sanitizers}"]
    nvcc = [*common, "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
    makes = {"_C": cpp_extension.CppExtension}
    build = cpp_extension.BuildExtension
    if toolkit is not None:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX")
        makes["_cuda"] = cpp_extension.CUDAExtension
        build = with_hint(build)
    return [
        make(
            name=f"dct_kernels.{library}",
            sources=sources_of(library),
            depends=[
                "csrc/sources.txt",
                *(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.*h")),
            ],
            extra_compile_args={
                "cxx": [*cxx, *(["-DUSE_CUDA"] if library == "_cuda" else [])],
                "nvcc": [*nvcc, "-DUSE_CUDA"],
            },
            extra_link_args=link,
            py_limited_api=True,
        )
        for library, make in makes.items()
    ], build


def with_hint(build: type) -> type:
    """The same command; where it fails, its last line says how to do without CUDA kernels."""

    class Build(build):
        def run(self) -> None:
            try:
                super().run()
            except Exception as error:  # the compiler has said why
                stop(f"{error}; DCT_CUDA=0 builds without CUDA kernels")

    return Build


def link_packages() -> None:
    """All packages under python/: an editable install is then a path, which wins over a folder
    dct_kernels beside a user's program (a checkout's parent has one), where a finder would not."""
    link = ROOT / "python/dct_kernels"
    if not link.is_dir():
        link.unlink(missing_ok=True)
        link.symlink_to("../dct_kernels")


def main() -> None:
    check_setuptools()
    link_packages()
    check_torch()
    built = {}
    if flag("DCT_BUILD") is False:
        note("DCT_BUILD=0: nothing is compiled, dct_kernels will run without kernels of its own")
    else:
        check_compiler()
        modules, build_ext = extensions()
        built = {
            "ext_modules": modules,
            "cmdclass": {"build_ext": build_ext},
            "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
        }
    # In pyproject.toml, setuptools before 77 want the license in a form that later ones warn of.
    setuptools.setup(license="BSD-3-Clause", **built)


if __name__ == "__main__":
    main()
