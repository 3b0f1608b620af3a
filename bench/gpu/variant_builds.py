"""Builds variants of the CUDA kernels: bench/gpu/build.py does, and variants.py times them.

A variant is a folder bench/gpu/variants/NAME: its files replace those of csrc/cuda of the same
relative path. Of a file definitions.txt every line makes a variant of its own: a name, and what
-D defines for nvcc (`four BLOCKS=4 PARTS=256`). `as_is` is csrc as it stands. What can be varied is
an op that has a launcher in bench/gpu/launchers: those of which the folder has the OP.cu, or, if it
has none, all whose sources it changes. Each is built as a library, build/gpu/variants/NAME/OP.so;
beside it is OP.log, what ptxas said. `as_is` is built of the ops that others vary.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from static import toolkit  # noqa: E402

CSRC = ROOT / "csrc"
FOLDERS = Path(__file__).parent / "variants"
LAUNCHERS = Path(__file__).parent / "launchers"
BUILD = ROOT / "build" / "gpu" / "variants"
OPS = tuple(sorted(path.stem for path in LAUNCHERS.glob("*.cpp")))
AS_IS, DEFINITIONS = "as_is", "definitions.txt"


@dataclass(frozen=True)
class Variant:
    name: str
    folder: Path | None = None
    defined: tuple[str, ...] = ()

    @property
    def built(self) -> Path:
        return BUILD / self.name


def variants(folders: Path = FOLDERS) -> list[Variant]:
    """`as_is` first."""
    found = [Variant(AS_IS)]
    for folder in sorted(path for path in folders.glob("*") if path.is_dir()):
        sets = folder / DEFINITIONS
        lines = [line.split() for line in sets.read_text().splitlines()] if sets.exists() else []
        named = [line for line in lines if line and not line[0].startswith("#")]
        found += [Variant(f"{folder.name}.{name}", folder, tuple(rest)) for name, *rest in named]
        if not named:
            found.append(Variant(folder.name, folder))
    return found


def sources(variant: Variant, to: Path) -> Path:
    """The csrc of a variant, without what is not for the GPU."""
    for part in ("common", "cuda"):
        shutil.copytree(CSRC / part, to / part)
    if variant.folder is not None:
        for path in variant.folder.rglob("*.cu*"):
            target = to / "cuda" / path.relative_to(variant.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return to


def unit(csrc: Path, op: str) -> str:
    """The text of an op's source and of all that it includes."""
    texts: dict[Path, str] = {}
    found = [csrc / "cuda" / f"{op}.cu"]
    while found:
        path = found.pop().resolve()
        if path not in texts and path.exists():
            texts[path] = path.read_text()
            names = re.findall(r'^#include "(.*)"', texts[path], re.MULTILINE)
            found += [path.parent / name for name in names]
    return "\n".join(texts[path] for path in sorted(texts))


def changed(variant: Variant, csrc: Path) -> list[str]:
    """The ops that are varied: those of the folder's own, else all that its files are part of."""
    own = [op for op in OPS if variant.folder and (variant.folder / f"{op}.cu").exists()]
    if own:
        return own
    names = {definition.partition("=")[0] for definition in variant.defined}
    found = []
    for op in OPS:
        text = unit(csrc, op)
        if text != unit(CSRC, op) or names & set(re.findall(r"\w+", text)):
            found.append(op)
    return found


def command(variant: Variant, csrc: Path, op: str, architecture: str, to: Path) -> list[str | Path]:
    """As setup.py compiles it. The launcher finds this kernel, whatever other one is loaded."""
    make = [toolkit.nvcc(), *toolkit.flags(), f"-arch=sm_{architecture.replace('.', '')}"]
    make += ["-Xptxas=-v", "-shared", "-Xcompiler=-fPIC", "-Xlinker=-Bsymbolic", f"-I{csrc}"]
    make += [f"-D{definition}" for definition in variant.defined]
    return [*make, csrc / "cuda" / f"{op}.cu", LAUNCHERS / f"{op}.cpp", "-o", to]


def build(architecture: str, folders: Path = FOLDERS) -> None:
    """All, for such as "9.0": a compiler a core. What fails says so, and is not there after."""
    shutil.rmtree(BUILD, ignore_errors=True)
    if toolkit.nvcc() is None:
        return
    as_is, *others = variants(folders)
    asked = []
    for variant in others:
        csrc = sources(variant, variant.built / "csrc")
        asked += [(variant, csrc, op) for op in changed(variant, csrc)]
    csrc = sources(as_is, as_is.built / "csrc")
    asked += [(as_is, csrc, op) for op in sorted({op for _, _, op in asked})]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda one: _compile(*one, architecture), asked))


def _compile(variant: Variant, csrc: Path, op: str, architecture: str) -> None:
    partial = variant.built / f"{op}.partial"
    make = command(variant, csrc, op, architecture, partial)
    done = subprocess.run(make, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = f"{' '.join(map(str, make))}\n{done.stdout}"
    (variant.built / f"{op}.log").write_text(said)
    if done.returncode:
        print(f"{variant.name} {op} does not build:\n{said}", flush=True)
    else:
        partial.rename(variant.built / f"{op}.so")
