"""Build native code ahead of time, for setup.py and for `python -m fwanda_kernels --build`.

The library for CPUs uses only LibTorch's stable ABI, so one build serves every torch from 2.10 on and every Python; it
is loaded with `torch.ops.load_library`. The CUDA kernels become cubins, which depend on no version of torch or Python.
setup.py runs this file without the package, so it imports nothing from it. It finds torch's headers without importing
torch.

Environment: CXX, CUDA_HOME, TORCH_CUDA_ARCH_LIST (as in torch: "9.0;10.0"), MAX_JOBS.
"""

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CPU_LIBRARY = "libfwanda_cpu.stable.so"
CUBINS = "cubins"  # folder of the package
CHOICES = ("cpu", "cuda", "all")
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]
CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden"]


class BuildError(RuntimeError):
    """Native code cannot be built here; the message says what is missing or shows the compiler's output."""


def build(which: str, out_dir: Path | None = None, archs: Sequence[int] | None = None) -> list[Path]:
    """Compile the native code for CPUs, for CUDA, or both.

    Args:
        which: `cpu`, `cuda` (needs NVRTC or nvcc, but neither a GPU nor a CUDA build of torch) or `all` (both).
        out_dir: folder to write to; the package itself when None, where it is looked for.
        archs: for CUDA, compute capabilities times ten; those of TORCH_CUDA_ARCH_LIST, or 90, 100 and 120 when None.

    Returns:
        The library, and the folder of cubins. If a build fails, the old one stays as it was.

    Raises:
        BuildError: a tool, torch, the sources or an architecture are missing, the folder is not writable, or a compile
            failed.
        ValueError: `which` is none of the three.
    """
    if which not in CHOICES:
        raise ValueError(f"build: which must be cpu, cuda or all, got {which!r}")
    out_dir = Path(out_dir or PACKAGE)
    if not os.access(out_dir, os.W_OK):
        raise BuildError(f"cannot write to {out_dir}: build as its owner, or install into an environment of your own")
    built = []
    if which in ("cpu", "all"):
        built.append(_build_cpu(out_dir))
    if which in ("cuda", "all"):
        built.append(_build_cuda(out_dir, _listed_archs() if archs is None else archs))
    return built


def build_for_install(mode: str, out_dir: Path, *, keep: bool = False) -> list[Path]:
    """Serve FWANDA_BUILD while the package is being installed.

    Args:
        mode: `0` builds nothing; `auto` builds the library for CPUs if this machine has the tools, and never fails
            (CUDA kernels compile on first use); `cpu`, `cuda` and `all` build just that or raise.
        out_dir: the package folder being put together.
        keep: leave what an earlier build left in `out_dir` (an editable install), instead of removing it.

    Returns:
        What build() returns.

    Raises:
        BuildError: an explicit mode could not be served.
        ValueError: unknown mode.
    """
    if mode not in ("auto", "0", *CHOICES):
        raise ValueError(f"FWANDA_BUILD must be auto, 0, cpu, cuda or all, got {mode!r}")
    if not keep:
        (out_dir / CPU_LIBRARY).unlink(missing_ok=True)
        shutil.rmtree(out_dir / CUBINS, ignore_errors=True)
    if mode == "0":
        return []
    if mode != "auto":
        return build(mode, out_dir)
    try:
        return build("cpu", out_dir)
    except Exception as error:
        print(f"fwanda-kernels: installing without the cpu library: {error}")
        return []


def find_library() -> Path | None:
    """Path of the library for CPUs beside the package, or None if it was not built."""
    path = PACKAGE / CPU_LIBRARY
    return path if path.is_file() else None


def _build_cpu(out_dir: Path) -> Path:
    torch, target = _torch(), out_dir / CPU_LIBRARY
    sources = map(str, sorted(_sources().glob("*.cpp")))
    command = [*_host_compiler(), *CXX_FLAGS, *STABLE_ABI, f"-I{torch / 'include'}", *sources]
    # libtorch.so brings libtorch_cpu
    link = [f"-L{torch / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch"]
    with tempfile.TemporaryDirectory(prefix=".build-", dir=out_dir) as work:
        _run([*command, "-shared", "-o", f"{work}/cpu.so", *link])
        os.replace(f"{work}/cpu.so", target)
    return target


def _build_cuda(out_dir: Path, archs: Sequence[int] | None) -> Path:
    compiling = runpy.run_path(str(PACKAGE / "_backends" / "cuda" / "compile.py"))
    try:
        compiling["build"](out_dir / CUBINS, archs)
    except (compiling["CompileError"], OSError) as error:
        raise BuildError(str(error)) from error
    return out_dir / CUBINS


def _listed_archs() -> list[int] | None:
    """The architectures of TORCH_CUDA_ARCH_LIST that the kernels serve; None if it is empty."""
    archs = []
    for entry in os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split():
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", entry)
        if match is None:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST: expected entries such as 9.0 or 9.0+PTX, got {entry!r}")
        archs.append(10 * int(match[1]) + int(match[2]))
    if archs and max(archs) < 90:
        raise BuildError("TORCH_CUDA_ARCH_LIST: the CUDA kernels need 9.0 or newer; older cards run Triton")
    return [arch for arch in archs if arch >= 90] or None


def _sources() -> Path:
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "cpu.cpp").is_file():
            return folder
    raise BuildError(f"the C++ sources are missing from {PACKAGE}: reinstall fwanda-kernels")


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("torch is not installed in this build environment: install it, then use --no-build-isolation")
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / "include/torch/csrc/stable/c/shim.h").is_file():
        raise BuildError(f"torch>=2.10 with its C++ headers is needed, {folder} does not hold them")
    return folder


def _host_compiler() -> list[str]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found: install g++ or clang++, or set CXX")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        output = f"{done.stderr}{done.stdout}"
        raise BuildError(f"{shlex.join(command)}\nfailed with exit status {done.returncode}:\n{output}")
