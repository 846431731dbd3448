"""What each token of the calibration text means to the loss, for Hessians that weigh tokens.

SparseGPT's Hessian sum_t x_t x_t^T counts an error at every token alike. To second order an error e_t at the outputs of
a matrix changes the loss by (g_t . e_t)^2 / 2, so tokens with large gradients count more. Inside a group of an N:M
pattern this acts where a factor for each row cancels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..engine.loop import PassFacts, PassSettings, uncompiled
from ..errors import UserError
from ..model.targets import Target, find_blocks
from .statistics import OutputGradients, fisher_passes, frozen


class _Energies(OutputGradients):
    """Keeps sum_i G_ti^2 of each token.

    Attributes:
        parts: name -> number of the call -> [T] fp32.
    """

    def clear(self) -> None:
        self.parts: dict[str, dict[int, Tensor]] = {}

    def add(self, name: str, call: int, gradient: Tensor) -> None:
        self.parts.setdefault(name, {})[call] = gradient.flatten(0, -2).float().square().sum(1)


def token_energies(
    model: nn.Module,
    tokens: Tensor,
    targets: Sequence[Target],
    *,
    fisher: str = "empirical",
    seed: int = 0,
    settings: PassSettings | None = None,
    progress: bool = True,
) -> tuple[dict[str, Tensor], PassFacts]:
    """|g_t|^2 = sum_i G_ti^2 at the outputs of each matrix, from one forward and one backward pass.

    Args:
        model: a dense causal language model in eval mode; as before afterwards.
        tokens: [S, L] int64 windows.
        targets: its matrices.
        fisher: "empirical" or "true", as calibrate().
        seed: of the labels that "true" draws.
        settings: how the passes run; never compiled.
        progress: show a bar.

    Returns:
        name -> [S * L] fp32 in the order of the tokens, on the model's device; without an entry for a matrix of an
        expert, which sees tokens in the order of their routes, or one that does not see each token once. And how the
        passes ran.

    Raises:
        UserError: the memory does not suffice, or a gradient is not finite.
    """
    lists = _lists_in_blocks(model)
    energies = _Energies({t.name: t.module for t in targets if t.slice_of is None and not t.name.startswith(lists)})
    passes = fisher_passes(
        model,
        tokens,
        {},
        fisher=fisher,
        seed=seed,
        settings=uncompiled(settings or PassSettings(), "tokens are weighed"),
        beside=energies,
        progress=progress,
    )
    with torch.inference_mode(False), torch.enable_grad(), frozen(model, backward=True):
        _, facts = passes.run()
    found = {name: torch.cat([parts[call] for call in sorted(parts)]) for name, parts in energies.parts.items()}
    if found and not bool(torch.stack([energy.sum().isfinite() for energy in found.values()]).all()):
        raise UserError("gradients have NaN or inf values; the model overflows on the calibration text")
    return {name: energy for name, energy in found.items() if len(energy) == tokens.numel()}, facts


def _lists_in_blocks(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of what lies in a list, as experts do that are not slices of one parameter."""
    path, _ = find_blocks(model)
    return tuple(f"{n}." for n, module in model.named_modules() if n != path and isinstance(module, nn.ModuleList))


def token_weights(energies: Sequence[Tensor], power: float) -> Tensor:
    """|g_t|^power with a mean of 1, g_t over all matrices with one input; all 1 where no token has one.

    Args:
        energies: [T] fp32 for each matrix, |g_t|^2 at its outputs, finite.
        power: p.

    Returns:
        [T] fp32.
    """
    energy = torch.stack(tuple(energies)).sum(0)
    weights = (energy / energy.mean().clamp(min=torch.finfo(energy.dtype).tiny)) ** (power / 2)
    return torch.where(energy.max() > 0, weights / weights.mean(), 1.0)
