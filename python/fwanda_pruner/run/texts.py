"""The calibration and the evaluation text of a run, as token ids under one BOS policy."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from functools import cached_property

from torch import Tensor, nn

from ..allocate import choose
from ..config import TEXT_NUMBERS, PruneConfig
from ..errors import UserError
from ..evaluate import perplexity as evaluate
from ..measure.statistics import Statistics
from ..model.targets import check_length
from ..text import windows as data
from ..text.sources import file_sha256
from .stage import Stages
from .state import RunState

_TOKENS = "tokens"  # the source of text that came as token ids


def with_sources(config: PruneConfig, calibration, eval, statistics: Statistics | None) -> PruneConfig:
    """The config with the text that is really used, so that the report tells the truth.

    Raises:
        UserError: token ids are not [S, L].
    """
    changes: dict = {}
    if statistics is not None:
        config = replace(config, order=config.order or "onepass", fisher=config.fisher or statistics.fisher)
        if not config.runs_blocks:
            _warn_of_other_text(config, statistics)
            changes |= statistics.text
    for name, source in (("calibration", calibration), ("eval", eval)):
        if isinstance(source, Tensor):
            if source.dim() != 2:
                raise UserError(f"{name} as token ids must be [S, L], got {list(source.shape)}")
            samples, length = ("nsamples", "seqlen") if name == "calibration" else ("eval_windows", "eval_seqlen")
            changes |= {name: _TOKENS, samples: source.shape[0], length: source.shape[1]}
        elif source is not None:
            changes[name] = source
    return replace(config, **changes).resolved()


def _warn_of_other_text(config: PruneConfig, statistics: Statistics) -> None:
    defaults = {f.name: f.default for f in fields(PruneConfig)}
    for name, value in statistics.text.items():
        asked = getattr(config, name)
        if asked not in (value, defaults[name]):
            warnings.warn(f"--{name} {asked} has no effect: the statistics are of --{name} {value}", stacklevel=4)


def protocol(windows: Tensor, bos: bool | None, tokenizer) -> dict:
    """What makes two perplexities comparable: the windows [S, L], the BOS policy and the tokenizer."""
    return {
        "seqlen": windows.shape[1],
        "windows": windows.shape[0],
        "tokens_sha256": data.tokens_sha256(windows),
        "bos": bos,
        "tokenizer": None if tokenizer is None else type(tokenizer).__name__,
    }


class Texts:
    """What a run reads.

    Args:
        config: from with_sources().
        model, tokenizer: of the run.
        calibration, eval: token ids [S, L] int64; anything else: the text that the config names.
        stages: the time of reading goes there.

    Attributes:
        tokens: the calibration windows [S, L] int64 on the CPU; None until they are read.
        bos: whether windows begin with BOS; None until that is decided.
    """

    def __init__(self, config: PruneConfig, model: nn.Module, tokenizer, calibration, eval, stages: Stages):
        self.config, self.model, self.tokenizer, self.stages = config, model, tokenizer, stages
        self.calibration = calibration if isinstance(calibration, Tensor) else config.calibration
        self.eval = eval if isinstance(eval, Tensor) else config.eval
        self.tokens: Tensor | None = None
        self.bos: bool | None = {"none": False, "window": True}.get(config.bos)

    def identity(self) -> dict:
        """What tells these texts from others."""
        sources = {"calibration_sha256": self.calibration, "eval_sha256": self.eval}
        return {
            name: data.tokens_sha256(text) if isinstance(text, Tensor) else file_sha256(text)
            for name, text in sources.items()
        }

    def recalled(self, state: RunState, *, calibration: bool) -> Tensor | None:
        """As read(), or from what an interrupted run read."""
        if (kept := state.recall("text")) is not None:
            texts, self.bos = kept[0], kept[1]["bos"]
            self.tokens = texts.get("calibration")
            return texts.get("eval")
        windows = self.read(calibration=calibration)
        texts = {name: text for name, text in (("calibration", self.tokens), ("eval", windows)) if text is not None}
        state.keep("text", texts, {"bos": self.bos})
        return windows

    def read(self, *, calibration: bool) -> Tensor | None:
        """Tokenise calibration (kept) and evaluation text (returned), with the BOS policy decided on the way."""
        config = self.config
        with self.stages.timed("text"):
            if calibration:
                settings = {"nsamples": config.nsamples, "seqlen": config.seqlen, "seed": config.seed}
                self.tokens = self._read(data.calibration_tokens, self.calibration, **settings)
            if self.eval is None:
                return None
            settings = {"seqlen": config.eval_seqlen, "windows": config.eval_windows}
            return self._read(data.evaluation_tokens, self.eval, **settings)

    def _read(self, read, source, **settings) -> Tensor:
        check_length(self.model, settings["seqlen"])
        decide = self.bos is None and not isinstance(source, Tensor)
        tokens = read(source, self.tokenizer, bos=bool(self.bos), **settings)
        if decide:
            long_enough = tokens.shape[1] > 2
            self.bos = long_enough and evaluate.choose_bos(self.model, self.tokenizer, tokens[0])
            tokens = read(source, self.tokenizer, bos=True, **settings) if self.bos else tokens
        evaluate.check_tokens(self.model, tokens)
        return tokens

    @cached_property
    def held_out(self) -> tuple[Tensor, bool]:
        """Windows of the calibration text that the statistics do not know, or else the last ones; which of the two."""
        tokens = None
        if not isinstance(self.calibration, Tensor):
            settings = {name: getattr(self.config, name) for name in TEXT_NUMBERS}
            tokens = data.held_out_tokens(
                self.calibration, self.tokenizer, **settings, bos=bool(self.bos), windows=choose.HELD_OUT
            )
        if tokens is not None:
            return tokens, True
        if self.tokens is None:
            self.read(calibration=True)
        return self.tokens[-choose.HELD_OUT :], False
