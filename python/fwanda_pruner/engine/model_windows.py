"""Windows through the whole model: forward, and where asked the loss or its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..model.targets import find_blocks
from .attention import fast_attention, single_sequences
from .compiled import norms_beside
from .device import model_device
from .loop import PassSettings, run_windows
from .losses import backward_of_summed_loss, find_decoder, summed_loss
from .sums import Sums

_BUSY = 1 << 23  # activations [tokens, hidden size] that keep a large GPU busy


class ModelWindows:
    """See `loop.Windows`.

    Args:
        model: a causal language model in eval mode.
        tokens: [S, L] int64 windows without padding.
        backward: run the backward pass of the summed next-token loss after each forward pass. No parameter gets a
            gradient: all of them are frozen meanwhile.
        label_seed: draw the labels of that loss from the model's own predictions with this seed; None: they are the
            text.
        add_loss: called with the summed loss [] fp64 of each pass instead; no backward pass runs then.
    """

    restartable = True

    def __init__(
        self,
        model: nn.Module,
        tokens: Tensor,
        *,
        backward: bool = False,
        label_seed: int | None = None,
        add_loss: Callable[[Tensor], None] | None = None,
    ):
        self._model, self._tokens, self._add_loss = model, tokens, add_loss
        self._label_seed, self._generator = label_seed, None
        self.backward = backward
        self.device = model_device(model)
        self.count, self.length = tokens.shape
        self.busy_windows = round(_BUSY / (model.config.get_text_config().hidden_size * self.length))
        path, self.blocks = find_blocks(model)
        self.compiled_modules = [*self.blocks, *norms_beside(model, path)]
        self.restart()

    @contextmanager
    def ready(self, size: int) -> Iterator[None]:
        with torch.inference_mode(False), torch.set_grad_enabled(self.backward), _frozen(self._model, self.backward):
            with fast_attention(self._model), single_sequences():
                self._decoder = find_decoder(self._model)
                yield

    def run(self, start: int, size: int) -> None:
        ids = self._tokens[start : start + size].to(self.device)
        if self.backward:
            backward_of_summed_loss(self._model, self._decoder, ids, self._generator)
        elif self._add_loss is not None:
            self._add_loss(summed_loss(self._model, self._decoder, ids))
        else:
            self._decoder(input_ids=ids, use_cache=False)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._generator is None else {"generator": self._generator.get_state()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self._generator is not None:
            self._generator.set_state(tensors["generator"])

    def restart(self) -> None:
        if self._label_seed is not None:
            self._generator = torch.Generator().manual_seed(self._label_seed)


class _LossSum(Sums):
    """The summed loss [] fp64 of all windows."""

    def add(self, loss: Tensor) -> None:
        self.merge({"loss": loss})


def mean_loss(model: nn.Module, tokens: Tensor, settings: PassSettings, *, label: str | None = None) -> float:
    """Mean next-token loss in nats over the S (L - 1) targets of windows [S, L]; nan or inf where a logit is.

    Args:
        model: a causal language model in eval mode.
        tokens: [S, L] int64.
        settings: how the windows run.
        label: title of the progress bar; None shows none.

    Raises:
        UserError: the memory does not suffice.
    """
    loss = _LossSum()
    run_windows(ModelWindows(model, tokens, add_loss=loss.add), loss, settings, label=label)
    samples, length = tokens.shape
    return float(loss.tensors()["loss"]) / (samples * (length - 1))


@contextmanager
def _frozen(model: nn.Module, backward: bool) -> Iterator[None]:
    """Freezes all parameters. With `backward`, the embedding output wants a gradient, so that a graph exists.

    Raises:
        UserError: a backward pass is wanted of a model that was made under inference mode.
    """
    if backward and any(p.is_inference() for p in model.parameters()):
        raise UserError(
            "the model was made under torch.inference_mode(), which allows no backward pass; load it outside of it"
        )
    wanted = [p for p in model.parameters() if p.requires_grad]
    for p in wanted:
        p.requires_grad_(False)
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda _m, _i, out: out.requires_grad_(True)) if backward else None
    try:
        yield
    finally:
        if handle:
            handle.remove()
        for p in wanted:
            p.requires_grad_(True)
