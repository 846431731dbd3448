"""Mixtures of experts whose weights are fused into 3-D parameters, run as separate linear layers.

Many models keep the matrices of all experts of a layer in one parameter [E, R, C]. Hooks see no single expert there.
`split_experts` builds one nn.Linear for each expert over the same memory and a forward function that uses these layers.
It tries each known way of calling such a module and takes the first one whose output equals the module's.

To support another way of calling experts, write a builder like `_routed` and add it to `_builders`.
"""

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
# The comparison of both forwards: tokens, the size of their activations (large enough to reach the clamps of a gate),
# and the largest difference as a share of the norm of the output.
_CHECKED_TOKENS, _ACTIVATION = 16, 4.0
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


class CannotSplit(Exception):
    """A module holds fused experts that cannot be run as separate linear layers; the message says why, in one line."""


@dataclass(frozen=True)
class FusedExperts:
    """The experts of one module as linear layers.

    Attributes:
        module: the module with the 3-D parameters.
        layers: parameter name -> one nn.Linear for each expert. Its weight [R, C] is a view of the parameter.
        forward: takes the arguments of module.forward and computes the same with these layers.
        transposed: whether the parameters are [E, C, R].
    """

    module: nn.Module
    layers: dict[str, list[nn.Linear]] = field(repr=False)
    forward: Callable = field(repr=False)
    transposed: bool = False

    def follow(self) -> None:
        """Makes the layers views of the parameters again, after these have moved to other memory."""
        for name, layers in self.layers.items():
            weights, biases = getattr(self.module, name).data, getattr(self.module, f"{name}_bias", None)
            for index, layer in enumerate(layers):
                layer.weight.data = weights[index].T if self.transposed else weights[index]
                if biases is not None:
                    layer.bias.data = biases.data[index]


@dataclass(frozen=True)
class Slice:
    """Place of a matrix inside a 3-D parameter.

    Attributes:
        experts: the experts that the matrix belongs to.
        parameter: dotted path of the parameter.
        index: of the expert; the matrix is `parameter[index]`.
    """

    experts: FusedExperts
    parameter: str
    index: int


def count_experts(module: nn.Module) -> int:
    """Count the experts that a module holds, in 3-D parameters or as a list of modules; 0 if it holds none."""
    if names := fused_names(module):
        return getattr(module, names[0]).shape[0]
    if isinstance(module, nn.ModuleList):
        holds_matrices = all(any(p.dim() > 1 for p in expert.parameters()) for expert in module)
        return len(module) if holds_matrices else 0
    several = sum(p.dim() > 1 for p in module.parameters()) > 1
    count = getattr(module, "num_experts", 0) if several else 0
    return count if isinstance(count, int) else 0


def split_experts(module: nn.Module) -> FusedExperts | None:
    """Build linear layers over the 3-D parameters of a module; None if it holds no fused experts.

    Two structures are known, each with or without biases:
    - `gate_up_proj` (or `up_proj`) and `down_proj`, [E, R, C] or [E, C, R]. The module is called with the hidden
      states, the indices and the weights of the chosen experts, or with the tokens of one expert after the other.
    - `weight` [E, R, C] or [E, C, R]. The module is called with the inputs and the number of tokens of each expert.

    The module and the result must give the same output for random input.

    Raises:
        CannotSplit: they do not, or the module is called in another way.
    """
    names = fused_names(module)
    if not names:
        return None
    failures = []
    for transposed, build in product((False, True), _builders(module)):
        try:
            layers = {name: _layers(module, name, transposed) for name in names}
            forward, examples = build(module, layers)
            difference = output_difference(module, forward, examples())
        except Exception as error:  # modules raise anything on input that they do not expect
            failures.append(one_line(error, 120))
            continue
        if difference is None:
            return FusedExperts(module, layers, torch.compiler.disable(forward), transposed)
        failures.insert(0, difference)
    failures.append(f"no known module of experts takes forward({', '.join(_arguments(module))})")
    raise CannotSplit(f"its experts cannot be run as separate linear layers ({failures[0]})")


def run_split(experts: Iterable[FusedExperts]) -> AbstractContextManager[None]:
    """Inside the `with` block, fused experts run as their linear layers, so that hooks see each expert."""
    return replaced("forward", {item.module: item.forward for item in experts})


def fused_names(module: nn.Module) -> list[str]:
    """Names of the 3-D parameters of fused experts, first the one that takes the input; empty if there are none."""
    if type(module).__module__.startswith("torch."):  # such as nn.Bilinear
        return []
    names = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3]
    up = [name for name in _UP if name in names]
    if up and _DOWN in names:
        return [up[0], _DOWN]
    return names if names == ["weight"] and len(_arguments(module)) == 2 else []


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _layers(module: nn.Module, name: str, transposed: bool) -> list[nn.Linear]:
    """One linear layer for each expert of a parameter, [E, C, R] if transposed, else [E, R, C]."""
    weights = getattr(module, name).data
    biases = getattr(module, f"{name}_bias", None)
    return [
        _linear(weight.T if transposed else weight, None if biases is None else biases.data[index])
        for index, weight in enumerate(weights)
    ]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer that shares the memory of weight [R, C] and bias [R]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _gate_of(module: nn.Module, gated: bool) -> Callable[[Tensor], Tensor]:
    """The function between the two projections of an expert: a gate, or the activation alone."""
    if not gated:
        return module.act_fn
    if hasattr(module, "_apply_gate"):
        return module._apply_gate
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        return lambda h: _clamped_swiglu(h, module.alpha, module.limit)
    return lambda h: module.act_fn(h.chunk(2, dim=-1)[0]) * h.chunk(2, dim=-1)[1]


def _clamped_swiglu(h: Tensor, alpha: float, limit: float) -> Tensor:
    """The gate of GPT-OSS, where the columns of gate and up alternate."""
    gate, up = h[..., ::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _builders(module: nn.Module) -> list[Callable]:
    """The known ways to call a module with its number of arguments.

    Each is a function (module, layers) -> (forward, examples): forward computes with the layers what the module may
    compute, and examples() makes arguments to compare both with.
    """
    if fused_names(module) == ["weight"]:
        return [lambda m, layers, kind=kind: _grouped(layers, kind) for kind in (list, torch.tensor)]
    count = len(_arguments(module))
    if count == 3:
        ways = product((False, True), (2, 3))
        return [lambda m, layers, way=way: _routed(m, layers, *way) for way in ways]
    return [_in_turn] if count == 1 else []


def _routed(module: nn.Module, layers: dict[str, list[nn.Linear]], dense: bool, rank: int):
    """forward(hidden, indices, weights), in any order: the weighted sum of the outputs of the k experts of each token.

    Args:
        module: the experts.
        layers: its linear layers.
        dense: whether weights are [T, E], one for each expert, or [T, k], one for each chosen expert.
        rank: dimensions of the hidden states, which are [T, H] or [1, T, H].
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
        scores = torch.rand(len(hidden), len(up), generator=generator, dtype=torch.float32, device="cpu").to(hidden)
        weights, index = scores.topk(k, dim=-1)
        if dense:
            weights = torch.zeros_like(scores).scatter(1, index, weights)
        hidden = hidden if rank == 2 else hidden[None]
        return (hidden, weights, index) if index_is_third else (hidden, index, weights)

    return forward, examples


def _in_turn(module: nn.Module, layers: dict[str, list[nn.Linear]]):
    """forward(hidden) with [E T, H]: all tokens for the first expert, then for the next; zeros if not routed there."""
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
    """forward(inputs, sizes): rows of the first expert, then of the next. `kind` makes sizes from a list of int."""
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
    """Random input [T, H], scaled so that the first layers give activations of size _ACTIVATION; and its generator."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(_CHECKED_TOKENS, first[0].in_features, generator=generator, dtype=torch.float32, device="cpu").to(
        first[0].weight
    )
    size = first[0](x).float().square().mean().sqrt()
    return (x * (_ACTIVATION / size) if size > 0 else x), generator


@torch.no_grad()
def output_difference(module: Callable, forward: Callable, inputs: tuple) -> str | None:
    """How the outputs of module and forward differ; None if they are equal but for rounding."""
    expected, got = module(*inputs), forward(*inputs)
    if expected.shape != got.shape:
        return f"outputs of shape {list(expected.shape)} became {list(got.shape)}"
    difference, size = (expected - got).float().norm(), expected.float().norm()
    if difference <= _TOLERANCE[expected.dtype] * size:
        return None
    return f"outputs differ by {float(difference / size):.1g} of their size"
