"""Imports between modules, calls of torch without dtype or device, and the content of a wheel."""

import ast
import graphlib
import inspect
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import dct_kernels

ROOT = Path(__file__).parent.parent
# A package may import the packages before it.
FOLDERS = {"dct_kernels": ROOT}
FOLDERS |= dict.fromkeys(("dct_parallel", "dct_embeddings", "dct_patches"), ROOT / "python")
PACKAGES = tuple(FOLDERS)


def _modules():
    """{module: (package that relative imports refer to, syntax tree)} of every package."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            within = name if parts[-1] == "__init__" else name.rpartition(".")[0]
            found[name] = within, ast.parse(path.read_text())
    return found


MODULES = _modules()


def _imports(tree, within=""):
    """Yields (absolute module, name imported from it or None) for every import in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = within.split(".")[: len(within.split(".")) - node.level + 1]
            module = ".".join([*base, node.module] if node.module else base)
            source = module if node.level else node.module
            yield from ((source, alias.name) for alias in node.names)


def _edges():
    """{module: modules of these packages that it imports}."""
    edges = {}
    for name, (within, tree) in MODULES.items():
        targets = set()
        for source, imported in _imports(tree, within):
            submodule = f"{source}.{imported}"
            targets |= {target for target in (source, submodule) if target in MODULES}
        edges[name] = targets - {name}
    return edges


def test_a_package_imports_only_packages_before_it():
    for name, targets in _edges().items():
        level = PACKAGES.index(name.partition(".")[0])
        above = {t for t in targets if PACKAGES.index(t.partition(".")[0]) > level}
        assert not above, f"{name} imports {above}"


def test_modules_do_not_import_each_other_in_a_cycle():
    """Imports inside functions and for type checkers count, because a reader follows them too.

    A module that imports a module of a package does not import the package's __init__.py.
    """
    graph = {}
    for name, (within, tree) in MODULES.items():
        found = [(f"{source}.{imported}", source) for source, imported in _imports(tree, within)]
        targets = {next((m for m in pair if m in MODULES), name) for pair in found}
        graph[name] = targets - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


# {package: {folder: other folders that it may import}}. Other modules may import no folder.
ENTRY_POINTS = ("ddp", "fsdp2", "local_steps")
ALLOWED = {
    "dct_parallel": {
        **{name: set() for name in ("exchange", "rows", "integrations")},
        **{name: {"exchange"} for name in ENTRY_POINTS},
        "process_group": {"exchange", "ddp"},
    },
    "dct_embeddings": {"two_dimensional": set(), "substitution": set(), "torchrec": set()},
}


@pytest.mark.parametrize("package", ALLOWED)
def test_folders_import_only_allowed_folders(package):
    folders = ALLOWED[package]
    for name, targets in _edges().items():
        if not name.startswith(f"{package}."):
            continue
        folder = name.split(".")[1]
        imported = {t.split(".")[1] for t in targets if t.startswith(f"{package}.")}
        foreign = (imported & folders.keys()) - {folder} - folders.get(folder, set())
        assert not foreign, f"{name} imports {foreign}"


def test_no_private_name_of_another_package_is_imported():
    users = {name: _imports(tree, within) for name, (within, tree) in MODULES.items()}
    for path in sorted(
        path for name in ("bench", "examples") for path in (ROOT / name).rglob("*.py")
    ):
        users[str(path.relative_to(ROOT))] = _imports(ast.parse(path.read_text()))
    for user, imports in users.items():
        for source, name in imports:
            parts = [*(source or "").split("."), name or ""]
            private = any(part.startswith("_") and not part.startswith("__") for part in parts)
            foreign = parts[0] in PACKAGES and parts[0] != user.partition(".")[0]
            assert not (private and foreign), f"{user} imports {'.'.join(parts)}"


def test_examples_do_not_import_bench_and_have_one_name():
    """`import examples.dlrm` would load a second copy of the module `dlrm`."""
    forbidden = {"examples": {"bench", "examples"}, "bench": {"examples"}, "tests": {"examples"}}
    for folder, names in forbidden.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            imports = _imports(ast.parse(path.read_text()))
            found = names & {(source or "").partition(".")[0] for source, _ in imports}
            assert not found, f"{path.relative_to(ROOT)} imports {found}"


def _private_names_of_torch(tree):
    for source, name in _imports(tree):
        parts = [*(source or "").split("."), name or ""]
        if parts[0] == "torch" and any(part.startswith("_") for part in parts):
            yield ".".join(parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            public = node.attr.startswith(("__", "_foreach_"))
            if isinstance(root, ast.Name) and root.id in ("torch", "dist") and not public:
                yield ast.unparse(node)


@pytest.mark.parametrize("package", ["dct_kernels", "dct_parallel"])
def test_private_names_of_torch_are_used_in_one_file(package):
    users = {
        name: found
        for name, (_, tree) in MODULES.items()
        if name.partition(".")[0] == package and (found := [*_private_names_of_torch(tree)])
    }
    assert users.keys() == {f"{package}._torch"}, users


FACTORIES = {function.__name__ for function in _device_constructors()}
# Typed constructors have a dtype but no device; Tensor also uses the default dtype.
LEGACY = {"Tensor"} | {
    f"{kind}Tensor" for kind in ("Float", "Double", "Long", "Int", "Bool", "Byte")
}
MODULES_OF_TORCH = {
    name
    for name, found in vars(torch.nn).items()
    if inspect.isclass(found) and "dtype" in inspect.signature(found).parameters
}


def _left_to_defaults(tree):
    """Yields the calls of torch in a file that create a tensor without a dtype or a device."""
    from_torch = {
        name: source for source, name in _imports(tree) if (source or "").startswith("torch")
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        root, *path = ast.unparse(node.func).split(".")
        name, given = (path or [root])[-1], {keyword.arg for keyword in node.keywords}
        if root != "torch" and root not in from_torch:
            continue
        if name in LEGACY:
            yield node.lineno, ast.unparse(node)
        elif name in FACTORIES | MODULES_OF_TORCH:
            device = given & {"device", "device_mesh"}  # a DTensor is on the devices of its mesh
            if "dtype" not in given or not device:
                yield node.lineno, ast.unparse(node)


def test_every_tensor_is_created_with_a_dtype_and_a_device():
    """This way, torch.set_default_dtype and torch.set_default_device do not affect the packages."""
    found = [
        f"{name}:{line}: {call}"
        for name, (_, tree) in MODULES.items()
        for line, call in _left_to_defaults(tree)
    ]
    assert not found, "\n".join(found)


def test_every_stream_and_event_names_its_device():
    """The current device of a process may not be the device of its tensors."""
    named = ("torch.cuda.current_stream", "torch.cuda.Stream", "torch.cuda.synchronize", ".record")
    found = [
        f"{name}:{node.lineno}"
        for name, (_, tree) in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(named) and not node.args
    ]
    assert not found, found


def test_a_wheel_contains_every_module(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    environment = {**os.environ, "DCT_BUILD": "0"}
    subprocess.run([*pip, *build], check=True, env=environment, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        content = archive.namelist()
    for name in MODULES:
        path = name.replace(".", "/")
        assert {f"{path}.py", f"{path}/__init__.py"} & {*content}, name
    # Triton's kernels, adapters and main modules of programs are imported only on demand.
    on_demand = ("dct_kernels.triton", "dct_embeddings.torchrec", "dct_parallel.integrations.")
    names = [n for n in MODULES if not n.startswith(on_demand) and "__main__" not in n]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        f"    assert importlib.import_module(name).__file__.startswith({str(tmp_path)!r}), name\n"
    )
    environment["PYTHONPATH"] = str(tmp_path / "installed")
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment, timeout=300
    )


def test_a_folder_with_the_name_of_the_package_is_not_imported(tmp_path):
    """The folder may be, for example, a checkout next to the user's program."""
    (tmp_path / "dct_kernels").mkdir()
    program = tmp_path / "program.py"
    program.write_text("import dct_kernels, dct_parallel; print(dct_kernels.__file__)")
    command = [sys.executable, program]  # fails for an editable install with a finder
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    found = Path(run.stdout.strip()).resolve()
    assert found == Path(dct_kernels.__file__).resolve(), run.stderr
