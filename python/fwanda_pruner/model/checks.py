"""Checks of a checkpoint: a causal language model, floating-point weights, complete, in files that may be read."""

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import UserError, is_lost_connection, one_line, refuse_pipe, shortened, show

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_QUANTIZED_TYPES = ("F8_", "F6_", "F4", "I", "U")  # first characters of the dtypes in a safetensors header
_FLOATS = ("F16", "BF16", "F32", "F64")  # dtypes of weights in a safetensors header
_FLAGS = ("output_hidden_states", "output_attentions", "return_dict", "use_cache")  # of a config
_LONGEST_HEAD, _LONGEST_TAIL = 500, 200  # characters of a foreign error that are kept


# loaded model -> names of the tensors in its files that it does not use
ignored: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


def weight_files(folder: Path, name: str, *, allow_pickle: bool = False) -> list[Path]:
    """The safetensors files from which transformers reads the weights of a folder; none if it reads a pickle.

    Raises:
        UserError: there are none, or only a pickle and no allow_pickle; or the index is broken.
    """
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        return _indexed_files(folder, name)
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles and allow_pickle:
        return []
    if pickles:
        raise UserError(
            f"model {name!r} has no safetensors file, only {pickles[0].name}. Reading such a pickle can run code; "
            f"pass --allow-pickle if you trust it"
        )
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"model {name!r} is an adapter (PEFT); merge it into its model, save that, and use its folder")
    raise UserError(f"model {name!r}: the folder has no weights; expected {_WEIGHTS} or {_INDEX}; download it again")


def check_quantization(config, what: str) -> None:
    """Refuse a model whose configuration says that it is quantised.

    Args:
        config: of the model.
        what: names the model at the beginning of the error.
    """
    for part in (config, getattr(config, "text_config", None)):
        quantization = getattr(part, "quantization_config", None)
        if quantization:
            quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
            method = quantization.get("quant_method") or "an unnamed method"
            raise UserError(
                f"{what} is quantised ({getattr(method, 'value', method)}): "
                "pruning needs floating-point weights; use the original checkpoint or dequantise this one first"
            )


def check_stored_types(files: Iterable[Path], name: str, floats: Collection[str] | None = None) -> None:
    """Refuse weights that are no floats by the headers of the files: newer transformers casts them to float silently.

    Args:
        files: the safetensors files of the model.
        name: of the model.
        floats: names of the floating-point tensors of the loaded model; None: tensors whose names end with `weight`.

    Raises:
        UserError: naming the tensor and its type.
    """
    for file in files:
        for tensor, stored in _header(file, name).items():
            dtype = str(stored.get("dtype"))
            if dtype in _FLOATS or not (tensor.endswith("weight") if floats is None else tensor in floats):
                continue
            if dtype.startswith(_QUANTIZED_TYPES):
                raise UserError(
                    f"model {name!r} is quantised ({tensor} is stored as {dtype}): "
                    "pruning needs floating-point weights; use the original checkpoint"
                )
            raise UserError(
                f"model {name!r}: {tensor} is stored as {show(dtype)}, expected one of {', '.join(_FLOATS)}; use the "
                f"original checkpoint"
            )


def check_packed_types(files: Iterable[Path], names: Iterable[str], name: str) -> None:
    """Refuse packed weights that the files hold in another dtype than uint8: transformers casts them silently.

    Args:
        files: the safetensors files of the model.
        names: of the packed weights.
        name: of the model.
    """
    packed = set(names)
    for file in files:
        for tensor, stored in _header(file, name).items():
            if tensor in packed and stored.get("dtype") != "U8":
                raise UserError(
                    f"model {name!r}: packed weight {tensor} must be stored as U8, got {show(stored.get('dtype'))}; "
                    "write the packed folder again"
                )


def check_generation_config(folder: Path, name: str) -> None:
    """Refuse a generation_config.json that is there but cannot be used: transformers would take its defaults."""
    path = folder / "generation_config.json"
    if not os.path.lexists(path):
        return
    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or one_line(error, 100)
        raise UserError(
            f"model {name!r}: generation_config.json cannot be read ({reason}); take that of the original model, or "
            f"remove the file"
        ) from None
    if not isinstance(settings, dict):
        raise UserError(
            f"model {name!r}: generation_config.json must be a JSON object, got {shortened(text.strip())}; take that "
            f"of the original model, or remove the file"
        )


def check_flags(config, name: str) -> None:
    """Refuse a setting that must be true or false and is neither: the model would fail in its first pass."""
    for part in (config, getattr(config, "text_config", None)):
        for key in _FLAGS:
            value = getattr(part, key, None)
            if value not in (None, True, False):
                raise UserError(
                    f"model {name!r}: {key} in config.json must be true or false, got {show(value)}; take the "
                    f"config.json of the original model"
                )


def refuse_pipes(folder: str | Path) -> None:
    """Refuse a folder of a model that holds a pipe or a device, which reading may never end.

    Raises:
        UserError: naming it.
    """
    with contextlib.suppress(OSError):  # a folder that cannot be listed is refused elsewhere
        for path in Path(folder).iterdir():
            refuse_pipe(path)


def auto_class(config, name: str, trust_remote_code: bool = False) -> type:
    """The class of transformers that loads this causal language model or multimodal model.

    Raises:
        UserError: the model is of another kind, or its architectures are no names.
    """
    architectures = config.architectures or []
    if not isinstance(architectures, list) or not all(isinstance(item, str) for item in architectures):
        raise UserError(
            f"model {name!r}: architectures in config.json must be a list of class names, got {show(architectures)}; "
            f"take the config.json of the original model"
        )
    if config.get_text_config() is not config:
        if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return AutoModelForImageTextToText
        raise UserError(
            f"model {name!r} is multimodal ({config.model_type}) and cannot run on text alone; use a language model"
        )
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    seq2seq = getattr(config, "is_encoder_decoder", False)
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not seq2seq
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)  # such as BertGenerationDecoder
    if not causal or not any(item == own or item.endswith(_CAUSAL_SUFFIXES) for item in architectures or [own]):
        kind = ", ".join(architectures) or config.model_type
        raise UserError(f"model {name!r} is not a causal language model, got {kind}; use a checkpoint of one")
    return AutoModelForCausalLM


def check_loaded(model, info: dict, name: str) -> None:
    """Refuse a model whose files lack weights or hold others than its configuration, or whose weights are integers.

    Args:
        info: what from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True) returned.
    """
    ignored[model] = sorted(info.get("unexpected_keys") or ())
    for item in sorted(info["mismatched_keys"]):
        key, *shapes = [item] if isinstance(item, str) else item  # transformers 4 names no shapes
        problem = "has another shape in its file than its configuration calls for"
        if shapes:
            found, expected = map(list, shapes)
            problem = f"is {found} in its file, and its configuration calls for {expected}"
        raise UserError(f"model {name!r}: {key} {problem}; download or convert it again")
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"model {name!r} is incomplete: its files lack {len(missing)} weights, the first is {missing[0]}"
        )
    for key, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise UserError(f"model {name!r} is quantised ({key} is {parameter.dtype}): use the original checkpoint")


@contextlib.contextmanager
def loading_errors(what: str) -> Iterator[None]:
    """Turn any error inside into a UserError that begins with `what`: transformers raises all kinds for a bad file.

    All lines of the error become one; of a very long one, the middle is left out.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_lost_connection(error):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if len(text) > _LONGEST_HEAD + _LONGEST_TAIL + 5:
            text = f"{text[:_LONGEST_HEAD]} ... {text[-_LONGEST_TAIL:]}"
        hint = "; --trust-remote-code allows it" if "trust_remote_code" in str(error) else ""
        if isinstance(error, ImportError):  # e.g. of the attention that config.json asks for
            hint += "; install that package, or take what needs it out of config.json"
        raise UserError(f"{what} ({text}){hint}") from error


def _indexed_files(folder: Path, name: str) -> list[Path]:
    try:
        files = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [file for file in files if not (folder / file).is_file()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"model {name!r}: {_INDEX} cannot be read ({error}); download it again") from None
    if missing:
        raise UserError(
            f"model {name!r} is incomplete: {_INDEX} lists {missing[0]}, which is not there; download it again"
        )
    return [folder / file for file in files]


def _header(file: Path, name: str) -> dict:
    """The JSON header of a safetensors file: an 8-byte little-endian length, then the text."""
    try:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > file.stat().st_size:
                raise ValueError("it is truncated")
            header = json.loads(stream.read(size))
            return {key: dict(value) for key, value in header.items() if key != "__metadata__"}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"model {name!r}: {file.name} is not a complete safetensors file ({error})") from None
