"""Where a model lies, how much memory it may take there, and whether results may differ between runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import PruneConfig
from ..errors import UserError, one_line


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next(model.parameters()).device


@contextmanager
def device_rules(model: nn.Module, config: PruneConfig) -> Iterator[None]:
    """Within the block, what config.max_memory and config.deterministic ask for.

    Raises:
        UserError: the memory cannot be limited, or the model needs an operation that has no deterministic form.
    """
    with _limited_memory(model, config), _deterministic_algorithms(config.deterministic):
        yield


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Within the block, torch gives the same bits in every run on the same machine.

    Raises:
        UserError: an operation has no deterministic form.
    """
    if not wanted:
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "determinis" not in str(error):
            raise
        raise UserError(f"--deterministic: {one_line(error)}") from error
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def _limited_memory(model: nn.Module, config: PruneConfig) -> Iterator[None]:
    """Within the block, torch allocates no more than config.max_memory on the model's GPU.

    Raises:
        UserError: the model is not on a GPU, or takes that much already.
    """
    limit, device = config.memory_limit, model_device(model)
    if limit is None:
        yield
        return
    if device.type != "cuda":
        raise UserError(f"--max-memory limits the memory of a GPU, but the model is on {device}; leave it out")
    if limit <= torch.cuda.memory_allocated(device):
        taken = torch.cuda.memory_allocated(device) / 2**30
        raise UserError(f"--max-memory {config.max_memory} is less than the {taken:.1f} GiB of the loaded model")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info(device)[1]), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@contextmanager
def fast_attention(model: nn.Module) -> Iterator[None]:
    """Within the block, scaled dot product attention takes cuDNN's kernels first on Hopper and later cards.

    They need 3 % less of a calibration of LLaMA-2-7B on an H200 than torch's own choice. Only for the head sizes they
    were made for, and not under deterministic algorithms, which their backward pass is not.
    """
    device = model_device(model)
    if (
        device.type != "cuda"
        or torch.cuda.get_device_capability(device) < (9, 0)
        or _head_size(model) not in (64, 128)
        or torch.are_deterministic_algorithms_enabled()
    ):
        yield
        return
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield


def _head_size(model: nn.Module) -> int | None:
    """Of an attention head; None where the model has none."""
    config = model.config.get_text_config()
    size, heads = getattr(config, "head_dim", None), getattr(config, "num_attention_heads", None)
    return size or (config.hidden_size // heads if heads else None)


def free_memory(device: torch.device) -> int:
    """Bytes that the process can still allocate on a CUDA device, what torch keeps in reserve included."""
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    reserved = torch.cuda.memory_reserved(device)
    return min(free, limit - reserved) + reserved - torch.cuda.memory_allocated(device)
