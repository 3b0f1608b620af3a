"""Builds dct_kernels._C, one abi3 library against the stable ABI of the torch that is installed.

    pip install --no-build-isolation .    CPU kernels, and CUDA's with a CUDA torch and nvcc
    DCT_CUDA=0 or 1                       never build CUDA kernels, or stop if it cannot be done
    DCT_BUILD=0                           pure Python: no kernels of ours, no compiler, no torch
    DCT_DEBUG=1                           -O0 -g
    DCT_SANITIZE=address,undefined        instrumented; runs under LD_PRELOAD of the runtimes
    TORCH_CUDA_ARCH_LIST="9.0"            CUDA architectures; default 8.0;9.0;10.0+PTX

Without a C++ compiler the result is pure Python as well, and says so. Everything else about the
package is in pyproject.toml; the sources are listed in csrc/sources.txt.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent.resolve()
TARGET_TORCH = "0x020b000000000000"  # the oldest torch that loads the library: 2.11


def flag(name: str) -> bool | None:
    """True, False, or None where the environment does not say."""
    value = os.environ.get(name)
    if value not in (None, "0", "1"):
        sys.exit(f"setup.py: {name} must be 0 or 1, got {value!r}")
    return None if value is None else value == "1"


def compiler() -> str | None:
    command = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    return shutil.which(shlex.split(command)[0])


def why_pure_python() -> str | None:
    """Why nothing is compiled, or None if something is."""
    if flag("DCT_BUILD") is False:
        return "DCT_BUILD=0"
    if compiler() is None:
        return "there is no C++ compiler (CXX is not set, and the default is not on PATH)"
    return None


def with_cuda(torch, cuda_home: str | None) -> bool:
    # Not torch.cuda.is_available(): build machines often have no GPU.
    wanted = flag("DCT_CUDA")
    missing = []
    if torch.version.cuda is None:
        missing.append("a torch built for CUDA")
    if cuda_home is None or not Path(cuda_home, "bin", "nvcc").exists():
        missing.append("the CUDA toolkit (nvcc; CUDA_HOME says where)")
    if not any(map(is_cuda, sources())):
        missing.append("CUDA sources in csrc/sources.txt")
    if wanted and missing:
        sys.exit(f"setup.py: DCT_CUDA=1, but these are missing: {', '.join(missing)}")
    if torch.version.cuda is not None and wanted is None and missing:
        note(f"no CUDA kernels are built, these are missing: {', '.join(missing)}")
    return not missing if wanted is None else wanted


def note(text: str) -> None:
    print(f"setup.py: {text}", file=sys.stderr)


def sources() -> list[str]:
    return (ROOT / "csrc" / "sources.txt").read_text().split()


def is_cuda(source: str) -> bool:
    return source.startswith(("csrc/cuda/", "csrc/bindings/cuda"))


def extension():
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        sys.exit(
            "setup.py: torch is not there at build time. Build against your own torch with\n"
            "    pip install --no-build-isolation .\n"
            "or set DCT_BUILD=0 for a pure-Python installation."
        )
    cuda = with_cuda(torch, cpp_extension.CUDA_HOME)
    debug = flag("DCT_DEBUG")
    sanitizers = os.environ.get("DCT_SANITIZE", "")
    define = [f"-DTORCH_TARGET_VERSION={TARGET_TORCH}"]
    common = [*define, "-std=c++17", *(["-O0", "-g"] if debug else ["-O3"])]
    cxx = [
        *common,
        *([] if debug else ["-g0"]),
        "-Wall",
        "-Wextra",
        "-ffp-contract=off",  # equal bits on every backend: no fused multiply-add
        "-fvisibility=hidden",
        f"-ffile-prefix-map={ROOT}/=",  # no paths of the build machine in messages
        f"-ffile-prefix-map={Path(torch.__file__).parent}/=",
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),  # no warnings of theirs
    ]
    link = []
    if sanitizers:
        cxx += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-O1", "-g"]
        link += [f"-fsanitize={sanitizers}"]
    nvcc = [*common, "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
    if cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX")
        cxx.append("-DUSE_CUDA")
        nvcc.append("-DUSE_CUDA")
    make = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    return make(
        name="dct_kernels._C",
        sources=[source for source in sources() if cuda or not is_cuda(source)],
        depends=[
            "csrc/sources.txt",
            *(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.*h")),
        ],
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=link,
        py_limited_api=True,
    ), cpp_extension.BuildExtension


reason = why_pure_python()
if reason is not None:
    note(f"nothing is compiled, dct_kernels will run without kernels of its own: {reason}")
    setup()
else:
    module, build_ext = extension()
    setup(
        ext_modules=[module],
        cmdclass={"build_ext": build_ext},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
