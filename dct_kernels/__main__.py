"""`python -m dct_kernels` prints versions, the available backends, and why others are missing."""

import platform

import torch

from . import __version__, _load


def main() -> None:
    cuda = torch.version.cuda or "none"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"dct_kernels {__version__}")
    print(f"python {platform.python_version()}, torch {torch.__version__}, CUDA {cuda}, GPU {gpu}")
    print(f"Triton {_triton_version()}")
    print(f"DCT_BACKEND: {'not set' if _load.VARIABLE is None else repr(_load.VARIABLE)}")
    if error := _load.why_no_import():
        print(f"import dct_kernels fails: {error}")
    built = _load.built_with()
    for name, reason in _load.available().items():
        yes = f"yes, built with torch {built[name]}" if name in built else "yes"
        print(f"  {name:6} {'no: ' + reason if reason else yes}")


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    interpreted = ", interpreted" if triton.knobs.runtime.interpret else ""
    return f"{triton.__version__}{interpreted}"


if __name__ == "__main__":
    main()
