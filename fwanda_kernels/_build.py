"""Compile csrc/ into shared libraries, for setup.py and for `python -m fwanda_kernels --build`.

Both libraries use only LibTorch's stable ABI, so one build serves every torch from 2.10 on and every Python; they are
loaded with `torch.ops.load_library`. setup.py runs this file without the package, so it imports nothing from it. It
finds torch's headers without importing torch.

Environment: CXX, CUDA_HOME, TORCH_CUDA_ARCH_LIST (as in torch: "8.0;9.0+PTX"), MAX_JOBS.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LIBRARIES = {"cpu": "libfwanda_cpu.stable.so", "cuda": "libfwanda_cuda.stable.so"}
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]
CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden"]
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-DUSE_CUDA", "-cudart", "static"]
DEFAULT_ARCHS = ("9.0", "10.0")  # what the CUDA kernels serve; older cards run Triton


class BuildError(RuntimeError):
    """A native library cannot be built here; the message says what is missing or shows the compiler's output."""


def build(which: str, out_dir: Path | None = None) -> list[Path]:
    """Compile one or both native libraries.

    Args:
        which: `cpu`, `cuda` (needs nvcc, but neither a GPU nor a CUDA build of torch) or `all` (both).
        out_dir: folder to write to; the package itself when None, where `find_library` looks.

    Returns:
        The libraries written. If a build fails, the old library stays as it was.

    Raises:
        BuildError: a tool, torch or the sources are missing, the folder is not writable, or a compile failed.
        ValueError: `which` is none of the three.
    """
    if which not in (*LIBRARIES, "all"):
        raise ValueError(f"build: which must be cpu, cuda or all, got {which!r}")
    out_dir = Path(out_dir or PACKAGE)
    if not os.access(out_dir, os.W_OK):
        raise BuildError(f"cannot write to {out_dir}: build as its owner, or install into an environment of your own")
    compilers = {"cpu": _build_cpu, "cuda": _build_cuda}
    return [_into(out_dir / LIBRARIES[name], compilers[name]) for name in LIBRARIES if which in (name, "all")]


def build_for_install(mode: str, out_dir: Path, *, keep: bool = False) -> list[Path]:
    """Serve FWANDA_BUILD while the package is being installed.

    Args:
        mode: `0` builds nothing; `auto` builds what this machine has tools for, and never fails; `cpu`, `cuda` and
            `all` build just that or raise.
        out_dir: the package folder being put together.
        keep: leave libraries of an earlier build in `out_dir` (an editable install), instead of removing them.

    Returns:
        The libraries written.

    Raises:
        BuildError: an explicit mode could not be served.
        ValueError: unknown mode.
    """
    if mode not in ("auto", "0", "all", *LIBRARIES):
        raise ValueError(f"FWANDA_BUILD must be auto, 0, cpu, cuda or all, got {mode!r}")
    if not keep:
        for name in LIBRARIES.values():
            (out_dir / name).unlink(missing_ok=True)
    if mode == "0":
        return []
    if mode != "auto":
        return build(mode, out_dir)
    built = []
    for name in LIBRARIES:
        try:
            if name == "cuda" and not (_torch() / "lib" / "libtorch_cuda.so").exists():
                raise BuildError("torch is a CPU build")
            built += build(name, out_dir)
        except Exception as error:
            print(f"fwanda-kernels: installing without the {name} library: {error}")
    return built


def find_library(which: str) -> Path | None:
    """Path of the built `cpu` or `cuda` library beside the package, or None if it was not built."""
    path = PACKAGE / LIBRARIES[which]
    return path if path.is_file() else None


def _into(target: Path, compile_to) -> Path:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as work:
        os.replace(compile_to(Path(work)), target)
    return target


def _build_cpu(work: Path) -> Path:
    torch, library = _torch(), work / "cpu.so"
    sources = map(str, sorted(_sources().glob("*.cpp")))
    command = [*_host_compiler(), *CXX_FLAGS, *STABLE_ABI, f"-I{torch / 'include'}", *sources]
    _run([*command, "-shared", "-o", str(library), *_link(torch)])
    return library


def _build_cuda(work: Path) -> Path:
    torch, nvcc, library = _torch(), _nvcc(), work / "cuda.so"
    sources = sorted(_sources().glob("*.cu"))
    if not sources:
        raise BuildError(f"no .cu files in {_sources()}")
    objects = [work / f"{source.stem}.o" for source in sources]
    archs = _arch_flags(nvcc)
    command = [nvcc, *NVCC_FLAGS, *archs, *STABLE_ABI, f"-I{torch / 'include'}"]
    _compile({obj: [*command, "-c", str(src), "-o", str(obj)] for src, obj in zip(sources, objects, strict=True)}, work)
    _run([nvcc, "-shared", "-cudart", "static", *archs, *map(str, objects), "-o", str(library), *_link(torch)])
    return library


def _compile(jobs: dict[Path, list[str]], work: Path) -> None:
    """Run the commands that make the objects, at most MAX_JOBS at once, by ninja where it is installed."""
    most = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    ninja = [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else [shutil.which("ninja")]
    if ninja[0] is None:
        with ThreadPoolExecutor(most) as pool:
            list(pool.map(_run, jobs.values()))
        return
    lines = ["rule run", "  command = $line"]
    for target, command in jobs.items():
        lines += [f"build {target.name}: run", f"  line = {shlex.join(command).replace('$', '$$')}"]
    (work / "build.ninja").write_text("\n".join(lines) + "\n")
    _run([*ninja, "-C", str(work), "-j", str(most)])


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


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which(str(Path(home, "bin", "nvcc"))) if home else shutil.which("nvcc")
    if nvcc is None:
        raise BuildError(f"no nvcc in {home}/bin (CUDA_HOME)" if home else "no nvcc found: set CUDA_HOME or PATH")
    return nvcc


def _arch_flags(nvcc: str) -> list[str]:
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not listed:
        known = _run([nvcc, "--list-gpu-code"]).split()
        listed = [arch for arch in DEFAULT_ARCHS if f"sm_{arch.replace('.', '')}" in known]
        listed[-1] += "+PTX"
    flags = []
    for entry in listed:
        arch = entry.removesuffix("+PTX").replace(".", "")
        if not arch.rstrip("af").isdigit():
            raise BuildError(f"TORCH_CUDA_ARCH_LIST: expected entries such as 9.0 or 9.0+PTX, got {entry!r}")
        flags.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
        if entry.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{arch},code=compute_{arch}")
    return flags


def _link(torch: Path) -> list[str]:
    # libtorch.so brings libtorch_cpu and, in a CUDA build, libtorch_cuda
    return [f"-L{torch / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch"]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        output = f"{done.stderr}{done.stdout}"
        raise BuildError(f"{shlex.join(command)}\nfailed with exit status {done.returncode}:\n{output}")
    return done.stdout
