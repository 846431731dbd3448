"""The layout of the Hugging Face Kernel Hub: a copy of the package under any name, several in one process."""

import ast
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fwanda_kernels"
OPS = """
import torch
ops = torch.ops.{id}
def add_op_namespace_prefix(op_name):
    return f"{id}::{{op_name}}"
"""
USE = """
import torch
weight, scale = torch.randn(4, 8), torch.rand(8)
for kernel in copies:
    assert kernel.row_topk_mask(weight, scale, 3).sum(1).tolist() == [3] * 4
    assert kernel.explain("nm_mask")["cpu"]["reference"] == "serves"
names = [kernel._dispatch.NAMESPACE for kernel in copies]
assert names == ["_fwanda_kernels_cpu_one", "_fwanda_kernels_cpu_two"], names
import fwanda_kernels
assert fwanda_kernels._dispatch.NAMESPACE == "fwanda"
assert torch.equal(fwanda_kernels.nm_mask(weight, scale, 2, 4), copies[0].nm_mask(weight, scale, 2, 4))
"""


def variant(folder: Path, name: str) -> Path:
    """A folder as kernel-builder leaves it: the package, a module `_ops` and metadata."""
    identity = f"_fwanda_kernels_cpu_{name}"
    place = folder / name / "build" / "torch-cpu"
    shutil.copytree(ROOT / "torch-ext" / "fwanda_kernels", place, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (place / "_ops.py").write_text(OPS.format(id=identity))
    metadata = {
        "name": "fwanda-kernels",
        "id": identity,
        "version": 0,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (place / "metadata.json").write_text(json.dumps(metadata))
    return place


def run(code: str, *arguments) -> None:
    code = textwrap.dedent(code) + USE
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_imports_inside_the_kernels_are_relative_or_of_torch_and_the_standard_library():
    allowed = {*sys.stdlib_module_names, "torch", "triton", "pynvml"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            foreign = {name.split(".")[0] for name in names} - allowed
            assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_two_copies_and_the_installed_package_live_in_one_process(tmp_path):
    places = [variant(tmp_path, name) for name in ("one", "two")]
    load = """
        import importlib.util, sys
        from pathlib import Path

        copies = []
        for place in map(Path, sys.argv[1:]):
            spec = importlib.util.spec_from_file_location("copy_" + place.parents[1].name, place / "__init__.py")
            copies.append(importlib.util.module_from_spec(spec))
            sys.modules[spec.name] = copies[-1]
            spec.loader.exec_module(copies[-1])
        """
    run(load, *places)


def test_the_kernels_package_reads_the_build_file_and_loads_a_build(tmp_path):
    rust = pytest.importorskip("kernels._rust", reason="kernels is missing: pip install kernels")
    assert [str(backend) for backend in rust.Build.open(ROOT).general.backends] == ["cpu", "cuda"]
    places = [variant(tmp_path, name) for name in ("one", "two")]
    load = """
        import sys
        from pathlib import Path
        from kernels import get_local_kernel

        copies = [get_local_kernel(Path(place).parent, backend="cpu") for place in sys.argv[1:]]
        """
    run(load, *places)
