"""Fixtures that every test file shares."""

import os
import sys
from contextlib import nullcontext

import pytest
import torch

from fwanda_kernels import use_backend


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed of torch's global generator, set before each test."""
    torch.manual_seed(0)
    return 0


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Converted GGUF models of all tests are kept in one temporary folder, which the workers of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FWANDA_CACHE", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"))
        yield


@pytest.fixture(params=["first", "reference"])
def backend(request):
    """The test runs on the backend that is first in order, then on the reference."""
    with use_backend("reference") if request.param == "reference" else nullcontext():
        yield


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    """Two rounds of the response allocation, for tests that do not ask how good they are."""
    if (respond := sys.modules.get("fwanda_pruner.allocate.response")) is not None:
        monkeypatch.setattr(respond, "round_count", lambda _config: 2)
