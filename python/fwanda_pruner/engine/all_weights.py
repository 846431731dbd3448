"""Facts about all weights, gathered one block at a time from any engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from fwanda_kernels import unpack_weight

from ..errors import UserError
from ..model.packed import packed_weights
from ..model.targets import find_blocks
from .engine import Engine

# Settings that change nothing but the rounding of the outputs. How a model is stored is among them.
_WITHOUT_EFFECT = {
    "_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype",
    "quantization_config", "attn_implementation", "_attn_implementation", "experts_implementation",
    "_experts_implementation", "use_cache", "return_dict", "output_attentions", "output_hidden_states", "id2label",
    "label2id", "problem_type", "initializer_range",
}  # fmt: skip
_PIECE = 1 << 16  # values of one sum of a fingerprint: on a CPU, they stay in its cache
_PIECES_AT_ONCE = 64  # on a GPU


def fingerprint(engine: Engine) -> str:
    """sha256 that changes with any value of a parameter, a buffer or a setting that the outputs depend on.

    Settings are those of model.config, without names and versions. Buffers that a checkpoint does not hold count by the
    settings that they are computed from. Floats count by their value in fp32 (fp64 by its own), so that a model has the
    same fingerprint in every dtype that holds its values. The engine, the device and the number of ranks do not matter.
    """
    digest = hashlib.sha256(_settings_text(engine.model.config).encode())
    inside = set(find_blocks(engine.model)[1].modules())
    outside = (item for item in engine.model.named_modules() if item[1] not in inside)
    _add_tensors(digest, [*engine.parameters_outside_blocks(), *_stored_buffers(outside)])
    for index in range(engine.block_count):
        with engine.block(index) as block:
            module = block.module
            _add_tensors(digest, [*module.named_parameters(), *_stored_buffers(module.named_modules())])
    return digest.hexdigest()


def _settings_text(config) -> str:
    """The settings of a model that its outputs depend on, as JSON. None means the same as no such setting."""

    def pick(value):
        if isinstance(value, dict):
            kept = {str(key): pick(item) for key, item in value.items() if item is not None}
            return {key: item for key, item in kept.items() if key not in _WITHOUT_EFFECT}
        return [pick(item) for item in value] if isinstance(value, list | tuple) else value

    return json.dumps(pick(config.to_dict()), sort_keys=True, default=lambda value: type(value).__name__)


def _stored_buffers(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Path and buffer of the modules' own buffers that a state dict holds."""
    for path, module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def _add_tensors(digest, named: Iterable[tuple[str, Tensor]]) -> None:
    """Adds names, shapes and values to a hash. Waits for the device once."""
    sums = []
    for name, tensor in named:
        digest.update(f"{name} {list(tensor.shape)} ".encode())
        sums += _weighted_sums(tensor.detach().reshape(-1))
    if sums:
        digest.update(torch.cat(sums).cpu().numpy().tobytes())


def _weighted_sums(flat: Tensor) -> Iterator[Tensor]:
    """For each _PIECE values the sum of their bits, as integers, times a weight of the position, modulo 2^64.

    The weights are odd, so each sum changes with any single value.
    """
    weights = _weights_of_positions(flat.device)
    for values in flat.split(_PIECE * (1 if flat.device.type == "cpu" else _PIECES_AT_ONCE)):
        bits = _bits(values)
        whole = len(bits) // _PIECE * _PIECE
        if whole:
            yield (bits[:whole].view(-1, _PIECE) * weights).sum(1)
        if rest := len(bits) - whole:
            yield (bits[whole:] * weights[:rest]).sum(0, keepdim=True)


def _bits(values: Tensor) -> Tensor:
    if values.is_complex():
        return _bits(torch.view_as_real(values).reshape(-1))
    if values.dtype == torch.float64:
        return values.view(torch.int64)
    return values.float().view(torch.int32) if values.is_floating_point() else values.long()


@cache
def _weights_of_positions(device: torch.device) -> Tensor:
    """[_PIECE] odd int64 that look random: the mixing steps of SplitMix64."""
    x = torch.arange(1, _PIECE + 1, device=device) * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)) | 1


def check_finite(engine: Engine) -> None:
    """Refuses parameters with NaN or inf.

    Raises:
        UserError: naming the first such parameter.
    """
    _refuse_not_finite(engine.parameters_outside_blocks())
    for index in range(engine.block_count):
        with engine.block(index) as block:
            _refuse_not_finite((f"{engine.block_path(index)}.{n}", p) for n, p in block.module.named_parameters())
            for name, packed, header in packed_weights(block.module):  # one at a time is dense
                _refuse_not_finite([(f"{engine.block_path(index)}.{name}", unpack_weight(packed, header))])


def _refuse_not_finite(named: Iterable[tuple[str, Tensor]]) -> None:
    parameters = dict(named)
    finite = torch.stack([p.detach().isfinite().all() for p in parameters.values()]).tolist() if parameters else []
    for name, good in zip(parameters, finite, strict=True):
        if not good:
            raise UserError(f"{name} has NaN or inf values: the checkpoint is broken, or too large for its dtype")


@dataclass(frozen=True)
class WeightCounts:
    """Counts over a whole model; tied parameters count once.

    Attributes:
        parameters, zeros: of the whole model.
        block_parameters: of the decoder blocks.
        target_parameters, target_zeros: of the targets, and of packed matrices.
    """

    parameters: int
    zeros: int
    block_parameters: int
    target_parameters: int
    target_zeros: int


def count_weights(engine: Engine) -> WeightCounts:
    """Counts parameters and zeros."""
    outside = [p for _, p in engine.parameters_outside_blocks()]
    inside_size = inside_zeros = target_size = target_zeros = 0
    counted: set[int] = set()  # parameters that several blocks share count once
    for index in range(engine.block_count):
        with engine.block(index) as block:
            parameters = [p for p in block.module.parameters() if id(p) not in counted]
            counted |= {id(p) for p in parameters}
            weights = list(block.weights.values())
            inside_size += sum(p.numel() for p in parameters)
            inside_zeros += sum(count_zeros(parameters))
            target_size += sum(w.numel() for w in weights)
            target_zeros += sum(count_zeros(weights))
            for _, packed, header in packed_weights(block.module):
                size, zeros = header.shape[0] * header.shape[1], *count_zeros([unpack_weight(packed, header)])
                inside_size, inside_zeros = inside_size + size, inside_zeros + zeros
                target_size, target_zeros = target_size + size, target_zeros + zeros
    return WeightCounts(
        parameters=inside_size + sum(p.numel() for p in outside),
        zeros=inside_zeros + sum(count_zeros(outside)),
        block_parameters=inside_size,
        target_parameters=target_size,
        target_zeros=target_zeros,
    )


def count_zeros(tensors: Iterable[Tensor]) -> list[int]:
    """Zeros of each tensor; waits for the device once."""
    tensors = list(tensors)
    if not tensors:
        return []
    return torch.stack([tensor.numel() - torch.count_nonzero(tensor) for tensor in tensors]).tolist()
