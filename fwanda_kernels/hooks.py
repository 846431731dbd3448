"""Statistics of linear layers from one forward and one activation-only backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock, get_ident

import torch
from torch import Tensor, nn

from ._checks import FP32, expect, expect_dense, expect_mapping, expect_values
from ._hooked import Hook, expect_modules, free_name, hook_gradient, input_of, is_own, output_of, recomputing
from ._layer_sums import (
    LastInput,
    LayerStatistics,
    Pending,
    Reduced,
    SharedGram,
    Sums,
    TokenMask,
    expect_width,
    observe,
)
from .ops.obs import accumulate_gram_
from .ops.stats import accumulate_sq_sums_

__all__ = ["LayerStatistics", "collect_hessians", "collect_statistics"]

_OP = "collect_statistics"
_WHY_NONE = "it is not hooked, was never called, or ran only in code that was compiled before start()"
_SUMS = "_fwanda_sums"  # how the attribute of a hooked module that holds its sums begins


class collect_statistics(Mapping):  # noqa: N801  used like a function
    """Context manager that sums squares of the inputs and of the output gradients of linear layers.

    Inside the block, or between start() and stop(), run forward passes, and backward passes for g2, any number of
    times. A token counts once: inputs that modules share (q/k/v, gate/up) are reduced once, and a forward pass repeated
    by activation checkpointing is ignored. The loss must be a SUM over tokens: with a mean, g2 depends on the batch.

    Compiled code (torch.compile) is measured too, if all modules first ran uncompiled inside the block: that run shows
    which modules share an input. Code that was compiled before the block calls no hook and is not measured. With
    compiled code, activation checkpointing cannot be told from a second pass.

    Args:
        modules: name -> linear module (an nn.Module with one input [..., C] and one output [..., R]). The input is the
            first tensor of floats with at least two dimensions, by position or by keyword; the output is what the
            module returns, or the first entry of a tuple.
        initial: name -> sums of an interrupted collection to continue from; a name without an entry starts at 0. If an
            entry has g2_tokens, later tokens count there as in n_tokens, as if a backward pass ran on all of them.

    Attributes:
        token_mask: [B, L] bool for the next forward pass, False = padding; None (default) counts every position. It may
            be filled anew between passes.
        unseen: names of the modules that were never called; they have no entry.

    `stats[name]` is a LayerStatistics with the sums so far, a snapshot; without any, it raises KeyError.

    Raises:
        ValueError: a value of `modules` is no nn.Module; in a forward pass, a module gets or returns no such tensor, or
            one of another width than before, or its leading shape is not that of token_mask.
        RuntimeError: in a forward pass of a replica that torch.nn.DataParallel made.

    Copies and pickles of a module that are made inside the block carry no hook and do not count. Collectors may be
    nested, one in itself too, and several threads may call the modules. An input may be filled anew between passes by
    numpy or through `x.data`; between two modules that share it, such a change is not noticed.

    Example:
        >>> with collect_statistics({"fc": model.fc}) as stats:
        ...     loss_sum(model(batch)).backward()
        >>> scale = stats["fc"].norm

    Source: the F-Wanda paper, algorithm 1, lines 1 and 2.
    """

    def __init__(self, modules: Mapping[str, nn.Module], initial: Mapping[str, LayerStatistics] | None = None):
        self._modules = expect_modules("collect_statistics", modules)
        if initial is not None:
            expect_mapping(_OP, "initial", initial, LayerStatistics)
        self._initial = dict(initial or {})
        self._sums: dict[str, Sums] = {}
        self._hooks: list[Hook] = []
        self._outer: list[bool] = []  # of each block that was entered: whether it was started before
        self._lock = RLock()
        self._last_input = LastInput()
        self._pending = Pending()
        self.token_mask = None

    def __getitem__(self, name: str) -> LayerStatistics:
        with self._lock:
            self._pending.flush()
        if name in self._sums:
            return self._sums[name].total()
        if name in self._initial:
            return self._initial[name].snapshot()
        raise KeyError(f"no statistics of {name!r}: {_WHY_NONE}")

    def of(self, module: nn.Module) -> LayerStatistics:
        """The statistics of a hooked module, whatever its name.

        Raises:
            KeyError: the module is not hooked, or was never called.
        """
        for name, hooked in self._modules.items():
            if hooked is module and name in self:
                return self[name]
        raise KeyError(f"no statistics of this {type(module).__name__}: {_WHY_NONE}")

    def __iter__(self):
        yield from self._sums
        yield from self._initial

    def __len__(self) -> int:
        return len(self._sums) + len(self._initial)

    @property
    def token_mask(self) -> Tensor | None:
        return self._mask.given

    @token_mask.setter
    def token_mask(self, mask: Tensor | None) -> None:
        if mask is not None:
            expect_dense(_OP, "token_mask", mask)
            if mask.dtype != torch.bool:
                raise ValueError(f"collect_statistics: token_mask must be bool, got {mask.dtype}")
            expect_values(_OP, "token_mask", mask)
        self._mask = TokenMask(mask)
        for sums in self._sums.values():
            sums.mask = mask

    @property
    def unseen(self) -> list[str]:
        return [name for name in self._modules if name not in self]

    def start(self) -> None:
        """Hook the modules. While started, start() changes nothing; after stop(), it continues the sums."""
        if self._hooks:
            return
        for name, module in self._modules.items():
            attribute = free_name(module, _SUMS)
            hook = Hook(module, self._forward_hook(name, module, attribute))
            hook.put(attribute, self._sums.get(name))
            self._hooks.append(hook)

    def reset(self) -> None:
        """Start all sums again from zero. Gradients of earlier forward passes do not count.

        Modules that were called uncompiled before need no such call again: it is still known which share an input.
        With activation checkpointing, do not call it between a forward pass and its backward pass.
        """
        with self._lock, torch.inference_mode(False):
            self._last_input.clear()
            self._pending.discard()
            self._initial.clear()
            shared: dict[int, tuple[Tensor, Tensor]] = {}
            for sums in self._sums.values():
                sums.reset(shared)

    def stop(self) -> None:
        """Remove the hooks; the sums stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with self._lock:
            self._last_input.clear()
            self._pending.flush()

    def __getstate__(self) -> dict:
        """A copy or pickle has the sums so far and is not started; it measures its own copies of the modules."""
        with self._lock:
            self._pending.flush()
            return vars(self) | {"_hooks": [], "_outer": [], "_last_input": LastInput(), "_lock": None}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=RLock())

    def __enter__(self) -> collect_statistics:
        self._outer.append(bool(self._hooks))
        self.start()
        return self

    def __exit__(self, kind, *_) -> None:
        if self._outer and self._outer.pop():  # a block inside another one
            return
        if kind is not None:
            self._pending.discard()  # frees their memory, and raises nothing
        self.stop()

    def _forward_hook(self, name: str, own: nn.Module, attribute: str):
        def hook(module, args, kwargs, output):
            if torch.compiler.is_compiling():  # `own` is not compared here: the modules of several blocks share a graph
                return observe(getattr(module, attribute), input_of(_OP, "a module", args, kwargs), output)
            if not is_own(_OP, name, own, module):
                return None
            x, y = input_of(_OP, name, args, kwargs), output_of(_OP, name, output)
            self._check_mask(name, "input", x)
            if y.requires_grad:
                self._check_mask(name, "output", y)
            with self._lock:
                mask, n_masked = self._mask.at(name, x.device)
                if not recomputing():
                    n_tokens = x.shape[:-1].numel() if mask is None else n_masked
                    self._add_input(name, x, mask, n_tokens, y)
                    vars(module)[attribute] = self._sums[name]
            if y.requires_grad and name in self._sums:  # not there: a checkpoint of a pass before start() is recomputed
                sums = self._sums[name]
                resets = sums.resets
                hook_gradient(y, lambda g: self._add_gradient(sums, resets, g, mask))
            return None

        return hook

    def _add_gradient(self, sums: Sums, resets: int, gradient: Tensor, mask: Tensor | None) -> None:
        with self._lock:
            if sums.resets == resets:
                self._pending.add(sums.g2, gradient.detach(), mask)

    def _check_mask(self, name: str, what: str, x: Tensor) -> None:
        mask = self.token_mask
        if mask is not None and mask.shape != x.shape[:-1]:
            raise ValueError(
                f"collect_statistics: the {what} of {name} must have the leading shape of token_mask "
                f"{list(mask.shape)}, got {list(x.shape[:-1])}"
            )

    def _check_initial(self, name: str, x: Tensor, output: Tensor) -> None:
        start = self._initial.get(name)
        if start is not None:
            expect(_OP, f"initial[{name!r}].x2", start.x2, x.shape[-1:], FP32, start.x2)
            expect(_OP, f"initial[{name!r}].g2", start.g2, output.shape[-1:], FP32, start.x2)
            expect_values(_OP, f"initial[{name!r}].x2", start.x2)

    def _add_input(self, name: str, x: Tensor, mask: Tensor | None, n_tokens: int, output: Tensor) -> None:
        """Add the sums of one input; modules called with the same tensor share them."""
        if name in self._sums:
            expect_width(_OP, name, "input", x, self._sums[name].x2)
            expect_width(_OP, name, "output", output, self._sums[name].g2)
        if not self._last_input.join(name, x, mask):
            x2 = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
            accumulate_sq_sums_(x2, x.detach(), token_mask=mask)
            self._last_input.keep(name, x, mask, Reduced(x2))
        reduced = self._last_input.value
        with torch.inference_mode(False):  # later passes add to the sums outside inference mode
            if name not in self._sums:
                self._check_initial(name, x, output)
                start = self._initial.pop(name, None)
                self._sums[name] = Sums(x, output, self.token_mask, reduced.leader, start)
            sums = self._sums[name]
            sums.to(x, output)
        reduced.leader = reduced.leader or sums
        sums.x2 += reduced.x2
        sums.n_tokens += n_tokens


@contextmanager
def collect_hessians(
    modules: Mapping[str, nn.Module], token_weight: Mapping[str, Tensor] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Context manager that sums X^T X of the inputs of linear layers: name -> [C, C] fp32, for obs_factor().

    Modules that are called with the same tensor (q/k/v, gate/up) share one matrix, the same object: one factor serves
    them all. Modules that share their first input must share all. A module that is never called has no entry. A
    forward pass repeated by activation checkpointing is ignored.

    Args:
        modules: name -> linear module with one input [..., C].
        token_weight: name -> [T] fp32, finite and at least 0: the weight of each token, in the order of the calls
            inside the block. Modules that share an input use the entry of the first one called. Without an entry, and
            with None, each token has weight 1.

    Raises:
        ValueError: token_weight names no module, is not [T], or has other values; in a forward pass, a module gets an
            input of another width than before. In a forward pass or at the end of the block, a module sees more or
            fewer tokens than it has weights, or does not get an input of the modules that share its first.
    """
    if token_weight is not None:
        expect_mapping("collect_hessians", "token_weight", token_weight, Tensor)
    modules, token_weight = expect_modules("collect_hessians", modules), dict(token_weight or {})
    if unknown := token_weight.keys() - modules.keys():
        raise ValueError(f"collect_hessians: token_weight names {min(unknown)!r}, which is none of the modules")
    for name, weight in token_weight.items():
        token_weight[name] = _checked_token_weight(name, weight)
    seen: dict[str, int] = {}
    hessians: dict[str, Tensor] = {}
    grams: dict[str, SharedGram] = {}
    last_inputs, lock = defaultdict(LastInput), RLock()  # the inputs by thread

    def hook_of(name: str, own: nn.Module):
        def hook(module, args, kwargs, _output):
            if is_own("collect_hessians", name, own, module) and not recomputing():
                with lock:
                    add(name, input_of("collect_hessians", name, args, kwargs))

        return hook

    def add(name: str, x: Tensor) -> None:
        thread = get_ident()
        last, gram = last_inputs[thread], grams.get(name)
        shared = (gram is None or last.value is gram) and last.join(name, x, known=gram is not None)
        if gram is None:  # it has no part in inputs before its first
            gram = grams[name] = last.value if shared and last.value.inputs == 1 else SharedGram(name, x)
            gram.members.append(name)
        if shared and gram is last.value:
            gram.called(thread, name)
        else:
            gram.begin(thread, name, x)
            accumulate_gram_(gram.sum, weighted(gram.name, x.detach()))
            last.keep(name, x, None, gram)
        hessians.update(dict.fromkeys(gram.members, gram.sum))

    def weighted(name: str, x: Tensor) -> Tensor:
        if name not in token_weight:
            return x
        start, weight = seen.get(name, 0), token_weight[name]
        seen[name] = end = start + x.shape[:-1].numel()
        if end > len(weight):
            raise ValueError(f"collect_hessians: {name} sees {end} tokens or more, token_weight has {len(weight)}")
        weighted = x * weight[start:end].to(x.device).sqrt().view(*x.shape[:-1], 1)
        return weighted.to(torch.bfloat16 if x.dtype == torch.float16 else x.dtype)  # fp16 might overflow

    hooks = [Hook(module, hook_of(name, module)) for name, module in modules.items()]
    try:
        yield hessians
    finally:
        for hook in hooks:
            hook.remove()
        last_inputs.clear()
    for gram in grams.values():
        gram.expect_all()
    for name, count in seen.items():
        if count != len(token_weight[name]):
            raise ValueError(f"collect_hessians: {name} saw {count} tokens, token_weight has {len(token_weight[name])}")


def _checked_token_weight(name: str, weight: Tensor) -> Tensor:
    """The weights of tokens, in a dtype that torch computes in; raises if they cannot be used."""
    what = f"token_weight of {name}"
    expect_dense("collect_hessians", what, weight)
    expect_values("collect_hessians", what, weight)
    if weight.dim() != 1:
        raise ValueError(f"collect_hessians: {what} must be [T], got {list(weight.shape)}")
    if not weight.is_floating_point():
        raise ValueError(f"collect_hessians: {what} must be of floating dtype, got {weight.dtype}")
    weight = weight.float() if weight.itemsize == 1 else weight
    if not ((weight >= 0) & weight.isfinite()).all():
        raise ValueError(f"collect_hessians: {what} must be finite and at least 0, got NaN, inf or a negative number")
    return weight
