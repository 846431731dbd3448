"""The texts of a run, as token ids: calibration, evaluation, and windows that calibration did not read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from ..allocate.search import HELD_OUT
from ..config import PruneConfig
from ..engine.engine import Engine
from ..errors import UserError
from ..evaluate.perplexity import check_tokens, choose_bos
from ..measure.statistics import Statistics
from ..model.targets import check_length
from ..text.sources import file_sha256
from ..text.windows import calibration_tokens, evaluation_tokens, held_out_tokens, tokens_sha256

_TOKENS = "tokens"  # the source of text that was given as token ids


@dataclass(frozen=True)
class Sources:
    """Where the texts come from.

    Attributes:
        calibration: a source by name, or token ids [S, L] int64.
        evaluation: name in the record -> the same.
        bos: whether windows begin with BOS; None: decide by the loss of the dense model.
    """

    calibration: str | Tensor
    evaluation: dict[str, str | Tensor]
    bos: bool | None

    def identity(self) -> dict[str, Any]:
        """Hashes, as JSON values, that tell these texts from others."""
        return {
            "calibration_sha256": _text_sha256(self.calibration),
            "eval_sha256": [_text_sha256(text) for text in self.evaluation.values()],
        }


@dataclass(frozen=True)
class HeldOut:
    """Windows for decisions and comparisons.

    Attributes:
        tokens: [S, L] int64.
        unread: whether calibration has not read them. Otherwise they are its last windows.
    """

    tokens: Tensor
    unread: bool


@dataclass(frozen=True)
class Texts:
    """What a run reads; None where it reads nothing.

    Attributes:
        calibration: [S, L] int64 windows on the CPU.
        evaluation: source -> the same, in the order of the record.
        held_out: for the search of an allocation and the comparison with Wanda.
        bos: whether windows begin with BOS; None until a text has decided it.
    """

    calibration: Tensor | None
    evaluation: dict[str, Tensor]
    held_out: HeldOut | None
    bos: bool | None


def with_sources(config: PruneConfig, calibration, eval, statistics: Statistics | None) -> PruneConfig:
    """The settings with the text that is really used, so that the record tells the truth.

    Raises:
        UserError: token ids are not [S, L].
    """
    changes: dict = {}
    if statistics is not None:
        config = replace(config, order=config.order or "onepass", fisher=config.fisher or statistics.fisher)
        if not config.runs_blocks:
            _warn_of_other_text(config, statistics)
            changes |= statistics.text
    if isinstance(calibration, Tensor):
        _check_ids("calibration", calibration)
        changes |= {"calibration": _TOKENS, "nsamples": calibration.shape[0], "seqlen": calibration.shape[1]}
    elif calibration is not None:
        changes["calibration"] = calibration
    if eval is not None:
        changes["eval"] = tuple(name for name, _ in _named(eval))
    return replace(config, **changes).resolved()


def _named(eval: Any) -> list[tuple[Any, Any]]:
    """(name in the record, source) of each evaluation text: a name is its own, token ids become "tokens", "tokens 2".

    Args:
        eval: a name, token ids [S, L], or a list of them.

    Raises:
        UserError: token ids are not [S, L].
    """
    named, ids = [], 0
    for source in eval if isinstance(eval, (list, tuple)) else (eval,):
        if not isinstance(source, Tensor):
            named.append((source, source))
            continue
        _check_ids("eval", source)
        ids += 1
        named.append((_TOKENS if ids == 1 else f"{_TOKENS} {ids}", source))
    return named


def _check_ids(name: str, tokens: Tensor) -> None:
    if tokens.dim() != 2:
        raise UserError(f"{name} as token ids must be [S, L], got {list(tokens.shape)}")


def _text_sha256(text: str | Tensor) -> Any:
    """Hash of token ids, with their shape, or of a local file; None for any other text."""
    return [tokens_sha256(text), *text.shape] if isinstance(text, Tensor) else file_sha256(text)


def _warn_of_other_text(config: PruneConfig, statistics: Statistics) -> None:
    defaults = {f.name: f.default for f in fields(PruneConfig)}
    for name, value in statistics.text.items():
        asked = getattr(config, name)
        if asked not in (value, defaults[name]):
            warnings.warn(f"--{name} {asked} has no effect: the statistics are of --{name} {value}", stacklevel=4)


def sources_of(config: PruneConfig, calibration, eval, statistics: Statistics | None) -> Sources:
    """The sources of a run.

    Args:
        config: from with_sources().
        calibration: token ids [S, L] int64; anything else: the text that the settings name.
        eval: a name, token ids [S, L] int64, or a list of them; None: the texts that the settings name.
        statistics: given ones, whose windows began with BOS or not.

    Raises:
        UserError: --bos contradicts the statistics.
    """
    bos = {"none": False, "window": True}.get(config.bos)
    if statistics is not None and statistics.bos is not None:
        if bos not in (None, statistics.bos):
            have = "begin" if statistics.bos else "do not begin"
            raise UserError(
                f"--bos {config.bos} contradicts the statistics, whose windows {have} with BOS; leave it out"
            )
        bos = statistics.bos
    return Sources(
        calibration if isinstance(calibration, Tensor) else config.calibration,
        dict(_named(list(config.eval) if eval is None else eval)),
        bos,
    )


def read_texts(
    config: PruneConfig,
    engine: Engine,
    tokenizer,
    sources: Sources,
    *,
    calibration: bool,
    held_out: bool = False,
) -> Texts:
    """Tokenises the texts of a run. The first one decides about BOS where the settings leave it open.

    Args:
        config: from with_sources().
        engine, tokenizer: of the run.
        sources: from sources_of().
        calibration: whether to read the calibration text.
        held_out: whether to read held-out windows.

    Raises:
        UserError: a text cannot be read, or its windows do not suit the model. If only the comparison with Wanda needs
            held-out windows, that is a warning instead.
    """
    bos, tokens, windows, held = sources.bos, None, {}, None
    if calibration:
        tokens, bos = _read_calibration(config, engine, tokenizer, sources, bos)
    for name, source in sources.evaluation.items():
        settings = {"seqlen": config.eval_seqlen, "windows": config.eval_windows}
        if isinstance(source, Tensor):
            settings = {"seqlen": source.shape[1]}
        windows[name], bos = _read(evaluation_tokens, source, engine, tokenizer, bos, settings)
    if held_out:
        try:
            held, bos = _read_held_out(config, engine, tokenizer, sources, bos, tokens)
        except UserError as error:
            if config.responds:
                raise
            warnings.warn(f"the result was not compared with Wanda's: {error}", stacklevel=2)
    return Texts(tokens, windows, held, bos)


def _read_calibration(config: PruneConfig, engine: Engine, tokenizer, sources: Sources, bos: bool | None):
    settings = config.select("text")
    del settings["calibration"]
    return _read(calibration_tokens, sources.calibration, engine, tokenizer, bos, settings)


def _read(read, source: str | Tensor, engine: Engine, tokenizer, bos: bool | None, settings: dict):
    """Windows of one text, and whether they begin with BOS."""
    check_length(engine.model, settings["seqlen"])
    decide = bos is None and not isinstance(source, Tensor)
    tokens = read(source, tokenizer, bos=bool(bos), **settings)
    if decide:
        bos = tokens.shape[1] > 2 and choose_bos(engine, tokenizer, tokens[0])
        tokens = read(source, tokenizer, bos=True, **settings) if bos else tokens
    check_tokens(engine.model, tokens)
    return tokens, bos


def _read_held_out(
    config: PruneConfig, engine: Engine, tokenizer, sources: Sources, bos: bool | None, tokens: Tensor | None
) -> tuple[HeldOut, bool | None]:
    """Windows of the calibration text that calibration does not read, or else its last ones."""
    if isinstance(sources.calibration, str) and sources.calibration == _TOKENS:
        raise UserError("the statistics were measured on token ids; give the same ids as calibration")
    if not isinstance(sources.calibration, Tensor):
        settings = config.select("text")
        source = settings.pop("calibration")
        windows = held_out_tokens(source, tokenizer, **settings, bos=bool(bos), windows=HELD_OUT)
        if windows is not None:
            return HeldOut(windows, unread=True), bos
    if tokens is None:
        tokens, bos = _read_calibration(config, engine, tokenizer, sources, bos)
    return HeldOut(tokens[-HELD_OUT:], unread=False), bos


def protocol(windows: Tensor, bos: bool | None, tokenizer) -> dict:
    """What makes two perplexities comparable: the windows [S, L], the BOS policy and the tokenizer."""
    return {
        "seqlen": windows.shape[1],
        "windows": windows.shape[0],
        "tokens_sha256": tokens_sha256(windows),
        "bos": bos,
        "tokenizer": None if tokenizer is None else type(tokenizer).__name__,
    }
