"""Which texts a run reads, and what they are as token windows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..config import PruneConfig
from ..errors import UserError
from ..measure.statistics import Statistics
from ..notes import warn
from ..setting_checks import flag, plain
from ..source_shares import OWN_TEXT, parse_sources
from ..text.domains import Domain
from ..text.sources import local_sha256
from ..text.windows import tokens_sha256

TOKENS = "tokens"  # the source of text that was given as token ids


@dataclass(frozen=True)
class Sources:
    """Where the texts come from.

    Attributes:
        calibration: sources by name, as config.calibration, or token ids [S, L] int64.
        guards: names of texts, as config.guards.
        evaluation: name in the record -> a source by name, or token ids [S, L] int64.
        bos: whether windows begin with BOS; None: decide by the loss of the dense model.
    """

    calibration: tuple[str, ...] | Tensor
    guards: tuple[str, ...]
    evaluation: dict[str, str | Tensor]
    bos: bool | None

    def identity(self) -> dict:
        """Hashes that tell these texts from others: a resumed run must have the same."""
        given = self.calibration
        calibration = [given] if isinstance(given, Tensor) else [source.name for source in parse_sources(given)]
        texts = {"calibration": calibration, "guard": self.guards, "eval": self.evaluation.values()}
        return {f"{kind}_sha256": [_sha256(text) for text in those] for kind, those in texts.items()}


def _sha256(text: str | Tensor) -> Any:
    """Hash of token ids, with their shape, or of a local file; None for other texts."""
    return [tokens_sha256(text), *text.shape] if isinstance(text, Tensor) else local_sha256(text)


@dataclass(frozen=True)
class Texts:
    """The windows that a run reads, all on the CPU.

    Attributes:
        calibration: [S, L] int64; None if the run reads no calibration text.
        labels: [S] int64, for each calibration window the index of its source in config.sources; None as calibration.
        evaluation: source -> [S, L] int64, in the order of the record.
        domains: windows for comparisons, and for the choice of an allocation.
        bos: whether windows of texts by name begin with BOS; None if all texts are token ids, which are used as given.
        ids: the sources in `evaluation` that were given as token ids.
    """

    calibration: Tensor | None
    labels: Tensor | None
    evaluation: dict[str, Tensor]
    domains: tuple[Domain, ...]
    bos: bool | None
    ids: tuple[str, ...] = ()

    def protocol_of(self, source: str, tokenizer) -> dict:
        """protocol() of an evaluation text."""
        return protocol(self.evaluation[source], None if source in self.ids else self.bos, tokenizer)


def with_sources(
    config: PruneConfig, calibration, eval, statistics: Statistics | None, named: Collection[str] = ()
) -> PruneConfig:
    """The settings with the texts that the run really uses, as the record holds them, and with all defaults filled in.

    Args:
        config: the settings.
        calibration: overrides config.calibration: a text, several, or token ids [S, L] int64; None: the settings hold.
        eval: overrides config.eval: a text, token ids [S, L] int64, or a list of them; None: the settings hold.
        statistics: given ones. If no calibration text is read, the settings of theirs replace those of the config.
        named: the settings that the caller named, for warnings of those without effect.

    Raises:
        UserError: token ids are not [S, L], or a text is neither a name nor token ids.
    """
    changes: dict = {}
    ids = isinstance(calibration, Tensor)
    if calibration is not None and not ids:
        config = replace(config, calibration=calibration)
    if config.start_token is not None and OWN_TEXT not in [*(source.name for source in config.sources), *config.guards]:
        warn("--start-token has no effect without --calibration self or --guard self")
    if statistics is not None:
        order, fisher = config.order or config.traits.order, config.fisher or statistics.fisher
        config = replace(config, order=order, fisher=fisher)
        read = {} if statistics.fisher_samples is None else {"fisher_samples": statistics.fisher_samples}
        if not config.runs_blocks:
            read |= statistics.text
        _warn_of_unused(config, read, "the statistics", named)
        changes |= read
    if ids:
        check_ids("calibration", calibration)
        shape = {"nsamples": calibration.shape[0], "seqlen": calibration.shape[1]}
        new = {name: value for name, value in shape.items() if changes.get(name) != value}
        _warn_of_unused(config, new, "the token ids", named)
        if statistics is not None and tokens_sha256(calibration) != statistics.tokens_sha256:
            warn("the statistics were measured on another text than --calibration")
        changes |= {"calibration": (TOKENS,), **shape}
    if eval is not None:
        texts = _named(eval)
        changes["eval"] = tuple(name for name, _ in texts)
        for _, text in texts if all(isinstance(text, Tensor) for _, text in texts) else ():
            shape = {"eval_seqlen": text.shape[1], "eval_windows": text.shape[0]}
            _warn_of_unused(config, shape, "the token ids", named)
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
            name = plain(source, str)
            named.append((name, name))
            continue
        check_ids("eval", source)
        ids += 1
        named.append((TOKENS if ids == 1 else f"{TOKENS} {ids}", source))
    return named


def check_ids(name: str, tokens: Any) -> None:
    """Refuses what is no plain tensor [S, L] of integers. The windows themselves are checked when they are read.

    Args:
        name: of the argument.

    Raises:
        UserError: naming the argument, and saying what was got.
    """
    if not isinstance(tokens, Tensor):
        raise UserError(f"{name} must be a torch tensor [S, L] of integers, got {type(tokens).__name__}")
    if fault := _fault_of_tensor(tokens):
        raise UserError(f"{name} as token ids must be a plain tensor, got {fault}; make one by torch.tensor(ids)")
    if tokens.dim() != 2:
        raise UserError(f"{name} as token ids must be [S, L], got {list(tokens.shape)}")
    if tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise UserError(f"{name} as token ids must be [S, L] with S >= 1 and L >= 2, got {list(tokens.shape)}")


def _fault_of_tensor(tokens: Tensor) -> str | None:
    """Why the numbers of a tensor cannot be read as they are, or None."""
    if type(tokens).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # fake, divided over ranks, of jagged rows
        return f"a {type(tokens).__name__}"
    if tokens.is_meta:
        return "a tensor on the meta device, which holds no numbers"
    if tokens.is_nested or tokens.is_quantized or tokens.layout != torch.strided:
        return f"a {'nested' if tokens.is_nested else 'quantised' if tokens.is_quantized else tokens.layout} tensor"
    if tokens.numel() and not tokens.untyped_storage().nbytes():
        return "a tensor whose memory is freed"
    return None


def _warn_of_unused(config: PruneConfig, read: dict, what: str, named: Collection[str]) -> None:
    """Warns of settings that ask for other text than is read.

    Args:
        read: name -> value of the settings of the text that is read.
        what: says where that text is from.
        named: settings that the caller named; another one asks for nothing if it has its default value.
    """
    defaults = {f.name: f.default for f in fields(PruneConfig)}
    for name, value in read.items():
        asked = getattr(config, name)
        value = tuple(value) if isinstance(value, list) else value
        if asked not in (None, value) and (asked != defaults[name] or name in named):
            asked, value = (", ".join(x) if isinstance(x, tuple) else x for x in (asked, value))
            of = flag(name)
            warn(f"{of} {asked} has no effect: {what} are of {of} {value}")


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
        config.guards,
        dict(_named(list(config.eval) if eval is None else eval)),
        bos,
    )


def protocol(windows: Tensor, bos: bool | None, tokenizer) -> dict:
    """What makes two perplexities comparable: the windows [S, L], the BOS policy and the tokenizer."""
    return {
        "seqlen": windows.shape[1],
        "windows": windows.shape[0],
        "tokens_sha256": tokens_sha256(windows),
        "bos": bos,
        "tokenizer": None if tokenizer is None else type(tokenizer).__name__,
    }
