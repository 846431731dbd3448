"""The CUDA backend without a GPU: a stand-in for the driver, NVRTC, and what a cubin or PTX says of its kernels."""

import atexit
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@cache
def fake_driver() -> ctypes.CDLL:
    """Compile libcuda.c and load it once, so that whoever asks for libcuda.so.1 in this process gets it."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "libcuda.so.1")
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(path)]
    subprocess.run([*command, str(ROOT / "tests" / "libcuda.c")], check=True)
    library = ctypes.CDLL(str(path))
    library.fake_log.restype = ctypes.c_char_p
    library.fake_current.argtypes = [ctypes.c_void_p]
    return library


def parameter_sizes(ptx: str) -> dict[str, list[int]]:
    """Bytes of each parameter, for each kernel of a PTX text."""
    sizes = {}
    for name, parameters in re.findall(r"\.entry (\w+)\(([^)]*)\)", ptx):
        sizes[name] = []
        for kind, length in re.findall(r"\.param [^,\n]*?\.([usbf]\d+)\b[^,\n\[]*(?:\[(\d+)\])?", parameters):
            sizes[name].append(int(length) if length else int(kind[1:]) // 8)
    return sizes


def resources(cubin: bytes, folder: Path) -> dict[str, dict[str, int]]:
    """REG, STACK, SHARED and LOCAL of each kernel of a cubin, by the cuobjdump of the triton wheel."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip(f"no cuobjdump at {tool}")
    path = folder / "kernels.cubin"
    path.write_bytes(cubin)
    done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    found = re.findall(r"Function (\w+):\n(.*)", done.stdout)
    return {name: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)} for name, line in found}
