"""The sums of hooked layers: what a layer's statistics are, and how inputs and gradients are added to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._checks import as_count, expect_dense
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
    """Remembers the last input and what was computed from it, for modules that are called with the same tensor next.

    numpy and `x.data` can change a tensor and leave its version as it is. So an input is forgotten when a module that
    was called with it is called again: from then on it is another pass, which may have filled the same memory anew.
    """

    def __init__(self):
        self.clear()

    def join(self, name: str, x: Tensor, mask: Tensor | None = None, *, known: bool = False) -> bool:
        """Whether the module is called with the last input, for the first time; it is then one of its callers.

        Tensors of inference mode have no version, so a change between two calls would go unnoticed: they are the last
        input only where it is `known` that the module shares its input with those before.
        """
        if self._key is None or name in self._callers or (x.is_inference() and not known):
            return False
        last, version, last_mask = self._key
        if last is not x or version != _version(x) or last_mask is not mask:
            return False
        self._callers.add(name)
        return True

    def keep(self, name: str, x: Tensor, mask: Tensor | None, value: Any) -> None:
        self._key, self._callers, self.value = (x, _version(x), mask), {name}, value

    def clear(self) -> None:
        self._key, self._callers, self.value = None, set(), None


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


class TokenMask:
    """A copy of token_mask for one pass: the caller may fill its mask anew, and gradients are reduced later.

    Attributes:
        given: the caller's mask, [B, L] bool, or None.
    """

    def __init__(self, given: Tensor | None):
        self.given = given
        self._copy: Tensor | None = None
        self._version: int | None = None
        self._n_tokens = 0
        self._callers: set[str] = set()

    def at(self, name: str, device: torch.device) -> tuple[Tensor | None, int]:
        """The mask for a call of a module, and the number of tokens in it; (None, 0) without a mask.

        It is copied again if the caller's has another version, and when a module that was called with the copy is
        called again.
        """
        if self.given is None:
            return None, 0
        stale = self._copy is None or self._copy.device != device or name in self._callers
        if stale or self.given.is_inference() or self._version != _version(self.given):
            self._copy, self._version = self.given.detach().to(device, copy=True), _version(self.given)
            self._n_tokens, self._callers = int(self.given.sum()), set()
        self._callers.add(name)
        return self._copy, self._n_tokens


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

    The arguments are attributes too; they may be changed. One that a collector handed out is a snapshot: later passes
    do not change it, and changes of it do not reach the collector.

    Raises:
        ValueError: a number of tokens is no integer, or negative; x2 or g2 is no tensor.
    """

    def __init__(self, x2: Tensor, g2: Tensor | None, n_tokens: int, *, g2_tokens: int | None = None):
        expect_dense("LayerStatistics", "x2", x2)
        if g2 is not None:
            expect_dense("LayerStatistics", "g2", g2)
        self.x2, self.g2, self.n_tokens = x2, g2, _token_count("n_tokens", n_tokens)
        self.g2_tokens = None if g2_tokens is None else _token_count("g2_tokens", g2_tokens)

    def snapshot(self) -> LayerStatistics:
        """The same sums, in tensors of their own."""
        with torch.inference_mode(False):
            g2 = None if self.g2 is None else self.g2.clone()
            return LayerStatistics(self.x2.clone(), g2, self.n_tokens, g2_tokens=self.g2_tokens)

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
        without_g2: how many of the tokens to continue from g2 does not sum over; None: their g2_tokens was None.
        resets: number of calls of reset(): gradients of a forward pass before the last one do not count.
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
        self.n_tokens, self.without_g2, self.resets = 0 if start is None else start.n_tokens, None, 0
        if start is not None and start.g2_tokens is not None:
            self.without_g2 = start.n_tokens - start.g2_tokens
        self.leads = leader is None or bool(leader.compiled[1])  # compiled calls before this module's first are not its
        own = (torch.zeros_like(self.x2), torch.zeros(1, dtype=torch.int64, device="cpu"))
        self.compiled = own if self.leads else leader.compiled
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
        self.without_g2, self.resets = None, self.resets + 1
        x2, tokens = self.compiled
        self.compiled = shared.setdefault(id(tokens), (torch.zeros_like(x2), torch.zeros_like(tokens)))

    def total(self) -> LayerStatistics:
        """A snapshot of the sums."""
        (x2, tokens), g2_tokens = self.compiled, None
        n_tokens = self.n_tokens + int(tokens)
        if self.without_g2 is not None:
            g2_tokens = n_tokens - self.without_g2
        with torch.inference_mode(False):
            return LayerStatistics(self.x2 + x2, self.g2.clone(), n_tokens, g2_tokens=g2_tokens)


class SharedGram:
    """X^T X of modules that are called with the same inputs.

    Which modules share their inputs is known after the first one. Each later input is added once, at once, so all of
    them must be called with it.

    Attributes:
        name: the module that was called first.
        sum: [C, C] fp32.
        members: the modules, in the order of their first calls.
        inputs: number of inputs.
    """

    def __init__(self, name: str, x: Tensor):
        self.name, self.members, self.inputs = name, [], 0
        with torch.inference_mode(False):  # later passes add to it outside inference mode
            self.sum = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float32, device=x.device)
        self._callers: dict[int, set[str]] = {}  # thread -> members that were called with its last input

    def called(self, thread: int, name: str) -> None:
        """A member is called with the thread's last input."""
        self._callers[thread].add(name)

    def begin(self, thread: int, name: str, x: Tensor) -> None:
        """A member is called with the thread's next input."""
        self.expect_all(thread)
        expect_width("collect_hessians", name, "input", x, self.sum)
        self._callers[thread] = {name}
        self.inputs += 1
        if self.sum.device != x.device:  # the module was moved
            with torch.inference_mode(False):
                self.sum = self.sum.to(x.device)

    def expect_all(self, *threads: int) -> None:
        """Raise unless all members were called with the last input of the threads; of all, if none is given."""
        for thread in threads or self._callers:
            callers = self._callers.get(thread, self.members)
            if missed := [name for name in self.members if name not in callers]:
                other = next(name for name in self.members if name in callers)
                raise ValueError(
                    f"collect_hessians: {missed[0]} and {other} shared their first input, but not a later one; collect "
                    "their Hessians in two blocks"
                )


def expect_width(op: str, name: str, what: str, x: Tensor, acc: Tensor) -> None:
    """Raise unless the last dimension of a module's input or output is as long as at its first call."""
    if x.shape[-1] != acc.shape[0]:
        raise ValueError(f"{op}: the {what} of {name} must have the width {acc.shape[0]} as before, got {x.shape[-1]}")
