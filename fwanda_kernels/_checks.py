"""Checks of arguments, and the `bad` flag: the one home of its codes and of what is done with them.

Shapes, dtypes, devices and host values are checked before anything is touched; each check raises ValueError with one
line: op, argument, expected, got. Values on the device are another matter, as reading them waits for the device. With
`bad`, a selection ORs the codes below into it and goes on. Without `bad`, it raises before it writes anything.
"""

from __future__ import annotations

import contextlib
import numbers
import operator
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP32, INT32, INT64 = (torch.float32,), (torch.int32,), (torch.int64,)
BOOL, UINT8 = (torch.bool,), (torch.uint8,)

BAD_WEIGHT, BAD_SCALE, BAD_KEEP = 1, 2, 4  # csrc/bad.h has them for C++ and CUDA
_BAD_TEXT = {
    BAD_WEIGHT: "weight has NaN or inf values",
    BAD_SCALE: "scale must be finite and >= 0",
    BAD_KEEP: "keep must be in [0, C]",
}


_LEAST, _MOST = -1.797e308, 1.797e308  # beyond lies what float() takes for infinite, or refuses
_EXPONENT = re.compile(r"e[-+]?[\d_]{4}", re.IGNORECASE)  # of a decimal, with four digits or more

# shapes, dtypes, devices and host values


def describe(shape: Sequence, dtypes: tuple[torch.dtype, ...], device) -> str:
    names = "|".join(str(d).removeprefix("torch.") for d in dtypes)
    return f"[{', '.join(map(str, shape))}] {names} on {device}"


def describe_tensor(tensor: Tensor) -> str:
    return describe(tensor.shape, (tensor.dtype,), tensor.device)


def is_plain(value: object) -> bool:
    """Whether a value is a dense tensor of torch's own class: a quick check, after which expect_dense() is not needed.

    expect_dense() also accepts some subclasses.
    """
    if torch.compiler.is_compiling():
        return isinstance(value, Tensor)
    plain = type(value) in PLAIN_TYPES
    return plain and value.layout == torch.strided and not value.is_nested and not value._is_zerotensor()


def expect_dense(op: str, name: str, value: object) -> None:
    """Raise unless the value is a tensor with strides and memory of its own.

    It refuses lists, numpy arrays, sparse and nested tensors, zeros without memory (autograd makes them), and
    subclasses that hold other tensors, such as DTensor.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{op}: {name} must be a torch.Tensor, got {_shown(value)}")
    if torch.compiler.is_compiling():  # inside an autograd function, dynamo reads no layout
        return
    if value.layout != torch.strided or value.is_nested:
        layout = "a nested tensor" if value.is_nested else f"the layout {value.layout}"
        raise ValueError(f"{op}: {name} must be a dense tensor, got {layout}; pass tensor.to_dense()")
    if type(value) not in PLAIN_TYPES and _holds_tensors(value):
        kind = type(value).__name__
        instead = "its to_local() or full_tensor()" if hasattr(value, "full_tensor") else "the tensor that it holds"
        raise ValueError(f"{op}: {name} must be a plain tensor, got a {kind}; pass {instead}")
    if value._is_zerotensor():
        raise ValueError(f"{op}: {name} must have memory, got a tensor of zeros without any; pass tensor.clone()")


def _holds_tensors(value: Tensor) -> bool:
    """Whether a subclass of Tensor holds other tensors: a DTensor, a MaskedTensor, a quantised weight.

    Subclasses without __tensor_flatten__, and AsyncCollectiveTensor (it has trigger_wait), serve an op by their own
    __torch_dispatch__.
    """
    held = hasattr(value, "__tensor_flatten__") and not hasattr(value, "trigger_wait")
    return held or isinstance(value, torch.masked.MaskedTensor)


def expect_values(op: str, name: str, tensor: Tensor) -> None:
    """Raise if the tensor is on the meta device."""
    if tensor.is_meta:
        raise ValueError(f"{op}: {name} is on the meta device and holds no numbers; give it on a real device")


def expect(op: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor):
    """Raise unless the tensor has this shape, one of these dtypes and the device of `like`."""
    expect_dense(op, name, tensor)
    if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != like.device:
        expected = describe(shape, dtypes, like.device)
        raise ValueError(f"{op}: {name} must be {expected}, got {describe_tensor(tensor)}")


def expect_weight(op: str, weight: Tensor, name: str = "weight") -> None:
    expect_dense(op, name, weight)
    if weight.dim() != 2 or weight.dtype not in WEIGHT_DTYPES:
        expected = describe(("R", "C"), WEIGHT_DTYPES, "any device")
        raise ValueError(f"{op}: {name} must be {expected}, got {describe_tensor(weight)}")


def expect_each(
    op: str,
    name: str,
    tensors: Sequence[Tensor],
    shapes: Sequence[tuple],
    dtypes: tuple[torch.dtype, ...],
    like: Tensor,
) -> None:
    """expect() for each tensor of a list that is as long as `shapes`."""
    _expect_each_dense(op, name, tensors)
    device = like.device
    for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != device:
            expect(op, f"{name}[{i}]", tensor, shape, dtypes, like)


def expect_weights(op: str, weights: Sequence[Tensor]) -> list[torch.Size]:
    """expect_weight() for each tensor of the list `weights`, all on one device; returns their shapes."""
    _expect_each_dense(op, "weights", weights)
    device, shapes = weights[0].device, [weight.shape for weight in weights]
    for i, (weight, shape) in enumerate(zip(weights, shapes, strict=True)):
        if len(shape) != 2 or weight.dtype not in WEIGHT_DTYPES or weight.device != device:
            expect_weight(op, weight, f"weights[{i}]")
            expect_device(op, f"weights[{i}]", weight, weights[0])
    return shapes


def _expect_each_dense(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    for i, tensor in enumerate(tensors):
        if not is_plain(tensor):
            expect_dense(op, f"{name}[{i}]", tensor)


def expect_bad(op: str, bad: Tensor | None, like: Tensor, size: int = 1) -> None:
    if bad is not None:
        expect(op, "bad", bad, (size,), INT32, like)


def _is_list(values: object) -> bool:
    if isinstance(values, (str, Mapping)) or not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
        return False
    return getattr(values, "ndim", 1) > 0  # a tensor or an array without dimensions has no length


def expect_mapping(op: str, name: str, value: object, kind: type) -> None:
    """Raise unless the value is a mapping from names to objects of a type."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{op}: {name} must be a mapping from names, got {_shown(value)}")
    for key, entry in value.items():
        if not isinstance(entry, kind):
            raise ValueError(f"{op}: {name}[{key!r}] must be a {kind.__name__}, got {_shown(entry)}")


def expect_lists(op: str, **lists: Sequence) -> None:
    for name, values in lists.items():
        if not _is_list(values):
            raise ValueError(f"{op}: {name} must be a list, got {_shown(values)}")
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        got = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(f"{op}: {', '.join(lists)} must be non-empty lists of one length, got {got}")


def expect_device(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device} like the first, got {tensor.device}")


def expect_tokens(op: str, x: Tensor, token_mask: Tensor | None, name: str = "x") -> None:
    expect_dense(op, name, x)
    if x.dim() < 2 or x.dtype not in WEIGHT_DTYPES:
        expected = describe(("...", "C"), WEIGHT_DTYPES, "any device")
        raise ValueError(f"{op}: {name} must be {expected}, got {describe_tensor(x)}")
    if token_mask is not None:
        expect(op, "token_mask", token_mask, x.shape[:-1], BOOL, x)


def expect_pattern(op: str, n: int, m: int) -> tuple[int, int]:
    """Raise unless n:m is a pattern; returns it as ints."""
    n, m = as_count(op, "n", n), as_count(op, "m", m)
    if not (m >= 1 and 0 <= n <= m):
        raise ValueError(f"{op}: pattern n:m keeps n of m, 0 <= n <= m and m >= 1, got {n}:{m}")
    return n, m


def expect_hessian(op: str, hessian: Tensor) -> None:
    expect_dense(op, "hessian", hessian)
    if hessian.dim() != 2:
        raise ValueError(f"{op}: hessian must be [C, C] float32, got {describe_tensor(hessian)}")
    expect(op, "hessian", hessian, (hessian.shape[0], hessian.shape[0]), FP32, hessian)


def expect_one(op: str, **arguments) -> str:
    """Raise unless exactly one of the arguments is given (not None); returns its name."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) != 1:
        *others, last = arguments
        names = f"{', '.join(others)} and {last}"
        raise ValueError(f"{op}: exactly one of {names} must be given, got {given or 'none'}")
    return given[0]


def expect_sparsity(op: str, sparsity: float | Fraction | str) -> None:
    if torch.compiler.is_compiling():  # torch 2.10 cannot trace fractions; the op itself reads the sparsity again
        return
    try:
        text = str(sparsity)
        # a Fraction of 1e-999999999 has a billion digits
        valid = _EXPONENT.search(text) is None and 0 <= Fraction(text) <= 1
    except (ValueError, ZeroDivisionError):
        valid = False
    if not valid:
        raise ValueError(f"{op}: sparsity must be in [0, 1], got {_number(sparsity)}")


def as_count(op: str, name: str, value: int) -> int:
    """The value as an int, if it is one or a numpy integer; a bool, a float such as 9.0 or a tensor is none.

    Raises:
        ValueError: the value is no integer, or does not fit 64 bits. The caller checks the range.
    """
    if isinstance(value, torch.SymInt) or (type(value) is int and -(2**63) <= value < 2**63):
        return value
    if not isinstance(value, (bool, Tensor)) and hasattr(value, "__index__"):
        with contextlib.suppress(TypeError):  # an array of more than one integer, and numpy's bool
            count = operator.index(value)
            if -(2**63) <= count < 2**63:
                return count
            raise ValueError(f"{op}: {name} must be an integer of at most 64 bits, got one of {count.bit_length()}")
    raise ValueError(f"{op}: {name} must be an integer, got {_shown(value)}")


def expect_number(op: str, name: str, value: float, expected: str) -> None:
    """Raise unless the value is a finite real number; a bool, a string or a tensor is none."""
    real = isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    try:
        fits = real and _LEAST < value < _MOST
    except TypeError:  # no number at all, as NaT of numpy
        fits = False
    if not fits:
        raise ValueError(f"{op}: {name} must be {expected}, got {_number(value)}")


def _number(value: object) -> object:
    """A number as it is in a message; what is none, or is very long, as _shown()."""
    real = isinstance(value, (float, Fraction, str)) or (isinstance(value, int) and value.bit_length() < 64)
    plain = real and not isinstance(value, bool) and len(str(value)) < 80 and str(value).isprintable()
    return value if plain else _shown(value)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def quoted(value: object) -> str:
    """A name as it is in a message; what is none as _shown()."""
    return repr(value)[:80] if isinstance(value, str) else _shown(value)


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {describe_tensor(value)}"
    try:
        text = " ".join(repr(value).split())[:80]
    except ValueError:  # an integer of more than 4,300 digits
        text = "a very long number"
    except Exception:  # a repr() that fails, as of an object that is half made
        text = "a value that cannot be shown"
    return f"{text} ({type(value).__name__})"


# values on the device


def bad_message(op: str, code: int) -> str:
    """Put a `bad` code into words: "<op>: weight has NaN or inf values".

    Args:
        op: how the line begins: the op, or the name of the matrix.
        code: in [1, 7], as the op ORed it into `bad`.

    Raises:
        ValueError: the code is no such integer.
    """
    code = as_count("bad_message", "code", code)
    if not 1 <= code <= sum(_BAD_TEXT):
        raise ValueError(f"bad_message: code must be in [1, {sum(_BAD_TEXT)}], got {code}")
    return f"{op}: " + ", ".join(text for bit, text in _BAD_TEXT.items() if code & bit)


def new_flag(like: Tensor, size: int = 1) -> Tensor:
    """[size] int32 zeros on the device of `like`, to be used as `bad`."""
    return torch.zeros(size, dtype=torch.int32, device=like.device)


def raise_if_bad(op: str, code: int | Tensor) -> None:
    """Raise ValueError if a code is not 0; for a tensor this waits for the device."""
    if code := int(code):
        raise ValueError(bad_message(op, code))


def report_bad(op: str, code: int | Tensor, bad: Tensor | None) -> None:
    """OR a code into `bad`, or raise without one."""
    if bad is None:
        raise_if_bad(op, code)
    else:
        bad.bitwise_or_(code)


def bad_weight(weight: Tensor) -> Tensor:
    """[] bool, True if a value is NaN or inf."""
    return ~weight.isfinite().all()


def bad_scale(scale: Tensor) -> Tensor:
    """[] bool, True if a value is NaN, inf or negative."""
    return ~(scale.isfinite() & (scale >= 0)).all()


def bad_keep(keep: Tensor, cols: int) -> Tensor:
    """[] bool, True if a count is not in [0, C]."""
    return ((keep < 0) | (keep > cols)).any()


def bad_code(weight: Tensor, scale: Tensor, keep: Tensor | None = None) -> Tensor:
    """[] int32 code of the values of a selection."""
    code = bad_weight(weight).to(torch.int32) * BAD_WEIGHT + bad_scale(scale).to(torch.int32) * BAD_SCALE
    return code if keep is None else code + bad_keep(keep, weight.shape[1]).to(torch.int32) * BAD_KEEP
