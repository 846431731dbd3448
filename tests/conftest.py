"""Fixtures that every test file shares."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed of torch's global generator, set before each test."""
    torch.manual_seed(0)
    return 0
