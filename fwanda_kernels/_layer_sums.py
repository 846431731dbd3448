"""The sums of hooked layers: what a layer's statistics are, and how inputs and gradients are added to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._checks import as_count
from ._dispatch import define_composite
from .ops.stats import accumulate_sq_sums_, foreach_accumulate_sq_sums_

_GROUP, _GROUP_BYTES = 8, 1 << 28  # most gradients, and most of their bytes, in one launch


def _observe_input(x2: Tensor, tokens: Tensor, x: Tensor, mask: Tensor | None) -> None:
    mask = None if mask is None else mask.to(x.device)
    accumulate_sq_sums_(x2, x, token_mask=mask)
    tokens += x.shape[:-1].numel() if mask is None else int(mask.sum())


_observe_input_ = define_composite(
    "observe_input_(Tensor(a!) x2, Tensor(b!) tokens, Tensor x, Tensor? mask) -> ()", _observe_input
)


class _ObserveGradient(torch.autograd.Function):
    """The identity; its backward adds the squares of the gradient to g2. Hooks on tensors cannot be compiled."""

    @staticmethod
    def forward(ctx, output: Tensor, sums: Sums) -> Tensor:
        ctx.g2, ctx.mask = sums.g2, sums.mask
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        accumulate_sq_sums_(ctx.g2, gradient.detach(), token_mask=ctx.mask)
        return gradient, None


def observe(sums: Sums | None, x: Tensor, output: Tensor | tuple) -> Tensor | tuple | None:
    """Hook for compiled code. All state is on the module, because the modules of several blocks share one graph."""
    if sums is None:
        raise RuntimeError(
            "collect_statistics: each module must run uncompiled once inside the block, before compiled code"
        )
    if sums.leads:
        x2, tokens = sums.compiled
        _observe_input_(x2, tokens, x.detach(), sums.mask)
    if not _first(output).requires_grad:
        return None
    if isinstance(output, (tuple, list)):
        return type(output)([_ObserveGradient.apply(output[0], sums), *output[1:]])
    return _ObserveGradient.apply(output, sums)


def _first(output: Tensor | tuple | list) -> Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


class LastInput:
    """Remembers the last input and what was computed from it, for modules that are called with the same tensor next."""

    def __init__(self):
        self._key: tuple | None = None
        self.value: Any = None

    def matches(self, x: Tensor, mask: Tensor | None) -> bool:
        # tensors of inference mode have no version, so a change in between would go unnoticed
        if self._key is None or x.is_inference():
            return False
        last, version, last_mask = self._key
        return last is x and version == x._version and last_mask is mask

    def keep(self, x: Tensor, mask: Tensor | None, value: Any) -> None:
        self._key, self.value = (x, None if x.is_inference() else x._version, mask), value

    def clear(self) -> None:
        self._key = self.value = None


class Pending:
    """Gradients that wait to be reduced, several in one launch. Autograd does not overwrite what is held here."""

    def __init__(self):
        self._accs: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._mask: Tensor | None = None
        self._bytes = 0

    def add(self, acc: Tensor, gradient: Tensor, mask: Tensor | None) -> None:
        if self._gradients and (mask is not self._mask or gradient.device != self._gradients[0].device):
            self.flush()
        if any(other is acc for other in self._accs):  # a module that was called twice
            self.flush()
        self._accs.append(acc)
        self._gradients.append(gradient)
        self._mask = mask
        self._bytes += gradient.numel() * gradient.element_size()
        if len(self._gradients) >= _GROUP or self._bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._gradients:
            foreach_accumulate_sq_sums_(self._accs, self._gradients, token_mask=self._mask)
        self.discard()

    def discard(self) -> None:
        self._accs, self._gradients, self._mask, self._bytes = [], [], None, 0


@dataclass
class Reduced:
    """Squared sums [C] of one input, and the sums of the first module that was called with it."""

    x2: Tensor
    leader: Sums | None = None


class LayerStatistics:
    """Sums over the tokens that one module saw, and the quantities that pruning derives from them.

    Args:
        x2: [C] fp32, sum_t X_tj^2 of the module's input.
        g2: [R] fp32, sum_t G_ti^2 of the gradient at the module's output; zeros when no backward pass ran. None when
            only the inputs were measured: then there is no omega.
        n_tokens: number of tokens, padding excluded.
        g2_tokens: number of those that g2 sums over, where a backward pass ran on some of them only; None: all.

    The arguments are attributes too; they may be changed.

    Raises:
        ValueError: a number of tokens is no integer, or negative.
    """

    def __init__(self, x2: Tensor, g2: Tensor | None, n_tokens: int, *, g2_tokens: int | None = None):
        self.x2, self.g2, self.n_tokens = x2, g2, _token_count("n_tokens", n_tokens)
        self.g2_tokens = None if g2_tokens is None else _token_count("g2_tokens", g2_tokens)

    @property
    def norm(self) -> Tensor:
        """[C] fp32 norm of each input column, sqrt(x2); ones if no token was seen, so that the magnitude decides."""
        return self.x2.sqrt() if self.n_tokens else torch.ones_like(self.x2)

    @property
    def omega(self) -> Tensor:
        """[R] fp64 Fisher information of each output, the mean of G_ti^2 over tokens; zeros if no token was seen."""
        if self.g2 is None:
            raise ValueError("LayerStatistics: omega needs g2, the sums of a backward pass; only x2 was measured")
        if self.g2_tokens is None:
            return self.g2.double() / max(_token_count("n_tokens", self.n_tokens), 1)
        return self.g2.double() / max(_token_count("g2_tokens", self.g2_tokens), 1)


def _token_count(name: str, value: int) -> int:
    if (count := as_count("LayerStatistics", name, value)) < 0:
        raise ValueError(f"LayerStatistics: {name} must be at least 0, got {count}")
    return count


class Sums:
    """The sums of one hooked module. They are an attribute of the module, where compiled code can find them.

    Attributes:
        x2, g2: fp32 sums; x2 without the tokens of compiled calls, which `compiled` holds.
        n_tokens: tokens of the calls that were not compiled.
        compiled: (x2 [C] fp32, tokens [1] int64 on the CPU) of compiled calls. Modules with the same input share them;
            the module that is called first adds to them.
        leads: whether this module is called first.
        mask: token_mask.
    """

    def __init__(
        self, x: Tensor, output: Tensor, mask: Tensor | None, leader: Sums | None, start: LayerStatistics | None
    ):
        if start is None:
            self.x2 = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
            self.g2 = torch.zeros(output.shape[-1], dtype=torch.float32, device=output.device)
        else:
            self.x2, self.g2 = start.x2.to(x.device, copy=True), start.g2.to(output.device, copy=True)
        self.n_tokens = 0 if start is None else start.n_tokens
        self.leads = leader is None
        own = (torch.zeros_like(self.x2), torch.zeros(1, dtype=torch.int64, device="cpu"))
        self.compiled = own if leader is None else leader.compiled
        self.mask = mask

    def to(self, x: Tensor, output: Tensor) -> None:
        """Follow a module that was moved to another device."""
        if self.x2.device != x.device:
            self.x2 = self.x2.to(x.device)
            self.compiled = (self.compiled[0].to(x.device), self.compiled[1])
        if self.g2.device != output.device:
            self.g2 = self.g2.to(output.device)

    def reset(self, shared: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Start again from zero, with new tensors.

        Args:
            shared: id of a former `compiled` -> what replaces it, so that modules still share theirs.
        """
        self.x2, self.g2, self.n_tokens = torch.zeros_like(self.x2), torch.zeros_like(self.g2), 0
        x2, tokens = self.compiled
        self.compiled = shared.setdefault(id(tokens), (torch.zeros_like(x2), torch.zeros_like(tokens)))

    def total(self) -> LayerStatistics:
        x2, tokens = self.compiled
        return LayerStatistics(self.x2 + x2, self.g2, self.n_tokens + int(tokens))
