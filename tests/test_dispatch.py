"""Backends: forcing one, refusals that say why, and a light import."""

import os
import subprocess
import sys

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels import __main__ as table
from fwanda_kernels import _dispatch

WEIGHT, SCALE = torch.ones(2, 4), torch.ones(4)


def test_use_backend_forces_and_restores():
    before = _dispatch.forced_backend()
    with fk.use_backend("reference"):
        assert _dispatch.forced_backend() == "reference"
        fk.row_topk_mask(WEIGHT, SCALE, 2)
    assert _dispatch.forced_backend() == before


def test_use_backend_restores_after_an_exception():
    before = _dispatch.forced_backend()
    with pytest.raises(KeyError), fk.use_backend("reference"):
        raise KeyError
    assert _dispatch.forced_backend() == before


def test_unknown_backend_lists_the_names():
    before = _dispatch.forced_backend()
    with pytest.raises(ValueError) as error, fk.use_backend("metal"):
        pass
    assert "'metal'" in str(error.value) and all(name in str(error.value) for name in _dispatch.BACKENDS)
    assert _dispatch.forced_backend() == before


def test_environment_forces_a_backend(monkeypatch):
    monkeypatch.setenv("FWANDA_BACKEND", "reference")
    assert _dispatch.forced_backend() == "reference"


def test_invalid_environment_lists_the_names(monkeypatch):
    monkeypatch.setenv("FWANDA_BACKEND", "metal")
    with pytest.raises(ValueError, match="reference") as error:
        fk.row_topk_mask(WEIGHT, SCALE, 2)
    assert "FWANDA_BACKEND" in str(error.value) and "\n" not in str(error.value)


def test_use_backend_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("FWANDA_BACKEND", "metal")
    with fk.use_backend("reference"):
        assert fk.row_topk_mask(WEIGHT, SCALE, 2).sum() == 4


def test_forced_backend_that_declines_raises(monkeypatch):
    monkeypatch.setitem(_dispatch._kernels, ("reference", "cpu", "nm_mask"), lambda *args: NotImplemented)
    with fk.use_backend("reference"), pytest.raises(fk.BackendError, match="nm_mask.*cpu.*reference: declines"):
        fk.nm_mask(WEIGHT, SCALE, 2, 4)


def test_backend_that_fails_to_load_is_tried_once_and_explained(monkeypatch):
    tried = []

    def load(backend, device, name):
        tried.append((backend, device, name))
        raise ImportError("no library here")

    monkeypatch.setattr(_dispatch, "_kernels", {})
    monkeypatch.setattr(_dispatch, "_failures", {})
    monkeypatch.setattr(_dispatch, "_load", load)
    for _ in range(2):
        with fk.use_backend("reference"), pytest.raises(fk.BackendError, match="reference: no library here"):
            fk.nm_mask(WEIGHT, SCALE, 2, 4)
    assert tried == [("reference", "cpu", "nm_mask")]
    assert fk.explain("nm_mask")["cpu"]["reference"] == "no library here"
    assert fk.backends()["nm_mask"]["cpu"] == []


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter serves CPU tensors")
def test_triton_forced_on_cpu_names_the_interpreter():
    with fk.use_backend("triton"), pytest.raises(fk.BackendError, match="TRITON_INTERPRET=1"):
        fk.row_topk_mask(WEIGHT, SCALE, 2)


def test_reference_serves_every_op_on_cpu():
    assert all("reference" in devices["cpu"] for devices in fk.backends().values())


@pytest.mark.parametrize("op", _dispatch._families)
def test_explain_agrees_with_backends(op):
    for device, usable in fk.backends()[op].items():
        status = fk.explain(op)[device]
        assert list(status) == list(_dispatch.BACKENDS)
        assert [name for name, text in status.items() if text == "serves"] == usable[:1]
        assert all((status[name] in ("serves", "fallback")) == (name in usable) for name in status)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_absent_device_is_explained():
    assert fk.backends()["nm_mask"]["cuda"] == []
    assert fk.explain("nm_mask")["cuda"]["reference"] == "no CUDA device"


def test_explain_of_an_unknown_op_lists_the_ops():
    with pytest.raises(ValueError, match="row_topk_mask.*'softmax'"):
        fk.explain("softmax")


def test_table_names_every_op():
    assert all(op in table.describe() for op in fk.backends())


def test_import_loads_no_transformers_no_triton_and_takes_no_gpu():
    code = (
        "import sys, torch; before = set(sys.modules); import fwanda_kernels;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "assert not new & {'transformers', 'triton', 'fwanda_pruner', 'numpy'}, sorted(new);"
        "assert not torch.cuda.is_initialized()"
    )
    path = os.pathsep.join(folder for folder in sys.path if folder)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
