"""Packed layers: linear layers and fused experts that hold packed weights (see docs/packed.md) in place of dense ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from fwanda_kernels import PackedHeader, check_packed, pack_weight, packed_linear, unpack_weight
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import UserError
from .arguments import expect_model
from .cache import size_text
from .targets import Target, find_targets

DENSEST = 0.85  # denser matrices gain nothing, and stay as they are


class PackedLinear(nn.Module):
    """A linear layer that computes with a packed weight.

    Args:
        packed: [N] uint8, as fwanda_kernels.pack_weight() returns it.
        header: of `packed`.
        bias: [R] in the dtype of the weight, or None.
        conv1d: it stands for GPT-2's Conv1D, whose dense weight is transposed.

    Its buffer `weight` is the packed weight, so a state dict holds it under the name of the dense one. `.to(dtype)` packs
    the values again.
    """

    def __init__(self, packed: Tensor, header: PackedHeader, bias: nn.Parameter | None, *, conv1d: bool = False):
        super().__init__()
        self.header, self.conv1d = header, conv1d
        self.out_features, self.in_features = header.shape
        self.register_buffer("weight", packed)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., R]."""
        return packed_linear(x, self.weight, self.bias, header=self.header)

    def dense_weight(self) -> Tensor:
        """[R, C] in the dtype of the values."""
        return unpack_weight(self.weight, self.header)

    def unpacked(self) -> nn.Module:
        """The dense layer that this one stands for."""
        rows, cols = self.header.shape
        weight = self.dense_weight()
        with torch.device("meta"):
            layer = Conv1D(rows, cols) if self.conv1d else nn.Linear(cols, rows, bias=self.bias is not None)
        layer.weight = nn.Parameter(weight.T.contiguous() if self.conv1d else weight, requires_grad=False)
        layer.bias = self.bias
        return layer.train(self.training)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.header.dtype}"

    def _apply(self, fn: Callable, recurse: bool = True):
        dtype = _dtype_after(fn, self.header.dtype)
        if dtype != self.header.dtype and not self.weight.is_meta:
            self.weight, self.header = _converted(self.weight, self.header, dtype)
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        packed = state_dict.get(f"{prefix}weight")
        if packed is not None and not packed.is_meta:
            try:
                self.header = checked(f"{prefix}weight", packed, self.header)
            except UserError as error:
                errors.append(str(error))
                return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)


class PackedExperts:
    """Mixed into the class of a module whose 3-D parameters are packed, one packed weight for each expert.

    Reading such a parameter unpacks it for as long as it is in use.
    """

    packed_headers: dict[str, list[PackedHeader]]

    def packed_weights(self) -> Iterator[tuple[str, Tensor, PackedHeader]]:
        """Name of the buffer, packed weight and header of each expert."""
        for name, headers in self.packed_headers.items():
            for index, header in enumerate(headers):
                key = expert_key(name, index)
                yield key, getattr(self, key), header

    def _apply(self, fn: Callable, recurse: bool = True):
        for name, headers in self.packed_headers.items():
            dtype = _dtype_after(fn, headers[0].dtype)
            for index, header in enumerate(headers):
                packed = getattr(self, expert_key(name, index))
                if dtype != header.dtype and not packed.is_meta:
                    packed, headers[index] = _converted(packed, header, dtype)
                    setattr(self, expert_key(name, index), packed)
        return super()._apply(fn, recurse)


def expert_key(name: str, index: int) -> str:
    """Name of the buffer that holds one packed expert of a parameter."""
    return f"{name}_packed_{index}"


def put_experts(module: nn.Module, name: str, packed: list[Tensor], headers: list[PackedHeader]) -> None:
    """Replace the 3-D parameter `name` of a module by packed weights, in place."""
    delattr(module, name)
    for index, weight in enumerate(packed):
        module.register_buffer(expert_key(name, index), weight)
    if not isinstance(module, PackedExperts):
        module.packed_headers = {}
        module.__class__ = type(f"Packed{type(module).__name__}", (PackedExperts, type(module)), {})
    module.packed_headers[name] = headers
    setattr(type(module), name, property(lambda self: _stacked(self, name)))


def _stacked(module: PackedExperts, name: str) -> Tensor:
    """The 3-D parameter [E, A, B], unpacked."""
    headers = module.packed_headers[name]
    return torch.stack([
        unpack_weight(getattr(module, expert_key(name, index)), header) for index, header in enumerate(headers)
    ])  # fmt: skip


def _take_experts(module: PackedExperts) -> None:
    """Undo put_experts() for all parameters of a module."""
    dense = {name: nn.Parameter(_stacked(module, name), requires_grad=False) for name in module.packed_headers}
    for key, _, _ in list(module.packed_weights()):
        delattr(module, key)
    module.__class__ = type(module).__mro__[2]
    del module.packed_headers
    for name, parameter in dense.items():
        module.register_parameter(name, parameter)


def pack_(model: nn.Module, *, force: bool = False) -> nn.Module:
    """Replace the pruned matrices of a model by packed ones, in place, one after the other.

    Args:
        model: a pruned causal language model. Removed weights are those that are +0.0.
        force: pack all matrices, even if more than 85 % of their weights are not zero.

    Returns:
        The model. Its config says that it is packed, so save_pretrained() writes a packed folder.

    Raises:
        UserError: no matrix is sparse enough, and not `force`; or the model has no matrices that can be pruned.
    """
    from .packed_quantizer import mark_packed

    expect_model(model)
    targets = find_targets(model)[0]
    chosen = targets if force else _sparse(targets)
    if not chosen:
        weights = sum(target.weight.numel() for target in targets)
        size = targets[0].weight.element_size()
        raise UserError(
            f"the model is dense: no matrix has more than {1 - DENSEST:.0%} zeros, so its {len(targets)} matrices would "
            f"take {size_text(int(weights * (size + 1 / 8)))} packed and take {size_text(weights * size)} now; prune it "
            f"first, or pack it anyway with --force (force=True in Python)"
        )
    done = set()
    for target in chosen:
        key = target.parameter
        if key not in done:
            done.add(key)
            _pack_target(model, target)
    mark_packed(model)
    return model


def unpack_(model: nn.Module) -> nn.Module:
    """Replace the packed matrices of a model by dense ones, in place, one after the other; returns the model."""
    from .packed_quantizer import unmark_packed

    expect_model(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, module.unpacked())
        elif isinstance(module, PackedExperts):
            _take_experts(module)
    unmark_packed(model)
    return model


def packed_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, PackedHeader]]:
    """Name in the state dict, packed weight and header of each packed matrix of a model."""
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield f"{path}.weight", module.weight, module.header
        elif isinstance(module, PackedExperts):
            for key, packed, header in module.packed_weights():
                yield f"{path}.{key}", packed, header


def checked(name: str, packed: Tensor, expected: PackedHeader) -> PackedHeader:
    """The header of a packed weight that has the expected shape and dtype, and the bytes of its hash.

    Raises:
        UserError: naming the tensor.
    """
    try:
        header = check_packed(packed)
    except ValueError as error:
        raise UserError(f"{name}: {str(error).partition(': ')[2]}; write the packed folder again") from error
    if (header.shape, header.dtype) != (expected.shape, expected.dtype):
        raise UserError(
            f"{name} is {list(header.shape)} {header.dtype}, the model needs {list(expected.shape)} {expected.dtype}; "
            f"the files are of different models"
        )
    return header


def _sparse(targets: list[Target]) -> list[Target]:
    """The targets that are sparse enough; of fused experts, all of a parameter if they are on average."""
    kept: dict[str, list[int]] = {}
    for target in targets:
        counts = kept.setdefault(target.parameter, [0, 0])
        counts[0] += int((target.weight != 0).sum())
        counts[1] += target.weight.numel()
    return [target for target in targets if kept[target.parameter][0] <= DENSEST * kept[target.parameter][1]]


@torch.no_grad()
def _pack_target(model: nn.Module, target: Target) -> None:
    """Replace the module of a target, or the parameter of fused experts that it is a slice of."""
    if target.slice_of is None:
        layer = target.module
        packed = pack_weight(target.weight)
        header = PackedHeader(tuple(target.shape), target.weight.dtype, "")
        new = PackedLinear(packed, header, layer.bias, conv1d=isinstance(layer, Conv1D))
        model.set_submodule(target.name, new.train(layer.training))
        return
    module, name = target.slice_of.experts.module, target.slice_of.parameter.rpartition(".")[2]
    parameter = getattr(module, name)
    packed = [pack_weight(weight) for weight in parameter]
    header = PackedHeader(tuple(parameter.shape[1:]), parameter.dtype, "")
    put_experts(module, name, packed, [header] * len(packed))


def _dtype_after(fn: Callable, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a conversion of a module, such as .to() or .half(), gives to values of a dtype."""
    return fn(torch.empty(0, dtype=dtype, device="cpu")).dtype


def _converted(packed: Tensor, header: PackedHeader, dtype: torch.dtype) -> tuple[Tensor, PackedHeader]:
    from fwanda_kernels import unpack_mask

    again = pack_weight(unpack_weight(packed, header).to(dtype), unpack_mask(packed))
    return again, PackedHeader(header.shape, dtype, "")
