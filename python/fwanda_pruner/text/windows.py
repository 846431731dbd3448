"""From documents to token windows [S, L]: S windows of L tokens each, int64."""

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError, one_line, show
from ..notes import muted, warn
from ..source_shares import OWN_TEXT
from .sources import NAMED, Purpose, load_documents

# Characters. A tokenizer needs some hundred bytes of memory for each. A document longer than _WHOLE (WikiText-2 has
# 1.3 million) is therefore tokenised in pieces that end at a line break, which may change one token at each seam.
_WHOLE = 2_000_000
_PIECE = 200_000
_FEW_SAMPLES = 16


def calibration_tokens(
    source: str | Tensor, tokenizer: Any, *, nsamples: int, seqlen: int, seed: int, bos: bool
) -> Tensor:
    """Draw calibration windows from one text, as draw_windows() does.

    Args:
        source: the name of a text, see `load_documents`. Or integer token ids [S, seqlen], which are returned as int64
            without a change: all S rows, and no BOS added.
        tokenizer: a Hugging Face tokenizer. May be None if source is a tensor.
        nsamples: windows to draw, at least 1; fewer than 16 give a warning.
        seqlen, seed, bos: as for `draw_windows`.

    Returns:
        [nsamples, seqlen] int64 on the CPU.

    Raises:
        UserError: as for `draw_windows`, or a tensor is out of range.
    """
    if isinstance(source, Tensor):
        tokens = given_tokens(source, seqlen)
    else:
        tokens, _ = draw_windows(source, tokenizer, nsamples=nsamples, seqlen=seqlen, seed=seed, bos=bos)
    warn_if_few(len(tokens))
    return tokens


def draw_windows(
    source: str, tokenizer: Any, *, nsamples: int, further: int = 0, seqlen: int, seed: int, bos: bool
) -> tuple[Tensor, Tensor]:
    """Draw windows for calibration from one text, and further ones that calibration does not read.

    Documents are tokenised in file order without special tokens, joined and cut into windows. The windows are drawn
    without replacement. If there are fewer than `nsamples`, all are drawn from random offsets instead, with a warning,
    and none is left. "c4" is drawn as the Wanda release does it, with the same random numbers: each window is a random
    part of a random document that is longer than the window. The global random states do not change.

    Args:
        source: the name of a text, see `load_documents`.
        tokenizer: a Hugging Face tokenizer.
        nsamples: windows for calibration, at least 1.
        further: how many others are wanted. They do not change those for calibration.
        seqlen: tokens in a window, BOS included, at least 2.
        seed: of the draw.
        bos: whether each window is BOS and then seqlen - 1 tokens of text.

    Returns:
        [nsamples, seqlen] and [at most further, seqlen] int64 on the CPU.

    Raises:
        UserError: a number is out of range, the source cannot be read or is shorter than one window, or the tokenizer
            has no BOS token.
    """
    _require_at_least(1, nsamples=nsamples)
    _require_at_least(2, seqlen=seqlen)
    prefix = _prefix(source, tokenizer, bos)
    length = seqlen - len(prefix)
    documents = load_documents(source, purpose="calibration", tokenizer=tokenizer)
    if _window_per_document(source):
        drawn = _draw_from_documents(source, documents, tokenizer, nsamples + further, length, seed)
    else:
        stream = _token_stream(documents, tokenizer)
        _require_one_window(source, stream, length)
        count = nsamples + further
        if count > nsamples:  # a longer draw with the same seed begins with the windows of the shorter one
            count = max(nsamples, min(count, stream.numel() // length))
        drawn = _draw_from_stream(source, stream, count, length, seed)
    drawn = _with_prefix(prefix, drawn)
    return drawn[:nsamples], drawn[nsamples:]


def check_window(source: str, tokenizer: Any, seqlen: int, purpose: Purpose = "calibration") -> None:
    """Refuses a text that is shorter than one window. It reads only as much text as a window needs.

    Args:
        source, tokenizer, seqlen: as for `draw_windows`.
        purpose: what the text is read for; some sources have other documents for each.

    Raises:
        UserError: as for `draw_windows`.
    """
    if purpose == "eval" or not _window_per_document(source):
        with muted():  # the run repeats the warnings
            documents = load_documents(source, purpose=purpose, tokenizer=tokenizer)
            stream = _token_stream(documents, tokenizer, enough=seqlen)
        _require_one_window(source, stream, seqlen - 1)  # BOS may be the other token


def guard_tokens(source: str, tokenizer: Any, *, windows: int, seqlen: int, bos: bool) -> Tensor:
    """Windows of a text that calibration does not read, from as many documents as possible.

    The documents are those for calibration, in a fixed random order; each gives at most one window of tokens. If that
    is not enough, as with a file of a single document, each gives all its tokens.

    Args:
        source, tokenizer, seqlen, bos: as for `draw_windows`.
        windows: take at most this many.

    Returns:
        [1 to windows, seqlen] int64 on the CPU.

    Raises:
        UserError: as for `draw_windows`.
    """
    _require_at_least(2, seqlen=seqlen)
    prefix = _prefix(source, tokenizer, bos)
    length = seqlen - len(prefix)
    documents = load_documents(source, purpose="calibration", tokenizer=tokenizer)
    order = random.Random(0).sample(range(len(documents)), len(documents))
    enough = windows * length
    beginnings = (documents[index][: 16 * length] for index in order)
    stream = _token_stream(beginnings, tokenizer, enough, most=length)
    if stream.numel() < enough:
        stream = _token_stream((documents[index] for index in order), tokenizer, enough)
    _require_one_window(source, stream, length)
    count = min(windows, stream.numel() // length)
    return _with_prefix(prefix, stream[: count * length].view(count, length))


def with_bos(tokens: Tensor, tokenizer: Any) -> Tensor:
    """Windows [S, L] whose first token is BOS, followed by the first L - 1 tokens.

    Raises:
        UserError: the tokenizer has no BOS token.
    """
    return _with_prefix(_prefix(OWN_TEXT, tokenizer, True), tokens[:, :-1])


def evaluation_tokens(
    source: str | Tensor, tokenizer: Any, *, seqlen: int, bos: bool, windows: int | None = None
) -> Tensor:
    """Cut a text into consecutive windows that do not overlap. Tokens left over at the end are dropped.

    Args:
        source: the name of a text, see `load_documents`. Or integer token ids [S, seqlen], which are returned as int64
            without a change; no BOS is added.
        tokenizer: a Hugging Face tokenizer. May be None if source is a tensor.
        seqlen: tokens in a window, BOS included, at least 2.
        bos: whether each window is BOS and then seqlen - 1 tokens of text.
        windows: keep only the first this many; None keeps all.

    Returns:
        [S, seqlen] int64 on the CPU.

    Raises:
        UserError: as for `calibration_tokens`.
    """
    _require_at_least(2, seqlen=seqlen)
    if windows is not None:
        _require_at_least(1, windows=windows)
    if isinstance(source, Tensor):
        return given_tokens(source, seqlen)[:windows]
    prefix = _prefix(source, tokenizer, bos)
    length = seqlen - len(prefix)
    documents = load_documents(source, purpose="eval", tokenizer=tokenizer)
    stream = _token_stream(documents, tokenizer, enough=None if windows is None else windows * length)
    _require_one_window(source, stream, length)
    count = stream.numel() // length
    return _with_prefix(prefix, stream[: count * length].view(count, length)[:windows])


def given_tokens(tokens: Tensor, seqlen: int) -> Tensor:
    """Windows that were given as token ids, [S, seqlen] of any integers, as int64 on the CPU.

    Raises:
        UserError: another shape or dtype, or a negative number.
    """
    floating = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if floating or tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] != seqlen:
        got = f"{list(tokens.shape)} {str(tokens.dtype).removeprefix('torch.')}"
        raise UserError(f"tokens must be integer [S, seqlen] = [S >= 1, {seqlen}], got {got}")
    ids = tokens.detach().resolve_neg().to("cpu", torch.int64)
    if ids.min() < 0:
        raise UserError(f"tokens must not be negative, got {int(ids.min())}")
    return ids


def tokens_sha256(tokens: Tensor) -> str:
    """Hash integer token ids: sha256, in hex, of their int64 little-endian bytes in row-major order."""
    ids = tokens.detach().resolve_neg().to("cpu", torch.int64).contiguous()
    return hashlib.sha256(ids.numpy().astype("<i8", copy=False)).hexdigest()


def _window_per_document(source: str) -> bool:
    return source in NAMED and NAMED[source].window_per_document


def _pieces(documents: Iterable[str]) -> Iterator[str]:
    """The documents, each one longer than _WHOLE cut into pieces of at most _PIECE characters."""
    for document in documents:
        if len(document) <= _WHOLE:
            yield document
            continue
        start = 0
        while len(document) - start > _PIECE:
            end = document.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
            yield document[start:end]
            start = end
        yield document[start:]


def _batches(pieces: Iterable[str]) -> Iterator[list[str]]:
    """Lists of pieces with at most _PIECE characters together; a longer piece is a list of its own."""
    batch, size = [], 0
    for piece in pieces:
        if batch and size + len(piece) > _PIECE:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece)
    if batch:
        yield batch


def _encode(tokenizer: Any, texts: list[str]) -> list[array]:
    """The token ids of each text."""
    try:
        found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    except (MemoryError, UserError):
        raise
    except Exception as error:  # tokenizers raises no other class, e.g. for a vocabulary without its unknown token
        raise UserError(
            f"the tokenizer cannot read the text ({one_line(error)}); take the tokenizer files of the original model"
        ) from error
    with suppress(TypeError, OverflowError):  # no integers, or beyond 64 bits
        if isinstance(found, (list, tuple)) and len(found) == len(texts):
            return [array("q", ids) for ids in found]
    raise UserError(
        f"the tokenizer must give one list of token ids for each text, as those of transformers do, got {show(found)}"
    )


def _token_stream(
    documents: Iterable[str], tokenizer: Any, enough: int | None = None, most: int | None = None
) -> Tensor:
    """Tokens of all documents, joined: [n] int64.

    Stops reading once there are `enough` tokens. Takes at most the first `most` tokens of a document, or of a piece of
    one that is very long.
    """
    stream = array("q")
    for batch in _batches(_pieces(documents)):
        for ids in _encode(tokenizer, batch):
            stream.extend(ids[:most])
        if enough is not None and len(stream) >= enough:
            break
    return torch.frombuffer(stream, dtype=torch.int64) if stream else torch.empty(0, dtype=torch.int64, device="cpu")


def _draw_from_stream(source: str, stream: Tensor, nsamples: int, length: int, seed: int) -> Tensor:
    """[nsamples, length] windows of a stream of tokens: different ones, or random offsets if there are too few."""
    generator = torch.Generator("cpu").manual_seed(seed)
    windows = stream.numel() // length
    if nsamples <= windows:
        starts = torch.randperm(windows, generator=generator, device="cpu")[:nsamples] * length
    else:
        warn(
            f"{source} has {windows} windows of {length} tokens and {nsamples} are wanted, so they are drawn from "
            f"random offsets and overlap; use a smaller --nsamples or --seqlen, or a longer text"
        )
        starts = torch.randint(stream.numel() - length + 1, (nsamples,), generator=generator, device="cpu")
    return stream.unfold(0, length, 1)[starts]


def _draw_from_documents(
    source: str, documents: Sequence[str], tokenizer: Any, nsamples: int, length: int, seed: int
) -> Tensor:
    """[nsamples, length] windows, each a random part of a random document that is longer than the window."""
    draw = random.Random(seed)
    windows, short = [], set()
    while len(windows) < nsamples:
        if len(short) == len(documents):
            raise UserError(
                f"{source}: none of {len(documents)} documents is longer than {length} tokens: use a smaller seqlen"
            )
        index = draw.randrange(len(documents))
        if index in short:
            continue
        text = documents[index]
        # A token stands for at least one byte, so most short documents need not be tokenised.
        ids = _encode(tokenizer, [text])[0] if len(text.encode()) > length else []
        if len(ids) <= length:
            short.add(index)
            continue
        start = draw.randrange(len(ids) - length)
        windows.append(ids[start : start + length].tolist())
    return torch.tensor(windows, dtype=torch.int64, device="cpu")


def _prefix(source: str, tokenizer: Any, bos: bool) -> list[int]:
    """Tokens that begin each window: BOS, or none."""
    if tokenizer is None:
        raise UserError(f"{source} needs a tokenizer: pass one, or token ids [S, seqlen] instead of text")
    if not bos:
        return []
    if tokenizer.bos_token_id is None:
        raise UserError(f"{source}: --bos window needs a BOS token, and the tokenizer has none: use --bos none")
    return [tokenizer.bos_token_id]


def _with_prefix(prefix: list[int], windows: Tensor) -> Tensor:
    if not prefix:
        return windows.clone()
    return torch.cat([torch.tensor(prefix, dtype=torch.int64, device="cpu").expand(len(windows), -1), windows], dim=1)


def _require_at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise UserError(f"{name} must be an integer of at least {least}, got {number!r}")


def _require_one_window(source: str, stream: Tensor, length: int) -> None:
    if stream.numel() < length:
        raise UserError(
            f"{source} has {stream.numel()} tokens, one sequence needs {length}: give more text or a smaller seqlen"
        )


def warn_if_few(nsamples: int) -> None:
    """Warns of a calibration with few windows."""
    if nsamples < _FEW_SAMPLES:
        warn(f"{nsamples} calibration samples are few: use at least {_FEW_SAMPLES}")
