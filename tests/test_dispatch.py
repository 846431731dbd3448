"""Backends: forcing one, refusals that say why, failures that are remembered, and a light import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fwanda_kernels as fk
from fwanda_kernels import describe

ROOT = Path(__file__).resolve().parents[1]
WEIGHT, SCALE = torch.ones(2, 4), torch.ones(4)
BACKENDS = ["native", "triton", "reference"]
without_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter serves CPU tensors"
)


def call() -> torch.Tensor:
    return fk.row_topk_mask(WEIGHT, SCALE, 2)


def run_alone(code: str, *folders: Path, **environment: str) -> str:
    """What a new process prints, with the folders first on its path."""
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import torch, fwanda_kernels as fk\n{code}"],
        cwd="/", capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# forcing: a backend that serves no CPU tensor tells whether it is forced


@without_interpreter
def test_use_backend_forces_inside_its_block_only():
    with fk.use_backend("triton"):
        with pytest.raises(fk.BackendError):
            call()
        with fk.use_backend("reference"):
            assert call().sum() == 4
        with pytest.raises(fk.BackendError):
            call()
    assert call().sum() == 4


@without_interpreter
def test_use_backend_ends_with_an_exception():
    with pytest.raises(KeyError), fk.use_backend("triton"):
        raise KeyError
    assert call().sum() == 4


@pytest.mark.parametrize("name", ["metal", None, 3])
def test_unknown_backend_lists_the_names_and_is_not_forced(name):
    with pytest.raises(ValueError) as error, fk.use_backend(name):
        pass
    assert f"got {name!r}" in str(error.value) and all(name in str(error.value) for name in BACKENDS)
    assert call().sum() == 4


def test_environment_forces_a_backend_unless_a_block_does():
    code = """
def kept():
    return int(fk.row_topk_mask(torch.ones(2, 4), torch.ones(4), 2).sum())
try:
    kept()
except fk.BackendError as error:
    print(error)
with fk.use_backend("reference"):
    print(kept())
print("forced: triton" in fk.describe())
"""
    refusal, *rest = run_alone(code, FWANDA_BACKEND="triton", TRITON_INTERPRET="0").splitlines()
    assert refusal.startswith("row_topk_mask: no backend serves this call on cpu (triton: ") and rest == ["4", "True"]


def test_invalid_environment_lists_the_names():
    code = """
try:
    fk.row_topk_mask(torch.ones(2, 4), torch.ones(4), 2)
except ValueError as error:
    print(error)
"""
    (line,) = run_alone(code, FWANDA_BACKEND="metal").splitlines()
    assert "'metal'" in line and "FWANDA_BACKEND" in line and all(name in line for name in BACKENDS)


# the way of a call


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def profiled(call) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events()}


def test_a_call_passes_the_dispatcher_only_where_that_is_needed():
    weight = torch.ones(2, 4)
    assert "fwanda::nm_mask" not in profiled(lambda: fk.nm_mask(weight, SCALE, 2, 4))
    assert "fwanda::nm_mask" in profiled(lambda: torch.ops.fwanda.nm_mask(weight, SCALE, 2, 4, None))
    assert "fwanda::nm_mask" in profiled(lambda: fk.nm_mask(weight.clone().requires_grad_(), SCALE, 2, 4))
    with torch.no_grad():
        assert "fwanda::nm_mask" not in profiled(lambda: fk.nm_mask(torch.nn.Parameter(weight), SCALE, 2, 4))
    with Seen() as seen:
        fk.nm_mask(weight, SCALE, 2, 4)
    assert seen.names[0] == "fwanda::nm_mask"


def test_a_call_on_a_device_without_kernels_gives_the_shape():
    mask = fk.nm_mask(WEIGHT.to("meta"), SCALE.to("meta"), 2, 4)
    assert mask.device.type == "meta" and mask.shape == WEIGHT.shape and mask.dtype == torch.bool


# refusals and failures


@without_interpreter
def test_triton_forced_on_cpu_names_the_interpreter():
    with fk.use_backend("triton"), pytest.raises(fk.BackendError, match="row_topk_mask.*on cpu.*TRITON_INTERPRET=1"):
        call()


def test_op_that_a_backend_lacks_is_refused_by_name():
    with (
        fk.use_backend("native"),
        pytest.raises(fk.BackendError, match="obs_factor.*native: (not built|has no kernel)"),
    ):
        fk.obs_factor(torch.eye(3))


def test_broken_triton_is_tried_once_and_explained(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("print('tried')\nraise ImportError('libcuda\\n  is missing')\n")
    code = """
print("begin")
for _ in range(2):
    try:
        with fk.use_backend("triton"):
            fk.nm_mask(torch.ones(2, 4), torch.ones(4), 2, 4)
    except fk.BackendError as error:
        print(error)
print(fk.nm_mask(torch.ones(2, 4), torch.ones(4), 2, 4).sum().item())
"""
    lines = run_alone(code, tmp_path, TRITON_INTERPRET="1").split("begin\n")[1].splitlines()
    refusal = "nm_mask: no backend serves this call on cpu (triton: libcuda is missing)"
    refusal += "; choose another one, or none, by FWANDA_BACKEND or use_backend()"
    assert lines == ["tried", refusal, refusal, "4"]


def test_library_that_cannot_be_loaded_is_explained_and_another_backend_serves(tmp_path):
    shutil.copytree(ROOT / "fwanda_kernels", tmp_path / "fwanda_kernels", ignore=shutil.ignore_patterns("*.so"))
    code = """
print(fk.explain("nm_mask")["cpu"]["native"])
print(fk.backends()["nm_mask"]["cpu"], fk.nm_mask(torch.ones(2, 4), torch.ones(4), 2, 4).sum().item())
"""
    missing, served = run_alone(code, tmp_path).splitlines()
    assert missing == "not built; run python -m fwanda_kernels --build cpu" and served == "['reference'] 4"
    (tmp_path / "fwanda_kernels" / "libfwanda_cpu.stable.so").write_bytes(b"no library")
    broken, served = run_alone(code, tmp_path).splitlines()
    assert broken.startswith("libfwanda_cpu.stable.so cannot be loaded: ") and served == "['reference'] 4"


def test_backend_that_gives_up_at_a_call_is_explained_and_called_no_more(tmp_path):
    shutil.copytree(ROOT / "fwanda_kernels", tmp_path / "fwanda_kernels", ignore=shutil.ignore_patterns("*.so"))
    backend = tmp_path / "fwanda_kernels" / "_backends" / "native_cpu.py"
    backend.write_text("def nm_mask(*arguments):\n    print('called')\n    raise ImportError('no compiler')\n")
    code = """
print(fk.explain("nm_mask")["cpu"]["native"])
for _ in range(2):
    print(fk.nm_mask(torch.ones(2, 4), torch.ones(4), 2, 4).sum().item())
print(fk.explain("nm_mask")["cpu"]["native"], *fk.backends()["nm_mask"]["cpu"])
"""
    assert run_alone(code, tmp_path).splitlines() == ["serves", "called", "4", "4", "no compiler reference"]


# what serves


def test_reference_serves_every_op_on_cpu():
    assert all("reference" in devices["cpu"] for devices in fk.backends().values())


@pytest.mark.parametrize("op", fk.backends())
def test_explain_agrees_with_backends(op):
    for device, usable in fk.backends()[op].items():
        status = fk.explain(op)[device]
        assert list(status) == BACKENDS
        assert [name for name, text in status.items() if text.split(" (")[0] == "serves"] == usable[:1]
        assert all((status[name].split(" (")[0] in ("serves", "fallback")) == (name in usable) for name in status)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_absent_device_is_explained():
    assert fk.backends()["nm_mask"]["cuda"] == []
    assert fk.explain("nm_mask")["cuda"]["reference"] == "no CUDA device"


def test_explain_of_an_unknown_op_lists_the_ops():
    with pytest.raises(ValueError, match="row_topk_mask.*'softmax'"):
        fk.explain("softmax")


def test_table_names_every_op():
    assert all(op in describe() for op in fk.backends())


# import


def test_import_loads_no_backend_no_triton_no_transformers_and_takes_no_gpu():
    code = (
        "import sys, torch; before = set(sys.modules); import fwanda_kernels; new = set(sys.modules) - before;"
        "assert not {name.split('.')[0] for name in new} & {'transformers', 'triton', 'fwanda_pruner', 'numpy'}, new;"
        "assert not [name for name in new if name.startswith('fwanda_kernels._backends')], new;"
        "assert not torch.cuda.is_initialized()"
    )
    path = os.pathsep.join(folder for folder in sys.path if folder)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "PYTHONPATH": path})


@without_interpreter
def test_blocks_of_threads_that_end_in_any_order_leave_no_backend_forced():
    first, second = fk.use_backend("triton"), fk.use_backend("reference")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert call().sum() == 4
    with fk.use_backend("triton"):
        second.__exit__(None, None, None)
        with pytest.raises(fk.BackendError):
            call()
    assert call().sum() == 4
