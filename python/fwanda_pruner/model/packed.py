"""Layers that hold packed weights (see docs/packed.md): linear layers, and modules of fused experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fwanda_kernels import PackedHeader, check_packed, pack_weight, packed_linear, unpack_mask, unpack_weight

from ..config import DTYPES
from ..errors import UserError, one_line
from .lazy import LazyTensor

EXPERT = re.compile(r"(.+)\.packed_(\w+)_(\d+)")  # path of the module, parameter and index of a packed expert


class PackedLinear(nn.Module):
    """A linear layer that computes with a packed weight.

    Args:
        packed: [N] uint8, as fwanda_kernels.pack_weight() returns it.
        header: of `packed`.
        bias: [R] in the dtype of the weight, or None.
        dense: the nn.Linear or Conv1D that it replaces. It gives up its weight and bias, and unpacked() returns it.
            None: unpacked() makes a new nn.Linear.

    Its buffer `weight` is the packed weight, so a state dict holds it under the name of the dense one. `.to(dtype)`
    packs the values again. Under torch.autocast it multiplies in the dtype of the packed values, and rounds the result
    to the dtype of autocast, which a dense layer returns too.
    """

    def __init__(self, packed: Tensor, header: PackedHeader, bias: nn.Parameter | None, dense: nn.Module | None = None):
        super().__init__()
        self.header = header
        self.out_features, self.in_features = header.shape
        self.register_buffer("weight", packed)
        self.register_parameter("bias", bias)
        if dense is None:
            dense = nn.Linear(self.in_features, self.out_features, bias=bias is not None, device="meta")
        self.trainable = dense.weight.requires_grad
        dense.weight = dense.bias = None
        self._dense = (dense,)  # in a tuple, as its tensors are not those of the model

    def forward(self, input: Tensor) -> Tensor:
        """input [..., C] -> [..., R]."""
        if input.dim() == 1:
            return self.forward(input[None])[0]
        device = input.device.type
        if input.is_meta or not torch.is_autocast_enabled(device):
            return packed_linear(input, self.weight, self.bias, header=self.header)
        y = packed_linear(input.to(self.header.dtype), self.weight, self.bias, header=self.header)
        return y.to(torch.get_autocast_dtype(device))

    def dense_weight(self) -> Tensor:
        """[R, C] in the dtype of the values."""
        return unpack_weight(self.weight, self.header)

    def unpacked(self, *, lazily: bool = False) -> nn.Module:
        """The layer that this one replaces, trainable as it was; lazily, with a frozen LazyTensor as its weight."""
        rows, cols = self.header.shape
        (layer,) = self._dense
        conv1d = isinstance(layer, Conv1D)  # its weight is transposed

        def make() -> Tensor:
            return self.dense_weight().T.contiguous() if conv1d else self.dense_weight()

        shape = (cols, rows) if conv1d else (rows, cols)
        weight = LazyTensor(make, shape, self.header.dtype) if lazily else make()
        layer.weight = nn.Parameter(weight, requires_grad=self.trainable and not lazily)
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
        if _fits(state_dict, f"{prefix}weight", self.header, errors):
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)


class PackedExperts:
    """Mixed into the class of a module whose 3-D parameters are packed, one packed weight for each expert.

    Reading such a parameter unpacks it; nothing keeps the dense tensor after its use.
    """

    packed_headers: dict[str, list[PackedHeader]]
    dense_parameters: dict[str, bool]  # of the dense module, in its order: which parameters were trainable

    def packed_weights(self) -> Iterator[tuple[str, Tensor, PackedHeader]]:
        """Name of the buffer, packed weight and header of each expert."""
        for name, headers in self.packed_headers.items():
            for index, header in enumerate(headers):
                key = expert_key(name, index)
                yield key, getattr(self, key), header

    def __reduce__(self):
        return _empty_experts, (_dense_class(self), tuple(self.packed_headers)), self.__dict__

    def _apply(self, fn: Callable, recurse: bool = True):
        for name, headers in self.packed_headers.items():
            dtype = _dtype_after(fn, headers[0].dtype)
            for index, header in enumerate(headers):
                packed = getattr(self, expert_key(name, index))
                if dtype != header.dtype and not packed.is_meta:
                    packed, headers[index] = _converted(packed, header, dtype)
                    setattr(self, expert_key(name, index), packed)
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        if all([_fits(state_dict, prefix + key, header, errors) for key, _, header in self.packed_weights()]):
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)


def expert_key(name: str, index: int) -> str:
    """Name of the buffer that holds one packed expert of a parameter.

    It does not begin with the name of the parameter, because transformers would take it for the parameter and convert
    it when it saves.
    """
    return f"packed_{name}_{index}"


def put_experts(module: nn.Module, name: str, packed: list[Tensor], headers: list[PackedHeader]) -> None:
    """Replace the 3-D parameter `name` of a module by packed weights, in place."""
    if not isinstance(module, PackedExperts):
        module.packed_headers = {}
        module.dense_parameters = {key: p is not None and p.requires_grad for key, p in module._parameters.items()}
        module.__class__ = _packed_class(type(module), [])
    delattr(module, name)
    for index, weight in enumerate(packed):
        module.register_buffer(expert_key(name, index), weight)
    module.packed_headers[name] = headers
    setattr(type(module), name, _unpacking(name))


def _packed_class(dense: type, names: Iterable[str]) -> type:
    """A class of packed experts, whose parameters of these names are packed."""
    return type(f"Packed{dense.__name__}", (PackedExperts, dense), {name: _unpacking(name) for name in names})


def _dense_class(module: PackedExperts) -> type:
    return type(module).__mro__[2]


def _empty_experts(dense: type, names: tuple[str, ...]) -> PackedExperts:
    """Packed experts without any attribute: what a copy or a pickle begins with."""
    made = _packed_class(dense, names)
    return made.__new__(made)


def _unpacking(name: str) -> property:
    return property(lambda self: _stacking(self, name)())


def _stacking(module: PackedExperts, name: str) -> Callable[[], Tensor]:
    """A function that unpacks the 3-D parameter [E, A, B]."""
    headers = module.packed_headers[name]
    packed = [getattr(module, expert_key(name, index)) for index in range(len(headers))]
    return lambda: torch.stack([unpack_weight(*pair) for pair in zip(packed, headers, strict=True)])


def take_experts(module: PackedExperts, *, lazily: bool = False) -> None:
    """Undo put_experts() for all parameters of a module; lazily, they become frozen LazyTensors."""
    dense, parameters = {}, module.dense_parameters
    for name, headers in module.packed_headers.items():
        make, shape = _stacking(module, name), (len(headers), *headers[0].shape)
        weight = LazyTensor(make, shape, headers[0].dtype) if lazily else make()
        dense[name] = nn.Parameter(weight, requires_grad=parameters[name] and not lazily)
    for key, _, _ in list(module.packed_weights()):
        delattr(module, key)
    module.__class__ = _dense_class(module)
    del module.packed_headers, module.dense_parameters
    for name in parameters:  # in their order of before
        module.register_parameter(name, dense[name] if name in dense else module._parameters.pop(name))


def unpack_layers_(model: nn.Module, *, lazily: bool = False) -> None:
    """Replace the packed layers and experts of a model by dense ones, in place, one after the other.

    Raises:
        UserError: a packed weight is altered; the message names it. Those before it are dense by then.
    """
    for name, module in list(model.named_modules()):
        try:
            if isinstance(module, PackedLinear):
                model.set_submodule(name, module.unpacked(lazily=lazily))
            elif isinstance(module, PackedExperts):
                take_experts(module, lazily=lazily)
        except ValueError as error:
            raise UserError(f"{name} cannot be unpacked: {one_line(error)}; load the model again") from error


def packed_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, PackedHeader]]:
    """Name in the state dict, packed weight and header of each packed matrix of a model."""
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield f"{path}.weight", module.weight, module.header
        elif isinstance(module, PackedExperts):
            for key, packed, header in module.packed_weights():
                yield f"{path}.{key}", packed, header


def expect_dense(model: nn.Module) -> None:
    """Refuse a model with packed weights.

    Raises:
        UserError: naming one of them.
    """
    name = next((name for name, _, _ in packed_weights(model)), None)
    if name is not None:
        raise UserError(f"the model is packed ({name}); make it dense first: unpack_(model)")


def checked(name: str, packed: Tensor, expected: PackedHeader) -> PackedHeader:
    """Header of a packed weight, after a check of its shape, its dtype and the hash of its bytes.

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


def _fits(state_dict: Mapping[str, Tensor], name: str, header: PackedHeader, errors: list[str]) -> bool:
    """Whether a state dict holds no packed weight `name` that is altered or of another model; if it does, says so."""
    packed = state_dict.get(name)
    if isinstance(packed, Tensor) and packed.dtype == torch.uint8 and not packed.is_meta:
        try:
            checked(name, packed, header)
        except UserError as error:
            errors.append(str(error))
            return False
    return True


def _dtype_after(fn: Callable, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a conversion of a module, such as .to() or .half(), gives to values of a dtype.

    Raises:
        UserError: packed weights cannot hold it.
    """
    after = fn(torch.empty(0, dtype=dtype, device="cpu")).dtype
    if str(after).removeprefix("torch.") not in DTYPES:
        raise UserError(
            f"packed weights can be {', '.join(DTYPES)}, not {after}; other weights may be converted by now: "
            f"model.to({dtype}) undoes that. Make the model dense first: unpack_(model)"
        )
    return after


def _converted(packed: Tensor, header: PackedHeader, dtype: torch.dtype) -> tuple[Tensor, PackedHeader]:
    again = pack_weight(unpack_weight(packed, header).to(dtype), unpack_mask(packed))
    return again, PackedHeader(header.shape, dtype, "")
