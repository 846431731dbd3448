"""Statistics of linear layers from one forward and one activation-only backward pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .ops import accumulate_sq_sums_


class LayerStatistics:
    """Sums over the tokens that one module saw.

    Attributes:
        x2: [C] fp32, sum_t X_tj^2 of the module's input.
        g2: [R] fp32, sum_t G_ti^2 of the gradient at the module's output; zeros when no backward pass ran.
        n_tokens: number of tokens, padding excluded.
    """

    def __init__(self, x2: Tensor, g2: Tensor):
        self.x2, self.g2, self.n_tokens = x2, g2, 0


class collect_statistics(Mapping):  # noqa: N801  used like a function
    """Context manager that sums squares of the inputs and of the output gradients of linear layers.

    Inside the block run forward passes, and backward passes for g2, any number of times. A token counts once: inputs
    that modules share (q/k/v, gate/up) are reduced once, and a forward pass repeated by activation checkpointing is
    ignored. The loss must be a SUM over tokens: with a mean, g2 depends on the batch size.

    Args:
        modules: name -> linear module (anything with one input [..., C], one output [..., R] and a 2-D weight).

    Attributes:
        token_mask: [B, L] bool for the next forward pass, False = padding; None (default) counts every position.

    `stats[name]` is a LayerStatistics.

    Raises:
        ValueError: in a forward pass, when an input's leading shape is not that of token_mask.

    Example:
        >>> with collect_statistics({"fc": model.fc}) as stats:
        ...     loss_sum(model(batch)).backward()
        >>> norm = stats["fc"].x2.sqrt()

    Source: the paper, algorithm 1, lines 1 and 2.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._modules = dict(modules)
        self._statistics: dict[str, LayerStatistics] = {}
        self._handles: list = []
        self._last_input: tuple | None = None
        self.token_mask = None

    def __getitem__(self, name: str) -> LayerStatistics:
        return self._statistics[name]

    def __iter__(self):
        return iter(self._statistics)

    def __len__(self) -> int:
        return len(self._statistics)

    @property
    def token_mask(self) -> Tensor | None:
        return self._token_mask

    @token_mask.setter
    def token_mask(self, mask: Tensor | None) -> None:
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"collect_statistics: token_mask must be bool, got {mask.dtype}")
        self._token_mask = mask
        self._kept_tokens = None if mask is None else int(mask.sum())

    def __enter__(self) -> collect_statistics:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(self._forward_hook(name)))
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._last_input = None

    def _forward_hook(self, name: str):
        def hook(_module, inputs, output):
            x = inputs[0]
            mask = self._check_mask(name, x)
            layer = self._statistics.get(name)
            if layer is None:
                with torch.inference_mode(False):  # so that later passes may add to them outside inference mode
                    layer = LayerStatistics(
                        torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device),
                        torch.zeros(output.shape[-1], dtype=torch.float32, device=output.device),
                    )
                self._statistics[name] = layer
            if not _recomputing():
                layer.x2 += self._squared_sums(x, mask)
                layer.n_tokens += x.shape[:-1].numel() if mask is None else self._kept_tokens
            if output.requires_grad:
                output.register_hook(lambda g: accumulate_sq_sums_(layer.g2, g, token_mask=mask))

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

    def _squared_sums(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[C] sums of one input; the last one is kept, so that modules called with the same tensor share it."""
        version = None if x.is_inference() else x._version
        if self._last_input is not None and version is not None:  # no version: cannot tell whether x changed
            last, last_version, last_mask, sums = self._last_input
            if last is x and last_version == version and last_mask is self._token_mask:
                return sums
        sums = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
        accumulate_sq_sums_(sums, x.detach(), token_mask=mask)
        self._last_input = (x, version, self._token_mask, sums)
        return sums


def _recomputing() -> bool:
    """True inside a backward pass: the forward is then activation checkpointing running a block again."""
    return torch._C._current_graph_task_id() != -1
