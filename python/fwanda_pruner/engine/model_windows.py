"""Windows through the whole model: forward, and where asked the loss or its backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..model.attributes import uncached
from ..model.placement import is_sharded
from ..model.targets import find_blocks
from .attention import fast_attention, single_sequences
from .compile_blocks import norms_beside
from .device import model_device
from .losses import backward_of_summed_loss, find_decoder, summed_losses
from .prefix import SharedPrefix
from .sums import Sums

_BUSY = 1 << 23  # activations [tokens, hidden size] that keep a large GPU busy
_FORWARD_BUSY = 1 << 25  # a forward pass alone keeps none of them, so more may run at once


class ModelWindows:
    """See `loop.Windows`.

    Args:
        model: a causal language model in eval mode.
        tokens: [S, L] int64 windows without padding.
        backward: run the backward pass of the summed next-token loss after each forward pass. No parameter gets a
            gradient: all of them are frozen meanwhile.
        label_seed: draw the labels of that loss from the model's own predictions with this seed; None: they are the
            text.
        add_losses: if given, only the forward pass runs, and this is called with the summed losses of its windows, [B]
            fp64.
        first_target: position of the first token whose loss counts.
        prefix: of the blocks that earlier passes over the same windows may have run; None: all blocks run.
        least_tokens: in a pass on a GPU, where its memory allows it.
        loaded_bytes: see `loop.Windows`.
    """

    restartable = True

    def __init__(
        self,
        model: nn.Module,
        tokens: Tensor,
        *,
        backward: bool = False,
        label_seed: int | None = None,
        add_losses: Callable[[Tensor], None] | None = None,
        first_target: int = 1,
        prefix: SharedPrefix | None = None,
        least_tokens: int = 0,
        loaded_bytes: int = 0,
    ):
        self._model, self._tokens = model, tokens
        self._add_losses, self._first_target = add_losses, first_target
        self._label_seed, self._generator = label_seed, None
        self._prefix = prefix or SharedPrefix(())
        self.backward, self._least_tokens, self.loaded_bytes = backward, least_tokens, loaded_bytes
        self.device = model_device(model)
        self.together = is_sharded(model)
        self.count, self.length = tokens.shape
        path, self.blocks = find_blocks(model)
        self.compiled_modules = [*self.blocks, *norms_beside(model, path)]

    @contextmanager
    def ready(self, group: range, size: int) -> Iterator[None]:
        frozen = _frozen(self._model) if self.backward else nullcontext()
        with torch.inference_mode(False), torch.set_grad_enabled(self.backward), frozen:
            with fast_attention(self._model), single_sequences():
                self._decoder = find_decoder(self._model)
                yield

    def run(self, start: int, size: int) -> None:
        ids = self._tokens[start : start + size].to(self.device)
        if self.backward:
            backward_of_summed_loss(self._model, self._decoder, ids, self._generator)
        elif self._add_losses is not None:
            with self._prefix.over(start, size):
                losses = summed_losses(self._model, self._decoder, ids, first_target=self._first_target)
            self._add_losses(losses)
        else:
            self._decoder(input_ids=ids, **uncached(self._decoder))

    def idle(self) -> None:
        ids = self._tokens[:1].to(self.device)
        if self.backward:
            backward_of_summed_loss(self._model, self._decoder, ids)
        else:
            self._decoder(input_ids=ids, **uncached(self._decoder))

    @property
    def busy_windows(self) -> int:
        busy = _BUSY if self.backward else _FORWARD_BUSY
        windows = round(busy / (self._model.config.get_text_config().hidden_size * self.length))
        return max(windows, math.ceil(self._least_tokens / self.length))

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._generator is None else {"generator": self._generator.get_state()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self._generator is not None:
            self._generator.set_state(tensors["generator"])

    def seek(self, start: int) -> None:
        if self._label_seed is not None:  # each label takes one number, and the first token of a window has none
            self._generator = torch.Generator("cpu").manual_seed(self._label_seed)
            torch.rand(start * (self.length - 1), dtype=torch.float64, device="cpu", generator=self._generator)


class WindowLosses(Sums):
    """The summed loss of each window: `losses` [S] fp64, in nats, in the order of the windows."""

    def add(self, losses: Tensor) -> None:
        """Appends the losses of one pass."""
        self.merge({"losses": losses})

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        """Appends the losses of later windows."""
        known = [self._totals["losses"]] if self._totals else []
        self._totals["losses"] = torch.cat([*known, tensors["losses"]])


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Freezes all parameters. The embedding output wants a gradient, so that a graph exists.

    Raises:
        UserError: the model was made under inference mode.
    """
    if any(p.is_inference() for p in model.parameters()):
        raise UserError(
            "the model was made under torch.inference_mode(), which allows no backward pass; load it outside of it"
        )
    wanted = [p for p in model.parameters() if p.requires_grad]
    for p in wanted:
        p.requires_grad_(False)
    # a copy, because some models change it in place
    handle = model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: out.requires_grad_(True).clone())
    try:
        yield
    finally:
        handle.remove()
        for p in wanted:
            p.requires_grad_(True)
