"""Compiles csrc/*.cu to cubins, by NVRTC or nvcc, and keeps cubins in files.

A module is one .cu file compiled for one variant. A cubin serves all cards of one major compute capability, from its
own minor on. setup.py runs this file without the package, so it imports nothing from it, and not torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2]
OLDEST_ARCH = 90  # bulk copies and programmatic launches; older cards run Triton
DEFAULT_ARCHS = (90, 100, 120)
OPTIONS = ("-std=c++17",)
BUILT = PACKAGE / "cubins"  # of `python -m fwanda_kernels --build cuda`, or of a wheel built with FWANDA_BUILD=cuda
TEMPORARY = ".tmp-"

_WEIGHTS = {
    f"{dtype}{suffix}": (f"WEIGHT={dtype.capitalize()}", f"ROWS_ALIGNED={aligned}")
    for dtype in ("bf16", "fp16", "fp32")
    for suffix, aligned in (("", "true"), ("-unaligned", "false"))
}
# STEPS: groups of 4 columns that a thread of row selection holds
_ROWS = {variant: (*macros, "STEPS=16") for variant, macros in _WEIGHTS.items()}
_ROWS |= {f"{dtype}-wide": (*_WEIGHTS[dtype], "STEPS=20") for dtype in ("bf16", "fp16")}
# A module of row selection or of packed weights holds one kernel, so that the first call compiles no other
_ROW_KERNELS = {
    "prune": ("KERNEL=row_topk_prune", "TO_MASK=false", "MATRICES=1"),
    "list": ("KERNEL=row_topk_prune_list", "TO_MASK=false", "MATRICES=kMaxMatrices"),
    "mask": ("KERNEL=row_topk_mask", "TO_MASK=true", "MATRICES=1"),
}
# sums of one input or of a list, over all tokens or over those of a mask
_SUMS = {
    f"{name}{suffix}": (f"ENTRIES={entries}", f"WITH_MASK={masked}")
    for name, entries in (("one", "1"), ("list", "kMaxEntries"))
    for suffix, masked in (("", "false"), ("-masked", "true"))
}
_PACKED_KERNELS = {"8": "LINEAR_8", "16": "LINEAR_16", "direct": "LINEAR_DIRECT", "unpack": "UNPACK"}
# family, which is the name of the .cu file -> variant -> macros
FAMILIES = {
    "select": {f"{rows}-{name}": _ROWS[rows] + _ROW_KERNELS[name] for rows in _ROWS for name in _ROW_KERNELS},
    "stats": _SUMS,
    "sparse24": _WEIGHTS,
    "threshold": _WEIGHTS,
    "packed": {
        f"{dtype}-{name}": (*_WEIGHTS[dtype][:1], "THREADS=512", macro)
        for dtype in ("bf16", "fp16")
        for name, macro in _PACKED_KERNELS.items()
    },
    "obs": {rule: (f"RULE={rule}",) for rule in ("sparsity", "keep", "mask", "pattern")},
}
MODULES = [(family, variant) for family, variants in FAMILIES.items() for variant in variants]


class CompileError(RuntimeError):
    """A module cannot be compiled here; one line says why, and what to do."""


class Cubin(NamedTuple):
    """Code of a module for one architecture.

    Attributes:
        by: the compiler and its version, "NVRTC 13.0".
        seconds: what compiling took.
    """

    code: bytes
    by: str
    seconds: float


def sources() -> Path:
    """The folder csrc/, of the repository or of the installed package.

    Raises:
        CompileError: it is missing.
    """
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "select.cu").is_file():
            return folder
    raise CompileError("the CUDA sources (csrc/) are not part of this copy of the package")


@cache
def digest(family: str, variant: str, arch: int) -> str:
    """SHA-256 of everything that a cubin depends on, except its compiler.

    Raises:
        CompileError: as sources().
    """
    sha = hashlib.sha256(repr((family, variant, arch, OPTIONS, FAMILIES[family][variant])).encode())
    for name, text in {f"{family}.cu": (sources() / f"{family}.cu").read_bytes(), **_headers()}.items():
        sha.update(f"\n{name} {len(text)}\n".encode() + text)
    return sha.hexdigest()


def _headers() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(sources().glob("*.*h"))}


def write(path: Path, cubin: Cubin, key: str) -> None:
    """Write a cubin to a file that appears complete or not at all.

    Args:
        key: read() finds the file only under the same key.

    Raises:
        OSError: the file cannot be written; nothing of it is left.
    """
    head = {"key": key, "sha256": hashlib.sha256(cubin.code).hexdigest(), "by": cubin.by, "seconds": cubin.seconds}
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(json.dumps(head).encode() + b"\n" + cubin.code)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, key: str) -> Cubin | None:
    """The cubin that was written under a key; None if the file is missing, broken, or of another key."""
    try:
        line, _, code = path.read_bytes().partition(b"\n")
        head = json.loads(line)
        if head["key"] == key and head["sha256"] == hashlib.sha256(code).hexdigest():
            return Cubin(code, str(head["by"]), float(head["seconds"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    return None


def build(folder: Path, archs: Iterable[int] | None = None) -> list[Path]:
    """Compile all modules into a folder, and remove what was built there before.

    Args:
        archs: compute capabilities times ten; DEFAULT_ARCHS if None.

    Returns:
        The files, one for each module and architecture.

    Raises:
        CompileError: there is no compiler or no source, the compiler does not know an architecture, or it failed. The
            folder is then unchanged.
        OSError: the folder cannot be written.
    """
    tool = compiler()
    chosen = list(archs) if archs is not None else [arch for arch in DEFAULT_ARCHS if arch in tool.archs]
    for arch in chosen:
        if arch not in tool.archs:
            raise CompileError(f"{tool.name} builds for {', '.join(map(str, tool.archs))}, got {arch}")
    jobs = [(*module, arch) for arch in chosen for module in MODULES]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        cubins = list(pool.map(lambda job: tool.compile(*job), jobs))
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    paths = [folder / _built_name(*job) for job in jobs]
    for path, job, cubin in zip(paths, jobs, cubins, strict=True):
        write(path, cubin, digest(*job))
    return paths


def built(family: str, variant: str, capability: tuple[int, int]) -> Cubin | None:
    """The cubin of a module that the package holds for a card, unless the sources have changed since."""
    major, minor = capability
    for arch in range(10 * major + minor, 10 * major - 1, -1):
        path = BUILT / _built_name(family, variant, arch)
        if path.is_file() and (cubin := read(path, digest(family, variant, arch))):
            return cubin
    return None


def _built_name(family: str, variant: str, arch: int) -> str:
    return f"{family}-{variant}-sm_{arch}.cubin"


def best_arch(capability: tuple[int, int], archs: Iterable[int]) -> int | None:
    """The newest of some architectures whose cubins run on a card, or None."""
    major, minor = capability
    return max((arch for arch in archs if arch // 10 == major and arch % 10 <= minor), default=None)


def compiler() -> Nvrtc | Nvcc:
    """NVRTC, or else nvcc.

    Raises:
        CompileError: neither is here.
    """
    try:
        return find_nvrtc()
    except CompileError as error:
        home = os.environ.get("CUDA_HOME")
        path = shutil.which(str(Path(home, "bin", "nvcc"))) if home else shutil.which("nvcc")
        if path is None:
            raise CompileError(f"{error}; or set CUDA_HOME or PATH, so that nvcc is found") from None
        return Nvcc(path)


class Nvcc:
    """The compiler of a CUDA toolkit; it needs a host compiler."""

    def __init__(self, path: str):
        self._path = path
        self.name = "nvcc " + (re.search(r"release (\S+),", self._run("--version")) or ["", "?"])[1]
        self.archs = _served(map(int, re.findall(r"sm_(\d+)\b", self._run("--list-gpu-code"))))

    def compile(self, family: str, variant: str, arch: int) -> Cubin:
        """The cubin of a module.

        Raises:
            CompileError: the compiler failed; the message shows its output.
        """
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as work:
            out, macros = Path(work, "cubin"), [f"-D{macro}" for macro in FAMILIES[family][variant]]
            source = sources() / f"{family}.cu"
            self._run("-cubin", f"-arch=sm_{arch}", *OPTIONS, *macros, "-o", str(out), str(source))
            return Cubin(out.read_bytes(), self.name, time.perf_counter() - start)

    def _run(self, *arguments: str) -> str:
        try:
            done = subprocess.run([self._path, *arguments], capture_output=True, text=True)
        except OSError as error:
            raise CompileError(f"cannot run {self._path}: {error.strerror}") from None
        if done.returncode:
            raise CompileError(f"{self._path} failed with exit status {done.returncode}:\n{done.stderr}{done.stdout}")
        return done.stdout


class Nvrtc:
    """The library that compiles CUDA at run time. torch's CUDA wheels bring it."""

    def __init__(self, path: Path | str):
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins))  # NVRTC opens this library by its bare name, and finds it once it is loaded
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self.name = f"NVRTC {major.value}.{minor.value}"
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        self.archs = _served(archs)

    def compile(self, family: str, variant: str, arch: int) -> Cubin:
        """The cubin of a module.

        Raises:
            CompileError: NVRTC failed; the message shows its log.
        """
        macros = [f"-D{macro}" for macro in FAMILIES[family][variant]]
        options = [f"--gpu-architecture=sm_{arch}", *OPTIONS, *macros]
        start = time.perf_counter()
        code = self.compile_source(f"{family}.cu", (sources() / f"{family}.cu").read_bytes(), options, "CUBIN")
        return Cubin(code, self.name, time.perf_counter() - start)

    def compile_source(self, name: str, source: bytes, options: list[str], result: str) -> bytes:
        """Compile a text that may include the headers of csrc/. result: "CUBIN" or "PTX"."""
        headers, program = _headers(), ctypes.c_void_p()
        texts, names = _strings(headers.values()), _strings(key.encode() for key in headers)
        pointer = ctypes.byref(program)
        self._call("nvrtcCreateProgram", pointer, source, name.encode(), len(headers), texts, names)
        try:
            given = _strings(option.encode() for option in options)
            if self._library.nvrtcCompileProgram(program, len(given), given):
                log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
                raise CompileError(f"{self.name} failed on {name} ({' '.join(options)}): {log}")
            return self._read(result, program)
        finally:
            self._library.nvrtcDestroyProgram(pointer)

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, data)
        return data.raw

    def _call(self, function: str, *arguments) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise CompileError(f"{function}: {self._library.nvrtcGetErrorString(code).decode()}")


def _strings(values: Iterable[bytes]) -> ctypes.Array:
    values = list(values)
    return (ctypes.c_char_p * len(values))(*values)


def _served(archs: Iterable[int]) -> list[int]:
    return sorted({arch for arch in archs if arch >= OLDEST_ARCH})


@cache
def find_nvrtc() -> Nvrtc:
    """NVRTC of the CUDA version that torch has, if torch is loaded; else the newest.

    Raises:
        CompileError: there is none that can be loaded.
    """
    reasons = []
    for path in _nvrtc_files():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError, CompileError) as error:
            reasons.append(f"{path}: {error}")
    if reasons:
        raise CompileError(f"NVRTC cannot be loaded ({reasons[0]})")
    raise CompileError("no NVRTC found: pip install nvidia-cuda-nvrtc")


def _nvrtc_files() -> Iterator[Path]:
    found = [path for folder in _library_folders() for path in folder.glob("libnvrtc*.so*") if _major(path)]
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or "0"
    wanted = int(version.split(".")[0])
    yield from sorted(found, key=lambda path: (_major(path) != wanted, -_major(path)))


def _major(path: Path) -> int:
    """13 for libnvrtc.so.13; 0 for what is another library."""
    match = re.fullmatch(r"libnvrtc(-[0-9a-f]{8})?\.so\.(\d+)[.\d]*", path.name)
    return int(match[2]) if match else 0


def _library_folders() -> Iterator[Path]:
    for package, places in (("nvidia", ("cu*/lib", "cuda_nvrtc/lib")), ("torch", ("lib",))):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations if spec else None) or ():
            for place in places:
                yield from Path(root).glob(place)
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), os.environ.get("CONDA_PREFIX")]
    for home in [*homes, nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]:
        if home:
            yield from (Path(home, lib) for lib in ("lib64", "lib"))
