"""How the CUDA backend gets and runs its kernels, on a stand-in for the driver: cache, loading, launching, messages."""

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers_cuda import fake_driver

from fwanda_kernels._build import PACKAGE, BuildError, build

ROOT = Path(__file__).resolve().parents[1]
compiling = runpy.run_path(str(PACKAGE / "_backends" / "cuda" / "compile.py"))
try:
    NVRTC = compiling["find_nvrtc"]()
except compiling["CompileError"] as error:
    pytestmark = pytest.mark.skip(reason=str(error))
else:
    reason = "a real driver is here" if torch.cuda.is_available() else "cubins are built"
    pytestmark = pytest.mark.skipif(torch.cuda.is_available() or (PACKAGE / "cubins").exists(), reason=reason)

MODULE = ("sparse24", "fp32")  # the smallest


@pytest.fixture(scope="module")
def library():
    return fake_driver()


@pytest.fixture
def cuda(library, tmp_path, monkeypatch):
    """The package of the backend, with an empty cache."""
    monkeypatch.setenv("FWANDA_CACHE", str(tmp_path / "cache"))
    library.fake_clear()
    from fwanda_kernels._backends import cuda

    return cuda


def log(library) -> list[str]:
    return library.fake_log().decode().splitlines()


# the cache


def cached_files() -> list[Path]:
    return sorted(Path(os.environ["FWANDA_CACHE"], "kernels").iterdir())


def compile_once(cuda) -> tuple[bytes, str]:
    code = cuda.find_code(MODULE, (9, 0))
    return code, cuda.about("sparse24")


def test_the_second_process_takes_the_cubin_of_the_first(cuda):
    code, origin = compile_once(cuda)
    assert origin.startswith(f"fp32: compiled by {NVRTC.name} in ") and origin.endswith(" s, cached")
    (file,) = cached_files()
    again, origin = compile_once(cuda)
    assert again == code and origin.endswith(", from the cache") and cached_files() == [file]


@pytest.mark.parametrize("broken", ["empty", "cut", "flipped", "foreign", "folder"])
@pytest.mark.fault("broken cubin")
def test_a_broken_or_foreign_file_is_compiled_anew(cuda, broken):
    code, _ = compile_once(cuda)
    (file,) = cached_files()
    whole = file.read_bytes()
    if broken == "folder":
        file.unlink()
        file.mkdir()
    else:
        flipped = whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]
        foreign = whole.replace(b'"key": "', b'"key": "0', 1)
        file.write_bytes({"empty": b"", "cut": whole[:-7], "flipped": flipped, "foreign": foreign}[broken])
    again, origin = compile_once(cuda)
    assert again == code
    if broken == "folder":
        assert "not cached: " in origin
    else:
        assert origin.endswith(" s, cached")
        assert compile_once(cuda)[1].endswith("from the cache")
    assert cached_files() == [file]


@pytest.mark.fault("no cubin cache")
def test_a_cache_that_cannot_be_written_only_costs_the_compilation(cuda, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FWANDA_CACHE", str(tmp_path / "file"))
    code, origin = compile_once(cuda)
    assert code[:4] == b"\x7fELF" and "\n" not in origin
    assert f"not cached: {tmp_path / 'file' / 'kernels'} cannot be written: Not a directory; set FWANDA_CACHE" in origin


@pytest.mark.fault("no cubin cache")
def test_a_full_disk_leaves_no_part_of_a_file(cuda):
    """A limit on the size of files fails like a full disk: in the middle of a write."""
    resource = pytest.importorskip("resource")
    compile_once(cuda)
    (file,) = cached_files()
    file.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        code, origin = compile_once(cuda)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code[:4] == b"\x7fELF" and "cannot be written: File too large" in origin and cached_files() == []


def test_another_compiler_or_architecture_has_another_file(cuda):
    compile_once(cuda)
    assert cuda.disk.load(*MODULE, 90, NVRTC.name) is not None
    assert cuda.disk.load(*MODULE, 90, "NVRTC 1.0") is None and cuda.disk.load(*MODULE, 100, NVRTC.name) is None


def test_leftovers_of_killed_processes_are_removed_after_a_day(cuda):
    folder = cuda.disk.folder()
    folder.mkdir(parents=True)
    old, new = folder / ".tmp-old", folder / ".tmp-new"
    for path in (old, new):
        path.write_bytes(b"part")
    os.utime(old, (0, 0))
    compile_once(cuda)
    assert not old.exists() and new.exists()


PROCESS = """
import sys
sys.path.insert(0, {tests!r})
import ctypes
library = ctypes.CDLL({library!r})
from fwanda_kernels._backends import cuda
import hashlib
print(hashlib.sha256(cuda.find_code({module!r}, (9, 0))).hexdigest(), cuda.about("sparse24"))
"""


def start(library, **environment) -> subprocess.Popen:
    code = PROCESS.format(tests=str(ROOT / "tests"), library=library._name, module=MODULE)
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


@pytest.mark.fault("cubin race", trials=8)
def test_eight_processes_that_start_at_once_share_the_cache(cuda, library):
    processes = [start(library) for _ in range(8)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    assert len({output.split()[0] for output, _ in outputs}) == 1
    assert len(cached_files()) == 1
    output, _ = start(library).communicate(timeout=100)
    assert output.strip().endswith("from the cache")


# messages


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"FAKE_DRIVER": "12000"}, "the driver supports CUDA 12.0, the kernels need 12.1; install driver 530 or newer"),
        ({"FAKE_ARCH": "80"}, "needs compute capability 9.0 or newer, got 8.0"),
        ({"FAKE_ARCH": "210"}, "compiles for sm_90, "),
    ],
)
@pytest.mark.fault("no CUDA kernels")
def test_a_machine_that_cannot_have_the_kernels_hears_why(library, environment, reason):
    process = start(library, **environment)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and reason in last
    if "sm_90" in reason:
        assert last.endswith("the card is sm_210")


@pytest.mark.fault("no CUDA kernels")
def test_without_nvrtc_the_reason_says_what_to_install(tmp_path):
    """Without its site-packages, Python finds no NVRTC of a wheel."""
    if Path("/usr/local/cuda/lib64").exists() and list(Path("/usr/local/cuda/lib64").glob("libnvrtc.so.*")):
        pytest.skip("the toolkit has NVRTC")
    code = f"import runpy; runpy.run_path({str(PACKAGE / '_backends' / 'cuda' / 'compile.py')!r})['find_nvrtc']()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "", "HOME": str(tmp_path)},
    )
    assert done.stderr.strip().endswith("CompileError: no NVRTC found: pip install nvidia-cuda-nvrtc")


def test_an_unknown_architecture_lists_those_that_are_known(tmp_path, monkeypatch):
    with pytest.raises(BuildError) as error:
        build("cuda", tmp_path, archs=[42])
    assert str(error.value) == f"{NVRTC.name} builds for {', '.join(map(str, NVRTC.archs))}, got 42"
    assert not list(tmp_path.iterdir())


# cubins of the package


@pytest.fixture
def small_build(monkeypatch):
    """compile.py with one module only, as build() compiles all."""
    module = runpy.run_path(str(PACKAGE / "_backends" / "cuda" / "compile.py"))
    module["MODULES"][:] = [MODULE]
    return module


def test_cubins_of_the_package_are_read_until_the_sources_change(small_build, tmp_path):
    folder = tmp_path / "cubins"
    folder.mkdir()
    (folder / "old-sm_90.cubin").write_bytes(b"of an earlier build")
    (path,) = small_build["build"](folder, [90])
    assert path.name == "sparse24-fp32-sm_90.cubin" and list(folder.iterdir()) == [path]
    key = small_build["digest"](*MODULE, 90)
    assert small_build["read"](path, key).by == NVRTC.name
    assert small_build["read"](path, key.replace(key[0], "x")) is None


def test_a_cubin_serves_later_minors_of_its_major_only():
    best = compiling["best_arch"]
    assert best((9, 0), [90, 100]) == 90 and best((10, 3), [90, 100, 120]) == 100 and best((10, 3), [100, 103]) == 103
    assert best((12, 1), [120]) == 120 and best((10, 0), [103]) is None and best((8, 9), [90]) is None


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_nvcc_makes_the_same_module(tmp_path):
    from helpers_cuda import resources

    nvcc = compiling["Nvcc"](shutil.which("nvcc"))
    cubin = nvcc.compile(*MODULE, 90)
    assert cubin.by.startswith("nvcc ")
    (tmp_path / "other").mkdir()
    assert set(resources(cubin.code, tmp_path)) == set(resources(NVRTC.compile(*MODULE, 90).code, tmp_path / "other"))


# loading and launching


@pytest.fixture
def device(cuda):
    library = cuda.Device(3, cuda.find_code)
    return library


def step(cuda, kernel: str = "n_of_4_prune", **options):
    return cuda.Launch(MODULE, kernel, 5, 256, ((17).to_bytes(48, "little"), (2).to_bytes(4, "little")), **options)


def test_a_kernel_is_loaded_once_and_launched_on_the_given_stream(cuda, device, library):
    library.fake_current(1003)
    device.run([cuda.Zero(4096, 64), step(cuda)], 77)
    device.run([step(cuda)], 78)
    zero, launch = "zero 4096 0 64 on 77", "launch n_of_4_prune 5,1,1 256,1,1 0 on {} first 17"
    loading = ["mode 2", "load", "get n_of_4_prune", "mode 0"]
    assert log(library) == [*loading, zero, launch.format(77), launch.format(78)]


def test_all_kernels_are_loaded_before_the_first_is_launched(cuda, device, library):
    library.fake_current(1003)
    device.run([step(cuda), step(cuda, "n_of_4_mask")], 0)
    kinds = [line.split()[0] for line in log(library)]
    assert kinds == ["mode", "load", "get", "mode", "mode", "get", "mode", "launch", "launch"]


def test_more_than_48_kb_of_shared_memory_are_asked_for_once_for_each_size(cuda, device, library):
    library.fake_current(1003)
    for size in (49152, 60000, 50000, 70000):
        device.run([step(cuda, shared=size)], 0)
    assert [line for line in log(library) if line.startswith("set")] == [
        f"set n_of_4_prune 8 {s}" for s in (60000, 70000)
    ]


@pytest.mark.fault("no CUDA kernels")
def test_a_launch_with_more_shared_memory_than_the_card_has_is_refused_before_any_other(cuda, device, library):
    library.fake_current(1003)
    with pytest.raises(
        ImportError, match="n_of_4_mask needs 232449 bytes of shared memory in a block, this card has 23"
    ):
        device.run([step(cuda), step(cuda, "n_of_4_mask", shared=232449)], 0)
    assert not any(line.startswith("launch") for line in log(library))


def test_an_early_launch_has_the_attribute_of_programmatic_launches(cuda, device, library):
    library.fake_current(1003)
    device.run([step(cuda, early=True, blocks_y=4, shared=16)], 9)
    assert log(library)[-1] == "early n_of_4_prune 5,4,1 256,1,1 16 on 9 first 17"


@pytest.mark.parametrize("current", [None, 1000], ids=["none", "another"])
@pytest.mark.fault("wrong CUDA context")
def test_a_thread_without_the_context_of_the_device_gets_it_for_the_call(cuda, device, library, current):
    library.fake_current(current)
    device.run([step(cuda)], 0)
    lines = log(library)
    assert lines[0] == "push 1003" and lines[-2].startswith("launch") and lines[-1] == "pop"
    value = ctypes.c_void_p()
    library.cuCtxGetCurrent(ctypes.byref(value))
    assert value.value == current


def test_threads_that_call_first_load_a_kernel_once(cuda, device, library):
    library.fake_current(1003)
    threads = [threading.Thread(target=device.run, args=([step(cuda)], i)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = log(library)
    assert lines.count("load") == 1 and sum(line.startswith("launch") for line in lines) == 8


@pytest.mark.fault("no CUDA kernels")
def test_a_cubin_that_the_driver_refuses_is_a_refusal_before_any_launch(cuda, library):
    device = cuda.Device(3, lambda module, capability: b"no cubin")
    library.fake_current(1003)
    with pytest.raises(ImportError, match="the driver does not accept the kernels sparse24-fp32: cuModuleLoadData"):
        device.run([cuda.Zero(4096, 64), step(cuda)], 0)
    assert log(library) == ["mode 2", "mode 0"]


def test_a_failed_launch_names_the_call(cuda, device):
    with pytest.raises(RuntimeError, match=r"cuModuleGetFunction: as the test wants \(400\)"):
        cuda.driver.call("cuModuleGetFunction", ctypes.byref(ctypes.c_void_p()), 1, b"kernel")
