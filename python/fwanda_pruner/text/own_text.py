"""Text that the model writes itself, for calibration without data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.decode import Decoder, cache_bytes
from ..engine.device import evaluating, model_device
from ..engine.memory import free_memory
from ..engine.ranks import ALONE, Ranks
from ..engine.resume import Unfinished
from ..errors import UserError, show
from ..model.targets import check_length
from ..notes import warn
from ..progress import progress_bar

_END_OF_TEXT = "<|endoftext|>"  # separates the documents that GPT-2, and many models after it, were trained on
_ON_CPU = 16  # sequences at a time; a constant, so that free memory does not change the text
_USABLE = 0.8  # share of the free memory that a batch may take
_LOGIT_BYTES = 40  # bytes of temporary tensors for each sequence and entry of the vocabulary
# A larger batch hardly gains speed once its cache takes this many bytes for each byte of weights, and this many at all.
_CACHE_PER_WEIGHT, _ANY_CACHE = 3, 16 << 30
_DIGITS = 18  # of the number of a token; int() refuses a text of thousands
_REPEATED, _REPETITIVE = 0.5, 0.25  # largest share of one token in a window, and of windows that exceed it


def sample_tokens(
    model: nn.Module,
    *,
    start_token: int,
    nsamples: int,
    seqlen: int,
    seed: int,
    ranks: Ranks = ALONE,
    records: bool = True,
    progress: bool = True,
    unfinished: Unfinished | None = None,
) -> Tensor:
    """Draws windows from the model's own distribution: ancestral sampling at temperature 1, without truncation.

    Each window is what the model writes after the start token, which is not part of the window. The model also writes
    on after the end of a document: it was trained on documents that follow each other, so it begins the next one.

    Each window has random numbers of its own: with a larger nsamples, the first windows stay the same up to rounding.
    On a CPU the same arguments always give the same text, also in a run that was interrupted. On a GPU, rounding can
    change a token, and with it all that follow.

    Args:
        model: a causal language model.
        start_token: from start_token_of().
        nsamples: number of windows.
        seqlen: tokens in each.
        seed: of the draws.
        ranks: the processes that divide the windows; each gets all of them.
        records: as Decoder.
        progress: show a bar or lines of progress on standard error.
        unfinished: saves the finished windows about every minute, for an interrupted run; None: never.

    Returns:
        [nsamples, seqlen] int64 on the CPU.

    Raises:
        UserError: the windows are longer than the model allows, one of them does not fit the memory, the model predicts
            NaN, or it repeats one token.
    """
    check_length(model, seqlen)
    uniforms = torch.rand(
        nsamples, seqlen, dtype=torch.float64, device="cpu", generator=torch.Generator("cpu").manual_seed(seed)
    )
    groups = [uniforms[group.windows.start : group.windows.stop] for group in ranks.groups(nsamples)]
    longest = max(ranks.gather(max(map(len, groups), default=0)))  # so that all ranks draw in batches of one size
    saved = None if unfinished is None else unfinished.load()
    tokens = torch.empty(0, seqlen, dtype=torch.int64, device="cpu") if saved is None else saved[0]["tokens"]
    total, label = sum(group.numel() for group in groups), "write text" if progress else None
    bar = progress_bar(total=total, initial=tokens.numel(), label=label, unit="tokens")
    with evaluating(model), bar:
        batches = _Batches(model, start_token, longest, seqlen, records)
        done = 0
        for group in groups:
            done += len(group)
            while len(tokens) < done:
                bar.n = tokens.numel()
                tokens = torch.cat([tokens, batches.draw(group[len(tokens) - done :], bar.update)])
                if unfinished is not None and unfinished.due():
                    unfinished.save({"tokens": tokens}, {})
    tokens = torch.cat(ranks.gather(tokens))
    _refuse_repetition(tokens)
    return tokens


class _Batches:
    """Draws windows in batches of one size, which becomes smaller when the memory runs out.

    Args:
        model, start_token, seqlen, records: as sample_tokens().
        windows: the most windows that are drawn one after the other.
    """

    def __init__(self, model: nn.Module, start_token: int, windows: int, seqlen: int, records: bool):
        self._model, self._start_token, self._seqlen, self._records = model, start_token, seqlen, records
        self._size = _batch_size(model, windows, seqlen, start_token)
        self._decoder: Decoder | None = None

    def draw(self, uniforms: Tensor, advance: Callable[[int], object]) -> Tensor:
        """Windows of the next batch, [b, L] int64, b <= S, from the random numbers [S, L] of the windows left."""
        while True:
            try:
                decoder = self._decoder or Decoder(self._model, self._size, self._seqlen, records=self._records)
                self._decoder = decoder
                return self._decoder.draw(uniforms[: self._size], self._start_token, advance)
            except torch.OutOfMemoryError:
                self._decoder = None  # go on outside of the handler: the traceback holds the tensors
            self._size = _smaller(self._size, model_device(self._model), self._seqlen)


def start_token_of(model: nn.Module, tokenizer: Any, given: str | int | None = None) -> int:
    """The token after which this model begins to write.

    Without `given` it is the first that exists of: BOS of the tokenizer; BOS of the model's configuration, if it is a
    special token of the tokenizer (some configurations name a BOS that their tokenizer does not have); <|endoftext|> of
    the tokenizer, which stands between the documents that such models were trained on.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer; may be None.
        given: the number of a token, as int or as decimal digits, or the token itself.

    Returns:
        The number of the token.

    Raises:
        UserError: there is no such token, or `given` is not in the vocabulary.
    """
    found = _found_start_token(model, tokenizer) if given is None else _given_start_token(tokenizer, given)
    size = model.get_input_embeddings().weight.shape[0]
    if not 0 <= found < size:
        raise UserError(f"--start-token must be a token of the model, in [0, {size}), got {found}")
    return found


def _given_start_token(tokenizer: Any, given: str | int) -> int:
    if isinstance(given, int) or (given.isascii() and given.isdecimal() and len(given) <= _DIGITS):
        return int(given)
    found = None if tokenizer is None else tokenizer.get_vocab().get(given)
    if found is None:
        raise UserError(f"--start-token must be a token of the tokenizer or the number of one, got {show(given)}")
    return found


def _found_start_token(model: nn.Module, tokenizer: Any) -> int:
    own = None if tokenizer is None else tokenizer.bos_token_id
    configured = next(
        (
            token
            for config in (model.config.get_text_config(), model.config)
            if isinstance(token := getattr(config, "bos_token_id", None), int)
        ),
        None,
    )
    if tokenizer is not None and configured not in {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}:
        configured = None
    separator = None if tokenizer is None else tokenizer.get_vocab().get(_END_OF_TEXT)
    for token in (own, configured, separator):
        if token is not None:
            return token
    raise UserError(
        f"{type(model).__name__} has no start token, neither BOS nor {_END_OF_TEXT}; name one by --start-token ID|TOKEN"
    )


def _batch_size(model: nn.Module, windows: int, seqlen: int, start_token: int) -> int:
    """Sequences at a time: batches of nearly equal size that fit the memory."""
    device, most = model_device(model), _ON_CPU
    if device.type == "cuda":
        weights = sum(parameter.nbytes for parameter in model.parameters())
        cache = seqlen * cache_bytes(model, start_token)
        temporary = _LOGIT_BYTES * model.config.get_text_config().vocab_size
        fits = _USABLE * free_memory(device) / (cache + temporary)
        useful = max(_CACHE_PER_WEIGHT * weights, _ANY_CACHE) / max(cache, 1)
        most = max(1, int(min(fits, useful)))
    return math.ceil(windows / max(1, math.ceil(windows / most)))


def _smaller(size: int, device: torch.device, seqlen: int) -> int:
    torch.cuda.empty_cache()
    if size == 1:
        raise UserError(
            f"a sequence of {seqlen} tokens does not fit the memory of {device}; use a smaller --seqlen or a larger "
            f"--max-memory"
        )
    warn(f"{device} ran out of memory: sampling {size // 2} sequences at a time")
    return size // 2


def _refuse_repetition(tokens: Tensor) -> None:
    """Refuses a text if in over a quarter of its windows one token makes up more than half."""
    commonest = tokens.mode(-1).values
    repetitive = (tokens == commonest[:, None]).double().mean(-1) > _REPEATED
    count = int(repetitive.sum())
    if count > _REPETITIVE * len(tokens):
        raise UserError(
            f"the model repeats itself: in {count} of {len(tokens)} windows that it wrote, one token makes up more "
            f"than half (in the first of them token {int(commonest[repetitive][0])}); name another --start-token, use "
            f"a --dtype of larger range, or calibrate on another text"
        )
