"""Wanda and F-Wanda as a sparsifier of torch.ao.pruning, for users of the WandaSparsifier that torchao removed.

    sparsifier = WandaSparsifier(sparsity_level=0.5)
    sparsifier.prepare(model, config=None)
    model(calibration)
    sparsifier.step()
    sparsifier.squash_mask()

torchao had a class of this name in torchao/sparsity/wanda.py until pull request 4728 of pytorch/ao removed
torchao.sparsity. This class differs from it (as it was at commits 386d6e6 and 17c9531 of pytorch/ao):

- Scale: there the score was |W| times the sum of squares of each input channel, without a square root, from
  PerChannelNormObserver in torchao/sparsity/utils.py. Here it is |W| * sqrt(sum), as in the Wanda paper.
- Ranking: there all weights of a matrix were ranked together. Here each row is ranked alone and loses
  floor(sparsity * C) weights.
- Blocks: there semi_structured_block_size removed half of each block, whatever sparsity_level was. Here the level says
  how many weights of a block are removed: 0.75 with blocks of 4 keeps 1 of 4. With the default, 0.5, both agree.
- Ties: there the sort was not stable. Here the lowest column is removed first among equal scores.
- Steps: there each step added to the mask. Here each step selects again from the original weights, so the count always
  matches the level. A mask of a higher level need not contain that of a lower one.
- Statistics: there they were collected until squash_mask(). Here the first step ends the collection.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fwanda_kernels as fk

from ..allocate.budgets import keep_total
from ..errors import UserError, install_hint, one_line, show
from . import check_linear, check_version, count_of
from ._budgets import check_gradient, checked_mask, exact_fraction, measured_norm, row_budgets

try:
    from torch.ao.pruning import BaseSparsifier
except ImportError as error:
    raise ImportError(
        f"torch {torch.__version__} has no torch.ao.pruning ({error}); for a torch that has, "
        f"{install_hint('torch>=2.10,<2.14')}"
    ) from error

check_version("torch", torch.__version__, "2.10", "2.13")


class WandaSparsifier(BaseSparsifier):
    """Ranks weights by |W| times the norm of the inputs that the model gets between prepare() and the first step().

    Args:
        sparsity_level: fraction removed, an exact decimal in [0, 1).
        semi_structured_block_size: block size m. Of every m columns, sparsity_level * m are removed, which must be a
            whole number. None is unstructured.
        allocation: "uniform" (Wanda): every row keeps the same number of weights. "row" (F-Wanda): row budgets come
            from the gradients of the SUM of the token losses; its backward() must run between prepare() and step().
        power: exponent p of omega^p, for "row".

    The config of prepare() can override each setting for one tensor. The docstring of this module lists how the class
    differs from torchao's. The masks are those of fk.row_topk_mask() and fk.nm_mask(), tie rule included.
    """

    _collected: fk.collect_statistics | None = None

    def __init__(
        self,
        sparsity_level: float = 0.5,
        semi_structured_block_size: int | None = None,
        allocation: str = "uniform",
        power: float = 0.5,
    ):
        super().__init__(
            defaults={
                "sparsity_level": sparsity_level,
                "semi_structured_block_size": semi_structured_block_size,
                "allocation": allocation,
                "power": power,
            }
        )

    def prepare(self, model: nn.Module, config: list[dict] | None = None) -> None:
        """Add masks to the model and start collecting statistics.

        Args:
            model: the model.
            config: one dict a tensor, as for every sparsifier of the host; None takes every nn.Linear in the model.

        Raises:
            UserError: a tensor cannot be pruned as asked. The message names it, and the model has not changed.
        """
        if self.groups:
            raise UserError("prepare() was called before; use a new sparsifier for another model")
        if not isinstance(model, nn.Module):
            raise UserError(f"model must be an nn.Module, got {type(model).__name__}")
        _check_config(config)
        try:
            super().prepare(model, config)
        except AssertionError as error:  # of the host: an entry contradicts its tensor_fqn
            self.groups.clear()
            raise UserError(f"config does not fit the model: {one_line(error)}") from error

    def _prepare(self, *args, **kwargs) -> None:
        uses = Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))
        times = Counter(group["tensor_fqn"] for group in self.groups)
        try:
            for group in self.groups:
                _check(**group)
                if times[group["tensor_fqn"]] > 1:
                    raise UserError(f"{group['tensor_fqn']} is in the config twice; give each tensor one entry")
                if uses[id(group["module"].weight)] > 1:
                    raise UserError(f"{group['tensor_fqn']} is shared with another module; leave it out of the config")
        except UserError:
            self.groups.clear()
            raise
        super()._prepare(*args, **kwargs)
        modules = {group["tensor_fqn"]: group["module"] for group in self.groups}
        self._collected = fk.collect_statistics(modules)
        self._collected.start()

    def step(self, use_path: bool = True) -> None:
        """Select every mask again from the original weights. The first step ends the collection of statistics.

        Raises:
            UserError: the model saw no input, a tensor has NaN or inf, "row" has no gradients, a setting in `groups` is
                not allowed, or the masks are gone. If statistics are missing, the collection goes on. After an error no
                mask has changed.
        """
        if not self.enable_mask_update:
            return
        self._expect_masks("step()")
        for group in self.groups:
            _check_settings(**group)
        if self._collected is not None:
            self._take_statistics()
        with torch.no_grad():
            selected = [self._select(**group) for group in self.groups]
            for group, mask in zip(self.groups, selected, strict=True):
                _parametrization(**group)[0].mask.copy_(mask)

    def _expect_masks(self, what: str) -> None:
        """Refuse a model without the masks of prepare(), as it is after squash_mask()."""
        if not self.groups:
            raise UserError(f"{what} comes after prepare(), which was not called")
        for group in self.groups:
            if not parametrize.is_parametrized(group["module"], group["tensor_name"]):
                raise UserError(
                    f"{what} finds no mask of {group['tensor_fqn']}: squash_mask() has removed it; use a new sparsifier"
                )

    def _take_statistics(self) -> None:
        if not len(self._collected):
            raise UserError("the model saw no input: run calibration batches between prepare() and step()")
        for group in self.groups:
            name, weight = group["tensor_fqn"], group["module"].weight
            if name in self._collected.unseen:
                rows, cols = (torch.zeros(size, dtype=torch.float32, device=weight.device) for size in weight.shape)
                layer = fk.LayerStatistics(cols, rows, n_tokens=0)
            else:
                layer = self._collected[name]
            if group["allocation"] == "row":
                check_gradient(name, layer)
            self.state[name].update(x2=layer.x2, g2=layer.g2, n_tokens=layer.n_tokens)
        self._stop()

    def _stop(self) -> None:
        if self._collected is not None:
            self._collected.stop()
            self._collected = None

    def update_mask(self, module: nn.Module, tensor_name: str, **group) -> None:
        """Write the mask of one tensor in place, 1 = kept."""
        mask = self._select(module, tensor_name, **group)
        _parametrization(module, tensor_name)[0].mask.copy_(mask)

    def _select(self, module: nn.Module, tensor_name: str, **group) -> Tensor:
        """[R, C] bool mask of one tensor, True = kept."""
        name, level = group["tensor_fqn"], exact_fraction("sparsity_level", group["sparsity_level"])
        weight, state = _parametrization(module, tensor_name).original.detach(), self.state[name]
        layer = fk.LayerStatistics(state["x2"], state["g2"], state["n_tokens"])
        scale = measured_norm(name, layer)
        rows, cols = weight.shape
        block = group["semi_structured_block_size"]
        if block is not None:
            block = int(block)
            return checked_mask(fk.nm_mask, name, weight, scale, keep_total(block, level), block)
        keep = keep_total(cols, level)
        if group["allocation"] == "row":
            total = keep_total(rows * cols, level)
            keep = row_budgets(name, layer, total, k_max=cols, power=group["power"])
        return checked_mask(fk.row_topk_mask, name, weight, scale, keep)

    def squash_mask(self, *args, **kwargs) -> None:
        """Multiply the weights by their masks and remove the masks, as every sparsifier of the host does.

        Raises:
            UserError: there are no masks, because prepare() was not called or squash_mask() was.
        """
        self._expect_masks("squash_mask()")
        self._stop()
        super().squash_mask(*args, **kwargs)


def _parametrization(module: nn.Module, tensor_name: str, **_) -> nn.Module:
    """What prepare() put in the place of a tensor: its first entry holds the mask."""
    return getattr(module.parametrizations, tensor_name)


def _check_config(config: object) -> None:
    """Refuse a config that is not a list of dicts, each with the name of a tensor."""
    example = '[{"tensor_fqn": "fc.weight"}]'
    if config is not None and not isinstance(config, (list, tuple)):
        raise UserError(f"config must be a list of dicts, such as {example}, got {show(config)}")
    for entry in config or ():
        if not isinstance(entry, dict) or not isinstance(entry.get("tensor_fqn"), str):
            raise UserError(
                f"each entry of config must be a dict with a tensor_fqn, as in {example}, got {show(entry)}"
            )


def _check(*, module, module_fqn, tensor_fqn, tensor_name, **settings) -> None:
    """Refuse a tensor and its settings if step() could not serve them."""
    if module is None or tensor_name != "weight":
        raise UserError(f"{tensor_fqn} must be the weight of a module of the model")
    check_linear(module_fqn or "the model", module)
    _check_settings(module=module, tensor_fqn=tensor_fqn, **settings)


def _check_settings(*, module, tensor_fqn, sparsity_level, semi_structured_block_size, allocation, **_) -> None:
    """Refuse settings of a tensor that step() could not serve."""
    level, block = exact_fraction("sparsity_level", sparsity_level), semi_structured_block_size
    if allocation not in ("uniform", "row"):
        raise UserError(f"{tensor_fqn}: allocation must be uniform or row, got {show(allocation)}")
    if block is None:
        return
    if allocation == "row":
        raise UserError(f"{tensor_fqn}: a row budget cancels inside a block; use allocation uniform with blocks")
    block = count_of(f"{tensor_fqn}: semi_structured_block_size", block)
    if block < 1 or (level * block).denominator != 1:
        raise UserError(
            f"{tensor_fqn}: sparsity_level {sparsity_level} must remove a whole number of a block of {block!r} columns"
        )
    if module.in_features % block:
        raise UserError(f"{tensor_fqn} has {module.in_features} columns, not a multiple of the block of {block}")
