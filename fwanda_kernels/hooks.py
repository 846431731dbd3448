"""Statistics of linear layers from one forward and one activation-only backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._dispatch import define_composite
from .ops.obs import accumulate_gram_
from .ops.stats import accumulate_sq_sums_, foreach_accumulate_sq_sums_

_GROUP, _GROUP_BYTES = 8, 1 << 28  # most gradients, and most of their bytes, in one launch
_SUMS = "_fwanda_sums"  # the attribute of a hooked module that holds its sums


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
    def forward(ctx, output: Tensor, sums: _Sums) -> Tensor:
        ctx.g2, ctx.mask = sums.g2, sums.mask
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        accumulate_sq_sums_(ctx.g2, gradient, token_mask=ctx.mask)
        return gradient, None


def _observe(sums: _Sums, x: Tensor, output: Tensor) -> Tensor | None:
    """Hook for compiled code. All state is on the module, because the modules of several blocks share one graph."""
    if sums.leads:
        x2, tokens = sums.compiled
        _observe_input_(x2, tokens, x.detach(), sums.mask)
    return _ObserveGradient.apply(output, sums) if output.requires_grad else None


class _LastInput:
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


class _Pending:
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
class _Reduced:
    """Squared sums [C] of one input, and the sums of the first module that was called with it."""

    x2: Tensor
    leader: _Sums | None = None


class LayerStatistics:
    """Sums over the tokens that one module saw, and the quantities that pruning derives from them.

    Args:
        x2: [C] fp32, sum_t X_tj^2 of the module's input.
        g2: [R] fp32, sum_t G_ti^2 of the gradient at the module's output; zeros when no backward pass ran. None when
            only the inputs were measured: then there is no omega.
        n_tokens: number of tokens, padding excluded.
        g2_tokens: number of those that g2 sums over, where a backward pass ran on some of them only; None: all.

    The arguments are attributes too; they may be changed.
    """

    def __init__(self, x2: Tensor, g2: Tensor | None, n_tokens: int, *, g2_tokens: int | None = None):
        self.x2, self.g2, self.n_tokens, self.g2_tokens = x2, g2, n_tokens, g2_tokens

    @property
    def norm(self) -> Tensor:
        """[C] fp32 norm of each input column, sqrt(x2); ones if no token was seen, so that the magnitude decides."""
        return self.x2.sqrt() if self.n_tokens else torch.ones_like(self.x2)

    @property
    def omega(self) -> Tensor:
        """[R] fp64 Fisher information of each output, the mean of G_ti^2 over tokens; zeros if no token was seen."""
        return self.g2.double() / max(self.n_tokens if self.g2_tokens is None else self.g2_tokens, 1)


class _Sums:
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
        self, x: Tensor, output: Tensor, mask: Tensor | None, leader: _Sums | None, start: LayerStatistics | None
    ):
        if start is None:
            self.x2 = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
            self.g2 = torch.zeros(output.shape[-1], dtype=torch.float32, device=output.device)
        else:
            self.x2, self.g2 = start.x2.to(x.device, copy=True), start.g2.to(output.device, copy=True)
        self.n_tokens = 0 if start is None else start.n_tokens
        self.leads = leader is None
        own = (torch.zeros_like(self.x2), torch.zeros(1, dtype=torch.int64))
        self.compiled = own if leader is None else leader.compiled
        self.mask = mask

    def total(self) -> LayerStatistics:
        x2, tokens = self.compiled
        return LayerStatistics(self.x2 + x2, self.g2, self.n_tokens + int(tokens))


class collect_statistics(Mapping):  # noqa: N801  used like a function
    """Context manager that sums squares of the inputs and of the output gradients of linear layers.

    Inside the block, or between start() and stop(), run forward passes, and backward passes for g2, any number of
    times. A token counts once: inputs that modules share (q/k/v, gate/up) are reduced once, and a forward pass repeated
    by activation checkpointing is ignored. The loss must be a SUM over tokens: with a mean, g2 depends on the batch.

    Compiled code (torch.compile) is measured too, if all modules first ran uncompiled inside the block: that run shows
    which modules share an input. With compiled code, activation checkpointing cannot be told from a second pass.

    Args:
        modules: name -> linear module (anything with one input [..., C], one output [..., R] and a 2-D weight).
        initial: name -> sums of an interrupted collection to continue from; a name without an entry starts at 0.

    Attributes:
        token_mask: [B, L] bool for the next forward pass, False = padding; None (default) counts every position.
        unseen: names of the modules that were never called; they have no entry.

    `stats[name]` is a LayerStatistics with the sums so far.

    Raises:
        ValueError: in a forward pass, when an input's leading shape is not that of token_mask.

    Example:
        >>> with collect_statistics({"fc": model.fc}) as stats:
        ...     loss_sum(model(batch)).backward()
        >>> scale = stats["fc"].norm

    Source: the paper, algorithm 1, lines 1 and 2.
    """

    def __init__(self, modules: Mapping[str, nn.Module], initial: Mapping[str, LayerStatistics] | None = None):
        self._modules = dict(modules)
        self._initial = dict(initial or {})
        self._sums: dict[str, _Sums] = {}
        self._handles: list = []
        self._last_input = _LastInput()
        self._pending = _Pending()
        self.token_mask = None

    def __getitem__(self, name: str) -> LayerStatistics:
        self._pending.flush()
        return self._sums[name].total() if name in self._sums else self._initial[name]

    def __iter__(self):
        yield from self._sums
        yield from self._initial

    def __len__(self) -> int:
        return len(self._sums) + len(self._initial)

    @property
    def token_mask(self) -> Tensor | None:
        return self._token_mask

    @token_mask.setter
    def token_mask(self, mask: Tensor | None) -> None:
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"collect_statistics: token_mask must be bool, got {mask.dtype}")
        self._token_mask = mask
        self._kept_tokens = None if mask is None else int(mask.sum())
        for sums in self._sums.values():
            sums.mask = mask

    @property
    def unseen(self) -> list[str]:
        return [name for name in self._modules if name not in self]

    def start(self) -> None:
        """Hook the modules. While started, start() changes nothing; after stop(), it continues the sums."""
        if self._handles:
            return
        for name, module in self._modules.items():
            if name in self._sums:
                setattr(module, _SUMS, self._sums[name])
            self._handles.append(module.register_forward_hook(self._forward_hook(name), with_kwargs=True))

    def stop(self) -> None:
        """Remove the hooks; the sums stay."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules.values():
            module.__dict__.pop(_SUMS, None)
        self._handles.clear()
        self._last_input.clear()
        self._pending.flush()

    def __enter__(self) -> collect_statistics:
        self.start()
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:
            self._pending.discard()  # frees their memory, and raises nothing
        self.stop()

    def _forward_hook(self, name: str):
        def hook(module, args, kwargs, output):
            x = _first_input(args, kwargs)
            if torch.compiler.is_compiling():
                return _observe(getattr(module, _SUMS), x, output)
            mask = self._check_mask(name, x)
            if not _recomputing():
                self._add_input(name, module, x, mask, output)
            if output.requires_grad:
                g2 = self._sums[name].g2
                output.register_hook(lambda g: self._pending.add(g2, g, mask))
            return None

        return hook

    def _check_mask(self, name: str, x: Tensor) -> Tensor | None:
        mask = self._token_mask
        if mask is None:
            return None
        if mask.shape != x.shape[:-1]:
            raise ValueError(
                f"collect_statistics: the input of {name} must have the leading shape of token_mask "
                f"{list(mask.shape)}, got {list(x.shape[:-1])}"
            )
        return mask.to(x.device)

    def _add_input(self, name: str, module: nn.Module, x: Tensor, mask: Tensor | None, output: Tensor) -> None:
        """Add the sums of one input; modules called with the same tensor share them."""
        if not self._last_input.matches(x, self._token_mask):
            x2 = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
            accumulate_sq_sums_(x2, x.detach(), token_mask=mask)
            self._last_input.keep(x, self._token_mask, _Reduced(x2))
        reduced = self._last_input.value
        if name not in self._sums:
            with torch.inference_mode(False):  # later passes add to them outside inference mode
                start = self._initial.pop(name, None)
                self._sums[name] = _Sums(x, output, self._token_mask, reduced.leader, start)
            setattr(module, _SUMS, self._sums[name])
        sums = self._sums[name]
        reduced.leader = reduced.leader or sums
        sums.x2 += reduced.x2
        sums.n_tokens += x.shape[:-1].numel() if mask is None else self._kept_tokens


@contextmanager
def collect_hessians(
    modules: Mapping[str, nn.Module], token_weight: Mapping[str, Tensor] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Context manager that sums X^T X of the inputs of linear layers: name -> [C, C] fp32, for obs_factor().

    Modules that are called with the same tensor (q/k/v, gate/up) share one matrix, the same object: one factor serves
    them all. A module that is never called has no entry.

    Args:
        modules: name -> linear module with one input [..., C]. Call them in the same order in every forward pass.
        token_weight: name -> [T] fp32, at least 0: the weight of each token, in the order of the calls inside the
            block. Modules that share an input use the entry of the first one called. Without an entry, and with None,
            each token has weight 1.

    Raises:
        ValueError: token_weight names no module or is not [T]; a module sees more tokens than it has weights, in a
            forward pass, or fewer, at the end of the block.
    """
    token_weight = token_weight or {}
    if unknown := token_weight.keys() - modules.keys():
        raise ValueError(f"collect_hessians: token_weight names {min(unknown)!r}, which is none of the modules")
    if wrong := [name for name, weight in token_weight.items() if weight.dim() != 1]:
        raise ValueError(
            f"collect_hessians: token_weight of {wrong[0]} must be [T], got {list(token_weight[wrong[0]].shape)}"
        )
    seen: dict[str, int] = {}
    hessians: dict[str, Tensor] = {}
    owners: dict[str, str] = {}
    last = _LastInput()

    def hook_of(name: str):
        def hook(_module, args, kwargs, _output):
            x = _first_input(args, kwargs)
            if name not in owners:
                owners[name] = owners[last.value] if last.matches(x, None) else name
                if owners[name] == name:
                    hessians[name] = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float32, device=x.device)
                hessians[name] = hessians[owners[name]]
            if owners[name] == name:
                accumulate_gram_(hessians[name], weighted(name, x.detach()))
            last.keep(x, None, name)

        return hook

    def weighted(name: str, x: Tensor) -> Tensor:
        if name not in token_weight:
            return x
        start, weight = seen.get(name, 0), token_weight[name]
        seen[name] = end = start + x.shape[:-1].numel()
        if end > len(weight):
            raise ValueError(f"collect_hessians: {name} sees {end} tokens or more, token_weight has {len(weight)}")
        weighted = x * weight[start:end].to(x.device).sqrt().view(*x.shape[:-1], 1)
        return weighted.to(torch.bfloat16 if x.dtype == torch.float16 else x.dtype)  # fp16 might overflow

    handles = [module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield hessians
    finally:
        for handle in handles:
            handle.remove()
        last.clear()
    for name, count in seen.items():
        if count != len(token_weight[name]):
            raise ValueError(f"collect_hessians: {name} saw {count} tokens, token_weight has {len(token_weight[name])}")


def _first_input(args: tuple, kwargs: dict) -> Tensor:
    return args[0] if args else next(iter(kwargs.values()))


def _recomputing() -> bool:
    """True inside a backward pass: activation checkpointing is then running a block's forward again."""
    return torch._C._current_graph_task_id() != -1
