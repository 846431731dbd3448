"""Reads the windows of a run: calibration, evaluation, and domains for comparisons."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import PruneConfig
from ..engine.engine import Engine
from ..errors import UserError
from ..evaluate.perplexity import check_tokens, choose_bos
from ..model.targets import check_length
from ..notes import muted, recording, showing, warn
from ..source_shares import OWN_TEXT, counts_of, interleaved, named_as
from ..text.domains import REPORTED, Domain, choice_windows, split_windows
from ..text.sources import naming
from ..text.windows import (
    calibration_tokens,
    draw_windows,
    evaluation_tokens,
    guard_tokens,
    warn_if_few,
    with_bos,
)
from .texts import TOKENS, Sources, Texts

_GUARD_SEED = 1 << 62


def own_windows(config: PruneConfig, *, calibration: bool, domains: bool) -> int:
    """The number of windows that the model must write for a run; 0 if the run reads no text of the model's own.

    Where self is a calibration source, runs with other allocations or with given statistics get the same number. So
    they get the same text: batches of another size could round differently, which could change a token.

    Args:
        config, calibration, domains: as read_texts().
    """
    names = [source.name for source in config.sources]
    if OWN_TEXT in names and (calibration or (domains and config.compares_with_wanda)):
        return counts_of(config.sources, config.nsamples)[names.index(OWN_TEXT)] + REPORTED + choice_windows(1)
    return REPORTED + _choice(config, config.guards) if domains and OWN_TEXT in config.guards else 0


def own_seed(config: PruneConfig) -> int:
    """The seed of the model's own text.

    Where only a guard reads it, it is another one than --seed, with which `fwanda sample` draws: that text may be the
    calibration, and the guard must not read the same windows.
    """
    calibrates = OWN_TEXT in [source.name for source in config.sources]
    return config.seed if calibrates else config.seed ^ _GUARD_SEED


def read_texts(
    config: PruneConfig,
    engine: Engine,
    tokenizer,
    sources: Sources,
    own: Tensor | None = None,
    *,
    calibration: bool,
    domains: bool = False,
) -> Texts:
    """Reads and tokenises the texts of a run.

    If the settings leave BOS open, the first text that is read decides for all: windows begin with BOS if that lowers
    the loss of the dense model.

    Args:
        config: from with_sources().
        engine, tokenizer: of the run.
        sources: from sources_of().
        own: [own_windows(), L] int64 text that the model wrote; None if own_windows() is 0.
        calibration: whether to read the calibration text.
        domains: whether to read windows for comparisons.

    Raises:
        UserError: a text cannot be read, or its windows do not suit the model. There is only a warning for a
            calibration text that nothing but the comparison needs, and for a default guard.
    """
    reader = _Reader(config, engine, tokenizer, sources, own, sources.bos)
    mix = reader.mix() if calibration else None
    windows = {name: reader.evaluation(source) for name, source in sources.evaluation.items()}
    if (calibration or domains) and config.reads_text:
        _warn_of_flattery(config, sources)
    found: list[Domain] = []
    if domains:
        if mix is None and _is_domain(config):
            mix = reader.mix_if_readable()
        found = reader.domains(mix)
        _warn_of_read(config, found)
    tokens, labels = (mix.tokens, mix.labels) if calibration else (None, None)
    if config.bos != "auto" and not reader.by_name and (mix is not None or windows):
        warn(f"--bos {config.bos} has no effect: token ids are used as they are")
    ids = tuple(name for name, source in sources.evaluation.items() if isinstance(source, Tensor))
    return Texts(tokens, labels, windows, tuple(found), reader.bos if reader.by_name else None, ids)


def _warn_of_flattery(config: PruneConfig, sources: Sources) -> None:
    """Warns of a file that is calibrated on and evaluated. Texts with a name of their own have a part for each."""
    calibrated = {source.name for source in config.sources}
    names = [name for name, text in sources.evaluation.items() if not isinstance(text, Tensor)]
    for name in named_as(names, config.sources):
        if name in calibrated and os.path.isfile(name):
            warn(f"{name} is both --calibration and --eval, which flatters the perplexity; evaluate on another text")


def _warn_of_read(config: PruneConfig, domains: Sequence[Domain]) -> None:
    """Warns of domains whose windows the calibration reads. For token ids, only if a choice needs others."""
    read = [domain.source for domain in domains if not domain.unread and (config.responds or domain.source != TOKENS)]
    uses = ["the allocation is chosen"] * config.responds + ["the losses are measured"] * (not config.no_check)
    if read:
        warn(
            f"calibration reads all windows of {', '.join(read)}, so {' and '.join(uses)} on the last of them, which "
            f"flatters the result; to leave windows for that, use a smaller --nsamples or a longer text"
        )


def _is_domain(config: PruneConfig) -> bool:
    """Whether the calibration text is a domain where statistics are given. Wanda alone has no text written for that."""
    written = OWN_TEXT in [source.name for source in config.sources]
    return config.compares_with_wanda or (config.reads_text and not written)


@dataclass(frozen=True)
class _Mix:
    """Windows of one or several sources, interleaved.

    Attributes:
        tokens: [S, L] int64.
        labels: [S] int64, the index of the source of each window.
        further: for each source, [S', L] int64 windows of it that are not in `tokens`.
    """

    tokens: Tensor
    labels: Tensor
    further: tuple[Tensor, ...]

    @classmethod
    def of(cls, tokens: Tensor) -> _Mix:
        """Windows of one source."""
        labels = torch.zeros(1, dtype=torch.int64, device="cpu").expand(len(tokens))  # takes no memory for each window
        return cls(tokens, labels, (tokens[:0],))


@dataclass
class _Reader:
    """Reads the texts of one run.

    Attributes:
        config, engine, tokenizer, sources, own: the arguments of read_texts().
        bos: whether windows begin with BOS; None until the first text that is read decides.
        by_name: whether a text was read that was not given as token ids.
    """

    config: PruneConfig
    engine: Engine
    tokenizer: Any
    sources: Sources
    own: Tensor | None
    bos: bool | None
    by_name: bool = False

    @property
    def guards(self) -> tuple[str, ...]:
        """The guards that are read: without a tokenizer only those that the user named, not the default ones."""
        return () if self.tokenizer is None and self.config.guard is None else self.config.guards

    @property
    def further(self) -> int:
        """Number of windows of each domain that the calibration does not read."""
        return REPORTED + _choice(self.config, self.guards)

    def read(self, read: Callable[[bool], _Mix], given: Any) -> _Mix:
        """Reads a text, and decides by its first window whether windows begin with BOS, if that is still open.

        Args:
            read: reads the text with BOS at the beginning of each window, or without.
            given: the name or the token ids of the text. Token ids are used as they are and decide nothing.
        """
        self.by_name |= not isinstance(given, Tensor)
        if self.bos is not None or isinstance(given, Tensor):
            mix = read(bool(self.bos))
        else:
            with recording(notes := []), showing(False):  # with BOS, the text is read again and warns then
                mix = read(False)
            self.bos = mix.tokens.shape[1] > 2 and choose_bos(self.engine, self.tokenizer, mix.tokens[0])
            if self.bos:
                mix = read(True)
            else:
                for note in notes:
                    warn(note)
        check_tokens(self.engine.model, mix.tokens)
        return mix

    def evaluation(self, text: str | Tensor) -> Tensor:
        """The windows of one evaluation text."""
        settings = {"seqlen": self.config.eval_seqlen, "windows": self.config.eval_windows}
        if isinstance(text, Tensor):
            settings = {"seqlen": text.shape[1]}
        check_length(self.engine.model, settings["seqlen"])

        def read(bos: bool) -> _Mix:
            with naming("--eval"):
                return _Mix.of(evaluation_tokens(text, self.tokenizer, **settings, bos=bos))

        return self.read(read, text).tokens

    def mix(self) -> _Mix:
        """The calibration text.

        Raises:
            UserError: it cannot be read.
        """
        check_length(self.engine.model, self.config.seqlen)
        return self.read(self._mix, self.sources.calibration)

    def mix_if_readable(self) -> _Mix | None:
        """The calibration text, which only the domains need: if it cannot be read, a warning says so."""
        try:
            return self.mix()
        except UserError as error:
            warn(f"the losses on the calibration text are not measured: {error}")
            return None

    def _mix(self, bos: bool) -> _Mix:
        config, given = self.config, self.sources.calibration
        if isinstance(given, Tensor):
            tokens = calibration_tokens(given, None, **self._settings(len(given)), bos=bos)
            return _Mix.of(tokens)
        if given == (TOKENS,):
            raise UserError("the calibration was given as token ids; give the same ids as calibration again")
        counts = counts_of(config.sources, config.nsamples)
        parts, further = zip(
            *(self._source(s.name, n, bos) for s, n in zip(config.sources, counts, strict=True)), strict=True
        )
        warn_if_few(config.nsamples)
        order = interleaved(counts)
        nexts = [iter(part) for part in parts]
        tokens = torch.stack([next(nexts[label]) for label in order])
        return _Mix(tokens, torch.tensor(order, dtype=torch.int64, device="cpu"), further)

    def _source(self, name: str, count: int, bos: bool) -> tuple[Tensor, Tensor]:
        """[count, L] windows of one source for the calibration, and [S', L] further ones that it does not read."""
        config = self.config
        if name == OWN_TEXT:
            own = with_bos(self.own, self.tokenizer) if bos else self.own
            return own[:count], own[count : count + self.further]
        # the defaults draw windows that overlap; only what was asked for gives a warning
        by_default = (config.calibration, config.nsamples) == (PruneConfig.calibration, PruneConfig.nsamples)
        with naming("--calibration"), muted() if by_default else nullcontext():
            return draw_windows(name, self.tokenizer, **self._settings(count), further=self.further, bos=bos)

    def _settings(self, count: int) -> dict:
        return {"nsamples": count, "seqlen": self.config.seqlen, "seed": self.config.seed}

    def domains(self, mix: _Mix | None) -> list[Domain]:
        """The domains: each calibration source, then each guard that is not one of them.

        Args:
            mix: the calibration text; None: it is not a domain.
        """
        names = [source.name for source in self.config.sources]
        found = [self._calibrated(mix, label, name) for label, name in enumerate(names)] if mix is not None else []
        read = [domain.source for domain in found]
        for name in self.guards:
            if name in read:
                continue
            try:
                guard = self.read(partial(self._guard, name), name)
            except UserError as error:
                if self.config.guard is not None:
                    raise
                warn(f"the guard {name} is left out: {error}")
                continue
            calibrated = self.config.reads_text and name in names
            found.append(self._domain(name, guard.tokens, calibrated=calibrated, unread=not calibrated))
        return found

    def _guard(self, name: str, bos: bool) -> _Mix:
        check_length(self.engine.model, self.config.seqlen)
        count = self.further
        if name == OWN_TEXT:
            return _Mix.of((with_bos(self.own, self.tokenizer) if bos else self.own)[-count:])
        with nullcontext() if self.config.guard is None else naming("--guard"):
            return _Mix.of(guard_tokens(name, self.tokenizer, windows=count, seqlen=self.config.seqlen, bos=bos))

    def _calibrated(self, mix: _Mix, label: int, name: str) -> Domain:
        windows = mix.further[label]
        unread = len(windows) > 0
        if not unread:
            windows = mix.tokens[torch.nonzero(mix.labels == label).flatten()[-self.further :]]
        return self._domain(name, windows, calibrated=True, unread=unread)

    def _domain(self, name: str, windows: Tensor, *, calibrated: bool, unread: bool) -> Domain:
        reported, choice = split_windows(windows, _choice(self.config, self.guards))
        return Domain(name, calibrated, name in self.guards, unread, reported, choice)


def _choice(config: PruneConfig, guards: Sequence[str]) -> int:
    """Number of windows of each domain on which the allocation is chosen; 0 if nothing is chosen."""
    names = {source.name for source in config.sources} | set(guards)
    return choice_windows(len(names)) if config.responds else 0
