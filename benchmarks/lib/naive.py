"""The published pipelines in plain torch, as the baseline of bench_prune.py.

They read one window at a time, sum in fp32 inside hooks, and sort each matrix. Nothing is made slow on purpose. The
blocks of the model must be `model.model.layers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

# Method -> the allocation of its paper.
ALLOCATIONS = {
    "magnitude": "layer",
    "wanda": "uniform",
    "fwanda": "row",
    "sparsegpt": "uniform",
    "fsparsegpt": "uniform",
}
_FLOOR, _POWER, _DAMPING, _COLUMNS = 1e-8, 0.5, 0.01, 128
Phase = Callable[[str], AbstractContextManager]
Linears = dict[str, nn.Linear]


def linears(model: nn.Module) -> Linears:
    """The linear layers of the blocks by name."""
    return {
        f"model.layers.{index}.{name}": module
        for index, block in enumerate(model.model.layers)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    }


def prune(model: nn.Module, tokens: Tensor, method: str, sparsity: float, phase: Phase) -> None:
    """Prune in place.

    Args:
        model: a causal language model in eval mode.
        tokens: [S, L] int64.
        method: a key of ALLOCATIONS.
        sparsity: fraction removed.
        phase: called with the name of each phase; returns a context manager that runs around it.
    """
    layers, row_weights = linears(model), {}
    if method == "magnitude":
        with phase("prune"):
            for module in layers.values():
                _by_threshold(module.weight.data, sparsity)
        return
    if method != "sparsegpt":
        with phase("calibrate"):
            x2, g2 = calibrate(model, tokens, layers, backward=needs_fisher(method))
    if needs_fisher(method):
        row_weights = {name: (g / tokens.numel()).clamp(min=_FLOOR) ** _POWER for name, g in g2.items()}
    if method.endswith("sparsegpt"):
        with phase("prune"):
            sparsegpt(model, tokens, sparsity, row_weights)
        return
    with phase("budgets"):
        if method == "fwanda":
            keep = {name: allocate(row_weights[name], m.weight.shape[1], sparsity) for name, m in layers.items()}
        else:
            keep = {name: _uniform(module.weight, sparsity) for name, module in layers.items()}
    with phase("prune"):
        for name, module in layers.items():
            _by_row(module.weight.data, x2[name].sqrt(), keep[name])


def needs_fisher(method: str) -> bool:
    """Whether the method needs a backward pass."""
    return method in ("fwanda", "fsparsegpt")


def calibrate(model: nn.Module, tokens: Tensor, layers: Linears, *, backward: bool) -> tuple[dict, dict]:
    """Sums of squares by name: of every input, [C] fp32; if `backward`, also of every output gradient, [R] fp32."""
    x2 = {name: torch.zeros(m.in_features, device=m.weight.device) for name, m in layers.items()}
    g2 = {name: torch.zeros(m.out_features, device=m.weight.device) for name, m in layers.items()}

    def add_input(name):
        def hook(_module, inputs, _output):
            x2[name].add_(inputs[0].detach().float().pow(2).sum((0, 1)))

        return hook

    def add_gradient(name):
        def hook(_module, _inputs, gradients):
            g2[name].add_(gradients[0].float().pow(2).sum((0, 1)))

        return hook

    handles = [module.register_forward_hook(add_input(name)) for name, module in layers.items()]
    if backward:
        handles += [module.register_full_backward_hook(add_gradient(name)) for name, module in layers.items()]
    try:
        with activations_only(model) if backward else torch.no_grad():
            for window in tokens:
                logits = model(input_ids=window[None], use_cache=False).logits
                if backward:
                    labels = window[1:]
                    nn.functional.cross_entropy(logits[0, :-1].float(), labels, reduction="sum").backward()
    finally:
        for handle in handles:
            handle.remove()
    return x2, g2


@contextmanager
def activations_only(model: nn.Module):
    """Asks for the gradient of the embedding's output, and for none of a parameter."""
    model.requires_grad_(False)
    handle = model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: out.requires_grad_(True))
    try:
        yield
    finally:
        handle.remove()
        model.requires_grad_(True)


def allocate(v: Tensor, cols: int, sparsity: float) -> Tensor:
    """[R] int64: weights kept of each row, in proportion to v, within [1, cols]; the rest by largest remainders.

    Source: the F-Wanda paper, algorithm 2. It clamps both sides at once, which can lose a part of the budget.
    """
    v, total = v.double(), math.ceil((1 - sparsity) * v.numel() * cols)
    keep, free = torch.zeros_like(v), torch.ones_like(v, dtype=torch.bool)
    while True:
        left = total - keep[~free].sum()
        share = left * v / v[free].sum()
        out = free & ((share > cols) | (share < 1))
        if not out.any():
            break
        keep[out] = share[out].clamp(1, cols)
        free &= ~out
    keep[free] = share[free].floor()
    missing = min(max(int(total - keep.sum()), 0), int(free.sum()))
    remainder = torch.where(free, share - share.floor(), -1.0)
    keep[remainder.topk(missing).indices] += 1
    return keep.long()


def _uniform(weight: Tensor, sparsity: float) -> Tensor:
    rows, cols = weight.shape
    return torch.full((rows,), cols - int(cols * sparsity), device=weight.device)


def _by_row(weight: Tensor, norm: Tensor, keep: Tensor) -> None:
    order = torch.argsort(weight.float().abs() * norm, dim=1, stable=True)
    removed = torch.arange(weight.shape[1], device=weight.device) < (weight.shape[1] - keep)[:, None]
    weight[torch.zeros_like(removed).scatter_(1, order, removed)] = 0


def _by_threshold(weight: Tensor, sparsity: float) -> None:
    order = torch.argsort(weight.abs().flatten(), stable=True)
    weight.view(-1)[order[: int(weight.numel() * sparsity)]] = 0


@torch.no_grad()
def sparsegpt(model: nn.Module, tokens: Tensor, sparsity: float, row_weights: dict[str, Tensor]) -> None:
    """For each block: Hessians of the inputs, the walk over each matrix, and the block again for its outputs.

    row_weights: name -> [R] multiplier of the selection score; empty for SparseGPT itself.
    """
    blocks = model.model.layers
    hidden, arguments = _block_inputs(model, tokens)
    for index, block in enumerate(blocks):
        layers = {name: m for name, m in block.named_modules() if isinstance(m, nn.Linear)}
        sizes = {name: (m.in_features, m.in_features) for name, m in layers.items()}
        hessians = {name: torch.zeros(size, device=tokens.device) for name, size in sizes.items()}

        def add_input(name, hessians=hessians):
            def hook(_module, inputs, _output):
                x = inputs[0].flatten(0, 1).float()
                hessians[name].addmm_(x.T, x)

            return hook

        handles = [module.register_forward_hook(add_input(name)) for name, module in layers.items()]
        for x in hidden:
            block(x, **arguments)
        for handle in handles:
            handle.remove()
        for name, module in layers.items():
            weight = row_weights.get(f"model.layers.{index}.{name}")
            module.weight.data = obs_walk(module.weight.float(), hessians.pop(name), sparsity, weight).to(
                module.weight.dtype
            )
        for i, x in enumerate(hidden):
            output = block(x, **arguments)
            hidden[i] = output[0] if isinstance(output, tuple) else output


def obs_walk(weight: Tensor, hessian: Tensor, sparsity: float, row_weight: Tensor | None) -> Tensor:
    """The pruned and updated weight [R, C] fp32. The Hessian [C, C] fp32 is overwritten."""
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1
    weight[:, dead] = 0
    hessian.diagonal().add_(_DAMPING * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True)
    for start in range(0, weight.shape[1], _COLUMNS):
        block = weight[:, start : start + _COLUMNS].clone()
        end = start + block.shape[1]
        local, errors = factor[start:end, start:end], torch.zeros_like(block)
        score = (block / local.diagonal()) ** 2
        score = score if row_weight is None else score * row_weight[:, None]
        removed = score <= score.flatten().kthvalue(max(1, int(score.numel() * sparsity))).values
        for column in range(block.shape[1]):
            errors[:, column] = block[:, column] * removed[:, column] / local[column, column]
            block[:, column:] -= errors[:, column : column + 1] * local[column, column:]
            block[removed[:, column], column] = 0
        weight[:, start:end] = block
        weight[:, end:] -= errors @ factor[start:end, end:]
    return weight


class _Captured(Exception):
    """Ends a forward pass at the first block."""


def _block_inputs(model: nn.Module, tokens: Tensor) -> tuple[list[Tensor], dict]:
    """The hidden state of every window at the first block, and the other arguments that all blocks get."""
    hidden: list[Tensor] = []
    others: dict = {}

    def capture(_module, args, kwargs):
        hidden.append(args[0] if args else kwargs["hidden_states"])
        others.update({k: v for k, v in kwargs.items() if k != "hidden_states"})
        raise _Captured

    handle = model.model.layers[0].register_forward_pre_hook(capture, with_kwargs=True)
    for window in tokens:
        try:
            model(input_ids=window[None], use_cache=False)
        except _Captured:
            continue
    handle.remove()
    return hidden, others
