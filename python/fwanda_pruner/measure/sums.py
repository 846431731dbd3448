"""The sums that calibration measures: squares of inputs and gradients, Hessians, squared gradients of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

import fwanda_kernels as fk

from ..engine.sums import Sums


class StatisticsSums(Sums):
    """x2, g2 and the token count of linear layers, as fk.collect_statistics() measures them.

    Tensors, for each name: `name.x2` [C] fp32, `name.g2` [R] fp32 (zeros without a backward pass), `name.n_tokens` []
    int64. A module that no token reached has none.

    Args:
        modules: name -> linear module.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        super().__init__()
        self._named, self.modules = dict(modules), tuple(modules.values())
        self._collector: fk.collect_statistics | None = None
        self._entered = False

    def __enter__(self) -> StatisticsSums:
        self.knows_inputs = self._collector is not None and not self._totals
        if self.knows_inputs:
            self._collector.reset()
        else:
            self._collector = fk.collect_statistics(self._named, layers_of(self._totals))
        self._collector.start()
        self._entered = True
        return self

    def __exit__(self, kind, *exception) -> None:
        self._collector.__exit__(kind, *exception)
        if kind is None:
            self._totals = self.tensors()
        else:
            self._collector = None
        self._entered = False

    def tensors(self) -> dict[str, Tensor]:
        if not self._entered:
            return dict(self._totals)
        tensors = {}
        for name, layer in self._collector.items():
            tensors |= {f"{name}.x2": layer.x2, f"{name}.g2": layer.g2}
            tensors[f"{name}.n_tokens"] = torch.tensor(layer.n_tokens, dtype=torch.int64, device="cpu")
        return tensors

    def token_counts(self) -> dict[str, int]:
        return {name: layer.n_tokens for name, layer in self._collector.items()}


def layers_of(tensors: Mapping[str, Tensor]) -> dict[str, fk.LayerStatistics]:
    """name -> LayerStatistics, from the tensors of StatisticsSums."""
    names = [key.removesuffix(".n_tokens") for key in tensors if key.endswith(".n_tokens")]
    return {
        name: fk.LayerStatistics(tensors[f"{name}.x2"], tensors[f"{name}.g2"], int(tensors[f"{name}.n_tokens"]))
        for name in names
    }


class SignedStatisticsSums(StatisticsSums):
    """Also sums the gradients themselves: `name.g1` [R] fp64, sum_t G_ti."""

    uncompiled = "--fisher mean"

    def __enter__(self) -> SignedStatisticsSums:
        self._g1 = {key: tensor for key, tensor in self._totals.items() if key.endswith(".g1")}
        super().__enter__()
        self._hooks = ExitStack()
        self._hooks.enter_context(output_gradients(self._named, self._add))
        return self

    def __exit__(self, *exception) -> None:
        self._hooks.close()
        super().__exit__(*exception)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | (self._g1 if self._entered else {})

    def _add(self, name: str, _call: int, gradient: Tensor) -> None:
        total = gradient.flatten(0, -2).sum(0, dtype=torch.float64)
        self._g1[f"{name}.g1"] = self._g1[f"{name}.g1"] + total if f"{name}.g1" in self._g1 else total


class TokenSqGradSums(Sums):
    """`name` [T] fp32: sum_i G_ti^2 at the outputs of a module, for each of its tokens in the order of its calls.

    load() sets the tokens of earlier windows; merge() appends those of later ones.

    Args:
        modules: name -> linear module.
    """

    uncompiled = "the gradients of tokens"

    def __init__(self, modules: Mapping[str, nn.Module]):
        super().__init__()
        self._named, self.modules = dict(modules), tuple(modules.values())
        self._calls: dict[str, dict[int, Tensor]] = {}

    def __enter__(self) -> TokenSqGradSums:
        self._calls = {}
        self._hooks = ExitStack()
        self._hooks.enter_context(output_gradients(self._named, self._add))
        return self

    def __exit__(self, kind, *_) -> None:
        self._hooks.close()
        if kind is None:
            self._totals = self.tensors()
        self._calls = {}

    def tensors(self) -> dict[str, Tensor]:
        tensors = dict(self._totals)
        for name, calls in self._calls.items():
            new = [calls[number] for number in sorted(calls)]  # gradients come in another order than calls
            tensors[name] = torch.cat([tensors[name], *new] if name in tensors else new)
        return tensors

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._totals[name] = torch.cat([self._totals[name], tensor]) if name in self._totals else tensor

    def _add(self, name: str, call: int, gradient: Tensor) -> None:
        self._calls.setdefault(name, {})[call] = gradient.flatten(0, -2).float().square().sum(1)


class HessianSums(Sums):
    """X^T X of the inputs of linear layers, as fk.collect_hessians() measures them.

    Tensors: one [C, C] fp32 for each distinct input, named by all modules that are called with it, joined by "+".

    Args:
        modules: name -> linear module.
        token_weights: name -> [T] fp32, what each token counts; without an entry a token counts 1.
    """

    uncompiled = "Hessians"

    def __init__(self, modules: Mapping[str, nn.Module], token_weights: Mapping[str, Tensor] | None = None):
        super().__init__()
        self._named, self.modules = dict(modules), tuple(modules.values())
        self._token_weights, self._tokens = token_weights or {}, slice(None)
        self._hessians: dict[str, Tensor] = {}

    def begin(self, first: int, last: int) -> None:
        self._tokens = slice(first, last)

    def __enter__(self) -> HessianSums:
        weights = {name: weight[self._tokens] for name, weight in self._token_weights.items()}
        self._context = fk.collect_hessians(self._named, weights)
        self._hessians = self._context.__enter__()
        return self

    def __exit__(self, kind, *exception) -> None:
        self._context.__exit__(kind, *exception)
        if kind is None:
            self._totals = self.tensors()
        self._hessians = {}

    def tensors(self) -> dict[str, Tensor]:
        tensors = dict(self._totals)
        sharing: dict[int, list[str]] = {}
        for name, hessian in self._hessians.items():
            sharing.setdefault(id(hessian), []).append(name)
        for names in sharing.values():
            key, hessian = "+".join(names), self._hessians[names[0]]
            tensors[key] = tensors[key] + hessian if key in tensors else hessian
        return tensors

    def cost(self, name: str, shape: tuple[int, ...]) -> float:
        """Cost of the factorisation, and of pruning the matrices that share it."""
        rows = sum(self._named[module].weight.shape[0] for module in name.split("+"))
        return shape[0] ** 2 * (shape[0] + rows)

    def by_module(self) -> dict[str, Tensor]:
        """name -> [C, C] of each module that was called; modules with the same input share one tensor.

        If several ranks share a run, only those that this rank owns.
        """
        return {name: hessian for names, hessian in self._totals.items() for name in names.split("+")}

    def owner_by_module(self) -> dict[str, int]:
        """name -> the rank that owns the Hessian, for each module that was called."""
        owners = self.owners or dict.fromkeys(self._totals, 0)
        return {name: owner for names, owner in owners.items() for name in names.split("+")}


@contextmanager
def output_gradients(modules: Mapping[str, nn.Module], add: Callable[[str, int, Tensor], None]) -> Iterator[None]:
    """Hands each gradient at the outputs of modules, which must not be compiled, to add(name, call, gradient).

    A gradient may have other leading dimensions than the output, with the tokens in the same order. `call` numbers the
    calls of the module. Gradients come in another order than calls. A forward pass that checkpointing repeats has no
    gradient of its own.
    """
    calls = dict.fromkeys(modules, 0)

    def hook(name: str, _module: nn.Module, _args: tuple, output: Tensor) -> None:
        if output.requires_grad:
            _flat(output).register_hook(partial(add, name, calls[name]))
        calls[name] += 1

    handles = [module.register_forward_hook(partial(hook, name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _flat(output: Tensor) -> Tensor:
    """The tensor [n, R] that nn.Linear computes and returns a view of; else the output.

    If the model changes the view in place, torch drops its hooks, but not those of the tensor.
    """
    base = output._base
    same = base is not None and base.requires_grad and base.shape == (output.shape[:-1].numel(), output.shape[-1])
    return base if same and base.is_contiguous() and output.is_contiguous() else output
