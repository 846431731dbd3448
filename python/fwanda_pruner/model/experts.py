"""Fused experts as linear layers: one nn.Linear for each slice of the 3-D parameters that hold a layer's experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor, nn

from ..errors import one_line
from .attributes import replaced

_UP, _DOWN = ("gate_up_proj", "up_proj"), "down_proj"
_CHECKED_TOKENS, _ACTIVATION = 16, 4.0  # of the self-check; activations of that size reach the clamps of a gate
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}  # relative, of the norm


class CannotSplit(Exception):
    """Why a module's experts cannot be restated as linear layers; one line."""


@dataclass(frozen=True)
class FusedExperts:
    """The experts of one module, restated.

    Attributes:
        module: holds the 3-D parameters.
        layers: parameter name -> one nn.Linear for each expert, whose weight [R, C] is a view of the parameter.
        forward: computes what module.forward does, by these layers.
    """

    module: nn.Module
    layers: dict[str, list[nn.Linear]] = field(repr=False)
    forward: Callable = field(repr=False)


@dataclass(frozen=True)
class Slice:
    """Where a matrix lies that is one slice of a 3-D parameter: `parameter[index]`, a dotted path and a number."""

    experts: FusedExperts
    parameter: str
    index: int


def count_experts(module: nn.Module) -> int:
    """Experts that a module holds, in 3-D parameters or as a list of modules; 0 where it holds none."""
    if names := _fused_names(module):
        return getattr(module, names[0]).shape[0]
    if isinstance(module, nn.ModuleList):
        holds_matrices = all(any(p.dim() > 1 for p in expert.parameters()) for expert in module)
        return len(module) if holds_matrices else 0
    several = sum(p.dim() > 1 for p in module.parameters()) > 1
    count = getattr(module, "num_experts", 0) if several else 0
    return count if isinstance(count, int) else 0


def split_experts(module: nn.Module) -> FusedExperts | None:
    """The experts of a module as linear layers over its 3-D parameters; None if it holds no fused experts.

    Known by structure: `gate_up_proj` (or `up_proj`) and `down_proj`, [E, R, C] or [E, C, R], with or without biases,
    called with (hidden, indices, weights) in any order or with the tokens of each expert in turn; and a 3-D `weight`
    called with (inputs, sizes). What is found must compute what the module computes on random input.

    Raises:
        CannotSplit: it does not, or the module is called in another way.
    """
    names = _fused_names(module)
    if not names:
        return None
    failures = []
    for transposed, restate in product((False, True), _restatements(module)):
        try:
            layers = {name: _layers(module, name, transposed) for name in names}
            forward, examples = restate(module, layers)
            difference = _difference(module, forward, examples())
        except Exception as error:  # whatever a module raises on input of a shape that it does not take
            failures.append(one_line(error, 120))
            continue
        if difference is None:
            return FusedExperts(module, layers, torch.compiler.disable(forward))
        failures.insert(0, difference)
    failures.append(f"forward({', '.join(_arguments(module))}) is not a known one")
    raise CannotSplit(f"its experts cannot be restated as linear layers ({failures[0]})")


def run_split(experts: Iterable[FusedExperts]) -> AbstractContextManager[None]:
    """Within the block the modules of fused experts compute by their linear layers, so that hooks see each expert."""
    return replaced("forward", {item.module: item.forward for item in experts})


def _fused_names(module: nn.Module) -> list[str]:
    """Names of the 3-D parameters of fused experts, the one that takes the input first."""
    names = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3]
    up = [name for name in _UP if name in names]
    if up and _DOWN in names:
        return [up[0], _DOWN]
    return names if names == ["weight"] and len(_arguments(module)) == 2 else []


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _layers(module: nn.Module, name: str, transposed: bool) -> list[nn.Linear]:
    weights = getattr(module, name).data
    biases = getattr(module, f"{name}_bias", None)
    return [
        _linear(weight.T if transposed else weight, None if biases is None else biases.data[index])
        for index, weight in enumerate(weights)
    ]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer over tensors [R, C] and [R], not over copies of them."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _gate_of(module: nn.Module, gated: bool) -> Callable[[Tensor], Tensor]:
    """What stands between the two projections of an expert."""
    if not gated:
        return module.act_fn
    if hasattr(module, "_apply_gate"):
        return module._apply_gate
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        return lambda h: _clamped_swiglu(h, module.alpha, module.limit)
    return lambda h: module.act_fn(h.chunk(2, dim=-1)[0]) * h.chunk(2, dim=-1)[1]


def _clamped_swiglu(h: Tensor, alpha: float, limit: float) -> Tensor:
    """The gate of GPT-OSS: gate and up alternate."""
    gate, up = h[..., ::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _restatements(module: nn.Module) -> list[Callable]:
    """What the module may compute: functions (module, layers) -> (forward, examples)."""
    if _fused_names(module) == ["weight"]:
        return [lambda m, layers, kind=kind: _grouped(layers, kind) for kind in (list, torch.tensor)]
    count = len(_arguments(module))
    if count == 3:
        ways = product((False, True), (2, 3))
        return [lambda m, layers, way=way: _routed(m, layers, *way) for way in ways]
    return [_in_turn] if count == 1 else []


def _routed(module: nn.Module, layers: dict[str, list[nn.Linear]], dense: bool, rank: int):
    """forward(hidden, indices, weights): each token goes to k experts, and the weighted outputs are summed.

    dense: weights are [T, E], not [T, k]; rank: of the hidden states, [T, H] or [1, T, H].
    """
    up, down = layers.values()
    gate = _gate_of(module, gated=_UP[0] in layers)
    signature = inspect.signature(module.forward)
    _, second, third = signature.parameters
    index_is_third = "ind" in third or "expert" in third

    def forward(*args, **kwargs) -> Tensor:
        hidden, index, weights = signature.bind(*args, **kwargs).arguments.values()
        if index_is_third:
            index, weights = weights, index
        x = hidden.reshape(-1, hidden.shape[-1])
        index, weights = index.reshape(len(x), -1), weights.reshape(len(x), -1)
        if dense:
            weights = weights.gather(1, index)
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=len(up)).tolist()
        groups = x[order // index.shape[1]].split(counts)
        outputs = [down[e](gate(up[e](group))) for e, group in enumerate(groups) if len(group)]
        outputs = torch.cat(outputs)[order.argsort()].view(*index.shape, -1)
        return (outputs * weights[..., None]).sum(1).to(hidden.dtype).view_as(hidden)

    def examples() -> tuple[Tensor, ...]:
        hidden, generator = _hidden(up)
        k = min(2, len(up))
        scores = torch.rand(len(hidden), len(up), generator=generator).to(hidden)
        weights, index = scores.topk(k, dim=-1)
        if dense:
            weights = torch.zeros_like(scores).scatter(1, index, weights)
        hidden = hidden if rank == 2 else hidden[None]
        return (hidden, weights, index) if index_is_third else (hidden, index, weights)

    return forward, examples


def _in_turn(module: nn.Module, layers: dict[str, list[nn.Linear]]):
    """forward(hidden): [E T, H], all tokens for the first expert, then for the next; zeros where one is not routed."""
    up, down = layers.values()
    gate = _gate_of(module, gated=_UP[0] in layers)

    def forward(hidden: Tensor) -> Tensor:
        outputs = []
        for e, x in enumerate(hidden.view(len(up), -1, hidden.shape[-1])):
            rows = x.any(dim=-1).nonzero()[:, 0]
            routed = down[e](gate(up[e](x[rows]))) if len(rows) else x[rows]
            outputs.append(torch.zeros_like(x).index_copy(0, rows, routed))
        return torch.cat(outputs)

    def examples() -> tuple[Tensor, ...]:
        hidden = _hidden(up)[0].repeat(len(up), 1)
        hidden[::3] = 0
        return (hidden,)

    return forward, examples


def _grouped(layers: dict[str, list[nn.Linear]], kind: Callable):
    """forward(inputs, sizes): the rows of the first expert, then those of the next; sizes are of a kind."""
    (experts,) = layers.values()

    def forward(*args, **kwargs) -> Tensor:
        inputs, sizes = (*args, *kwargs.values())
        groups = inputs.split(sizes.tolist() if isinstance(sizes, Tensor) else list(sizes))
        return torch.cat([layer(group) for layer, group in zip(experts, groups, strict=True) if len(group)])

    def examples() -> tuple:
        hidden = _hidden(experts)[0]
        sizes = [0] * len(experts)
        for row in range(len(hidden)):
            sizes[row * row % len(experts)] += 1
        return hidden, kind(sizes)

    return forward, examples


def _hidden(first: list[nn.Linear]) -> tuple[Tensor, torch.Generator]:
    """[T, H] random input that gives activations of a size that matters, and what it was drawn from."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_CHECKED_TOKENS, first[0].in_features, generator=generator).to(first[0].weight)
    size = first[0](x).float().square().mean().sqrt()
    return (x * (_ACTIVATION / size) if size > 0 else x), generator


@torch.no_grad()
def _difference(module: nn.Module, forward: Callable, inputs: tuple) -> str | None:
    """How two forwards differ on an input; None where they agree to rounding."""
    expected, got = module(*inputs), forward(*inputs)
    if expected.shape != got.shape:
        return f"outputs of shape {list(expected.shape)}, restated {list(got.shape)}"
    difference, size = (expected - got).float().norm(), expected.float().norm()
    if difference <= _TOLERANCE[expected.dtype] * size:
        return None
    return f"outputs differ by {float(difference / size):.1g} of their size"
