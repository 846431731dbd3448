"""Lets from_pretrained() of transformers load packed folders, by the two classes registered here.

`import fwanda_pruner` registers them as soon as transformers itself is imported (see register_packed.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fwanda_kernels import PackedHeader

from ..config import DTYPES
from ..errors import UserError, show
from ..notes import warn
from ..register_packed import METHOD
from .packed import EXPERT, PackedLinear, checked, packed_weights, put_experts, unpack_layers_

try:
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping
except ImportError:  # transformers 4 converts nothing
    core_model_loading = None

_VERSION = 1  # of quantization_config in config.json
_MOST_BYTES = 1 << 40  # of one packed weight
_AGAIN = "config.json is altered; write the packed folder again"


class PackedConfig(QuantizationConfigMixin):
    """`quantization_config` of a packed model.

    Args:
        packed_bytes: size of each packed weight, by its name in the state dict.
        dtype: of their values, such as "bfloat16".
        version: of these settings.
    """

    def __init__(self, packed_bytes=None, dtype=None, version=None, **_ignored):
        self.quant_method = METHOD
        if version != _VERSION:
            raise UserError(
                f"the model is packed in version {show(version)}, this fwanda reads version {_VERSION}; pack the model "
                f"again"
            )
        if dtype not in DTYPES:
            raise UserError(
                f"the dtype of a packed model must be one of {', '.join(DTYPES)}, got {show(dtype)}; {_AGAIN}"
            )
        if not isinstance(packed_bytes, dict) or not packed_bytes:
            raise UserError(f"packed_bytes of a packed model must name its weights, got {show(packed_bytes)}; {_AGAIN}")
        for name, size in packed_bytes.items():
            if type(size) is not int or not 0 < size < _MOST_BYTES:
                raise UserError(f"packed_bytes must be a number of bytes, got {show(size)} for {name}; {_AGAIN}")
        self.packed_bytes, self.dtype, self.version = packed_bytes, dtype, version

    def to_dict(self) -> dict:
        return {
            "quant_method": METHOD,
            "version": self.version,
            "dtype": self.dtype,
            "packed_bytes": dict(self.packed_bytes),
        }


class PackedQuantizer(HfQuantizer):
    """Replaces layers by packed ones before transformers loads the weights, and checks the weights afterwards."""

    requires_calibration = False
    dense_conversions = None  # `_weight_conversions` that the model gets when it becomes dense; None: it had none
    _of_packed: tuple[list, list] = [], []

    def update_dtype(self, dtype):
        stored = getattr(torch, self.quantization_config.dtype)
        if dtype not in (None, "auto", stored, torch.get_default_dtype()):
            warn(f"the packed weights are {stored} and load as such, not as {dtype}; use model.to({dtype}) afterwards")
        return stored

    update_torch_dtype = update_dtype  # its name in transformers 4

    def _process_model_before_weight_loading(self, model, **_kwargs):
        dtype = getattr(torch, self.quantization_config.dtype)
        experts: dict[tuple[str, str], dict[int, int]] = {}
        for key, size in self.quantization_config.packed_bytes.items():
            if match := EXPERT.fullmatch(key):
                experts.setdefault((match[1], match[2]), {})[int(match[3])] = size
            else:
                _put_linear(model, key, size, dtype)
        for (path, name), sizes in experts.items():
            module = _module(model, path)
            parameter = module._parameters.get(name)
            if parameter is None or parameter.dim() != 3 or sorted(sizes) != list(range(len(parameter))):
                raise UserError(
                    f"{path}.{name} is packed as {len(sizes)} experts, which the model does not have; the files are of "
                    f"different models"
                )
            shape = tuple(parameter.shape[1:])
            packed = [_empty(sizes[index]) for index in range(len(sizes))]
            put_experts(module, name, packed, [PackedHeader(shape, dtype, "")] * len(packed))
        return model

    def update_weight_conversions(self, weight_conversions, *model):
        """Keeps the conversions of what is packed, which give dense files their names; packed files need none of them.

        model: only newer versions of transformers pass it.
        """
        names = list(self.quantization_config.packed_bytes)
        rest, of_layers = _split_conversions(weight_conversions, names)
        experts = [match for match in map(EXPERT.fullmatch, names) if match]
        ends = {f"{match[1].rpartition('.')[2]}.{match[2]}" for match in experts}  # such as experts.down_proj
        of_experts = [
            conversion
            for conversion in rest
            if any(target.replace("\\", "").endswith(tuple(ends)) for target in conversion.target_patterns)
        ]
        self._of_packed = of_experts, of_layers
        return super().update_weight_conversions(rest, *model)

    def _process_model_after_weight_loading(self, model, **_kwargs):
        used = getattr(model, "_weight_conversions", None)
        if used is not None:  # transformers 5, for the next save
            of_experts, of_layers = self._of_packed
            used += [item for item in of_experts if not any(item is other for other in used)]
            self.dense_conversions = used + of_layers
        for name, packed, header in packed_weights(model):
            checked(name, packed, header)
        model.is_quantized = False  # else transformers forbids .half() and .float(), which packed layers obey
        return model

    def get_state_dict_and_metadata(self, model, *_args, **_kwargs):
        """Updates the sizes in the config, which .to(dtype) may have changed since the model was loaded."""
        self.quantization_config = model.config.quantization_config = _config_of(model)
        return None, {}

    def is_serializable(self, *_args, **_kwargs) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model, dtype=None):
        unpack_layers_(model)
        return model


def mark_packed(model: nn.Module) -> None:
    """Say in the config of a model that it is packed."""
    quantizer = PackedQuantizer(_config_of(model), pre_quantized=True)
    quantizer.dense_conversions = vars(model).get("_weight_conversions")
    conversions = _conversions_of(model)
    if conversions:
        model._weight_conversions = _split_conversions(conversions, quantizer.quantization_config.packed_bytes)[0]
    model.hf_quantizer = quantizer
    model.config.quantization_config = quantizer.quantization_config


def unmark_packed(model: nn.Module) -> None:
    """Undo mark_packed(), and what from_pretrained() sets on a packed model."""
    quantizer = vars(model).get("hf_quantizer")
    if isinstance(quantizer, PackedQuantizer):
        _set_conversions(model, quantizer.dense_conversions)
    for owner, name in (
        (model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config"),
        (model.config, "_is_quantized"), (model.config, "_pre_quantization_dtype"),
    ):  # fmt: skip
        if name in vars(owner):
            delattr(owner, name)


@contextmanager
def named_as(form: str, model: nn.Module) -> Iterator[None]:
    """Inside the block, transformers saves the tensors of a model under the names that files in a form have.

    Args:
        form: `dense` or `packed`.
        model: a model in either form.
    """
    quantizer, before = vars(model).get("hf_quantizer"), vars(model).get("_weight_conversions")
    if isinstance(quantizer, PackedQuantizer):
        _set_conversions(model, quantizer.dense_conversions)
    if form == "packed":
        names = [name for name, p in model.named_parameters() if p.dim() == 2]
        names += [name for name, _, _ in packed_weights(model)]
        _set_conversions(model, _split_conversions(_conversions_of(model), names)[0])
    try:
        yield
    finally:
        _set_conversions(model, before)


def _set_conversions(model: nn.Module, conversions: list | None) -> None:
    vars(model).pop("_weight_conversions", None)
    if conversions is not None:
        model._weight_conversions = conversions


def register() -> None:
    """Register both classes with transformers; once is enough."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(PackedConfig)
        register_quantizer(METHOD)(PackedQuantizer)


def expect_one_dtype(dtypes: set[torch.dtype]) -> None:
    """Refuse to pack matrices of several dtypes, or none at all."""
    if len(dtypes) != 1:
        found = ", ".join(sorted(map(str, dtypes))) or "no matrix"
        raise UserError(f"the matrices to pack must have one dtype, got {found}; convert the model: model.to(dtype)")


def _config_of(model: nn.Module) -> PackedConfig:
    sizes, dtypes = {}, set()
    for name, packed, header in packed_weights(model):
        sizes[name] = len(packed)
        dtypes.add(header.dtype)
    expect_one_dtype(dtypes)
    return PackedConfig(sizes, str(dtypes.pop()).removeprefix("torch."), _VERSION)


def _conversions_of(model: nn.Module) -> list:
    """What transformers 5 does to the names and tensors of a model when it saves it, as it decides then."""
    if core_model_loading is None:
        return []
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        return conversions
    left_out = getattr(core_model_loading, "PrefixChange", ())  # the first versions have none
    return [item for item in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(item, left_out)]


def _split_conversions(conversions: Iterable, names: Iterable[str]) -> tuple[list, list]:
    """Conversions that leave packed linear layers as they are, and those that would join or cut them in files.

    Args:
        conversions: of transformers 5.
        names: of packed weights in the state dict.
    """
    layers = [name for name in names if not EXPERT.fullmatch(name)]
    rest, of_layers = [], []
    for item in conversions:
        saving = item.reverse_transform() if isinstance(item, core_model_loading.WeightConverter) else None
        hits = saving is not None and any(saving.rename_source_key(name)[1] is not None for name in layers)
        (of_layers if hits else rest).append(item)
    return rest, of_layers


def _put_linear(model: nn.Module, key: str, size: int, dtype: torch.dtype) -> None:
    path = key.removesuffix(".weight")
    layer = _module(model, path)
    if not isinstance(layer, (nn.Linear, Conv1D)):
        raise UserError(f"{key} is packed, but {path} is a {type(layer).__name__}; the files are of different models")
    rows, cols = layer.weight.shape[::-1] if isinstance(layer, Conv1D) else layer.weight.shape
    header = PackedHeader((rows, cols), dtype, "")
    model.set_submodule(path, PackedLinear(_empty(size), header, layer.bias, layer))


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise UserError(
            f"the model has no module {path}, which its packed files name; the files have been altered"
        ) from None


def _empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")
