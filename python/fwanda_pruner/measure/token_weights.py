"""How much each token of the calibration text means to the loss, for Hessians that weigh tokens.

SparseGPT's Hessian sum_t x_t x_t^T counts an error at every token alike. To second order, an error e_t at the outputs
of a matrix changes the loss by (g_t . e_t)^2 / 2, so tokens with large gradients count more. Inside a group of an n:m
pattern, where a factor for a whole row cancels, this still has an effect.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..engine.engine import Engine
from ..engine.loop import PassRecord
from ..engine.resume import Unfinished
from ..errors import UserError
from ..model.targets import find_blocks
from .sums import TokenSqGradSums


def measure_token_sq_grads(
    engine: Engine,
    tokens: Tensor,
    *,
    fisher: str = "empirical",
    seed: int = 0,
    unfinished: Unfinished | None = None,
) -> tuple[dict[str, Tensor], PassRecord]:
    """Measures sum_i G_ti^2 at the outputs of each matrix, in one forward and one backward pass.

    Args:
        engine: of a dense model in eval mode.
        tokens: [S, L] int64 windows.
        fisher: "empirical" or "true", as measure_statistics().
        seed: of the labels that "true" draws.
        unfinished: saves the sums about every minute, for an interrupted run.

    Returns:
        name -> [S * L] fp32 in the order of the tokens, on the engine's device; and how the windows ran. A matrix of an
        expert has no entry, since experts see tokens in the order of their routes, and neither has a matrix that does
        not see each token once.

    Raises:
        UserError: the memory does not suffice, or a gradient is not finite.
    """
    lists = _lists_in_blocks(engine.model)
    modules = {t.name: t.module for t in engine.targets if t.slice_of is None and not t.name.startswith(lists)}
    sums = TokenSqGradSums(modules)
    passes = engine.measure(
        tokens,
        sums,
        backward=True,
        label_seed=seed if fisher == "true" else None,
        label="calibrate (forward and backward)",
        unfinished=unfinished,
    )
    token_sq_grads = sums.tensors()
    if token_sq_grads and not bool(torch.stack([g.sum().isfinite() for g in token_sq_grads.values()]).all()):
        raise UserError("gradients have NaN or inf values; the model overflows on the calibration text")
    return {name: g for name, g in token_sq_grads.items() if len(g) == tokens.numel()}, passes


def _lists_in_blocks(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of modules that lie in a list, as experts do that are not slices of one parameter."""
    path, _ = find_blocks(model)
    return tuple(f"{n}." for n, module in model.named_modules() if n != path and isinstance(module, nn.ModuleList))


def token_weights(token_sq_grads: Sequence[Tensor], power: float) -> Tensor:
    """|g_t|^power scaled to a mean of 1, where g_t joins the gradients of all matrices with one input.

    Args:
        token_sq_grads: [T] fp32 for each of these matrices, |g_t|^2 at its outputs, finite.
        power: p.

    Returns:
        [T] fp32; all 1 where no token has a gradient.
    """
    squares = torch.stack(tuple(token_sq_grads)).sum(0)
    weights = (squares / squares.mean().clamp(min=torch.finfo(squares.dtype).tiny)) ** (power / 2)
    return torch.where(squares.max() > 0, weights / weights.mean(), 1.0)
