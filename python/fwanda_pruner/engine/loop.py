"""Forward and backward passes over the calibration text, in micro-batches that fit the memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import fwanda_kernels as fk

from ..config import PruneConfig
from ..errors import UserError, one_line
from ..model.attributes import replaced
from ..model.targets import find_blocks
from .device import fast_attention, free_memory, model_device
from .losses import backward_of_summed_loss, find_decoder
from .packing import single_sequences

_BUSY = 1 << 23  # activations [tokens, hidden size] that keep a large GPU busy
_SPARE = 0.8  # of the free memory that a larger micro-batch may count on
KEEP_SECONDS = 60
_COMPILE_SECONDS, _COMPILE_GAIN = 15, 0.25  # of a cold compilation; of the time of a pass (measured on an H100)


@dataclass(frozen=True)
class PassSettings:
    """How the passes run. None of it changes the sums beyond rounding.

    Attributes:
        micro_batch: windows in a pass; None: as many as keep a GPU busy and fit its memory, 1 on a CPU.
        compile: "on": torch.compile each block; "auto": where the time that it saves is more than it takes.
        checkpointing: "on": keep the inputs of each block alone and run it again in the backward pass; "auto": when
            one window does not fit otherwise.
    """

    micro_batch: int | None = None
    compile: str = "auto"
    checkpointing: str = "auto"

    @classmethod
    def of(cls, config: PruneConfig) -> PassSettings:
        """Those of a run."""
        size = None if config.micro_batch == "auto" else int(config.micro_batch)
        return cls(size, config.compile, config.checkpointing)


@dataclass
class PassFacts:
    """How the passes ran, for the report: windows in a pass, what was on, seconds that compiling took."""

    micro_batch: int = 1
    compiled: bool = False
    checkpointing: bool = False
    compile_seconds: float = 0.0


def uncompiled(settings: PassSettings, what: str) -> PassSettings:
    """The settings without compiled blocks, which `what` does not allow; says so where they were asked for."""
    if settings.compile == "on":
        warnings.warn(f"{what} without compiled blocks, in spite of --compile on", stacklevel=3)
    return replace(settings, compile="off")


@dataclass
class Progress:
    """Where an interrupted calibration can go on.

    Attributes:
        done: windows that were measured.
        facts: how the passes ran.
        sums: name -> LayerStatistics over these windows, on the model's device.
        generator: state of the generator of labels; None without one.
    """

    done: int
    facts: PassFacts
    sums: Mapping[str, fk.LayerStatistics]
    generator: Tensor | None = None


@dataclass
class Passes:
    """All passes over the text.

    Args:
        model: a causal language model in eval mode.
        modules: name -> linear module to measure.
        tokens: [S, L] int64 windows without padding.
        backward: whether a backward pass of the summed loss follows each forward pass.
        settings: how they run.
        label: title of the progress bar; None shows none.
        label_seed: the labels are drawn from the model's own predictions with this seed; None: they are the text.
        beside: other hooks, entered anew with every start from the beginning.
        progress: where to go on; None: at the beginning.
        keep: called with the Progress about every minute; None: never.
    """

    model: nn.Module
    modules: Mapping[str, nn.Module]
    tokens: Tensor
    backward: bool
    settings: PassSettings = field(default_factory=PassSettings)
    label: str | None = None
    label_seed: int | None = None
    beside: AbstractContextManager = field(default_factory=nullcontext)
    progress: Progress | None = None
    keep: Callable[[Progress], None] | None = None

    def run(self) -> tuple[fk.collect_statistics, PassFacts]:
        """Measure the modules, from the start again with less memory wherever the device runs out of it.

        Raises:
            UserError: one window does not fit, or the blocks cannot be compiled and compile is "on".
        """
        self.device = model_device(self.model)
        self.path, self.blocks = find_blocks(self.model)
        wanted = self.settings.micro_batch
        facts = PassFacts(min(wanted or 1, len(self.tokens)))
        facts.checkpointing = self.backward and self.settings.checkpointing == "on"
        if self.progress is not None:
            facts = replace(self.progress.facts, compiled=False, compile_seconds=0.0)
        grow = wanted is None and self.progress is None
        compile = "off" if facts.checkpointing else self.settings.compile
        while True:
            try:
                with fast_attention(self.model), single_sequences():
                    return self._attempt(facts, grow, compile), facts
            except torch.OutOfMemoryError:
                exhausted = True  # the traceback holds the activations: go on once it is gone
            except _CompileError as error:
                if compile == "on":
                    raise UserError(f"the blocks cannot be compiled, use --compile off: {error}") from error
                warnings.warn(f"the blocks cannot be compiled, going on without: {error}", stacklevel=2)
                exhausted, compile = False, "off"
            if exhausted:
                grow = False
                self._shrink(facts)
                compile = "off" if facts.checkpointing else compile
            facts.compiled, facts.compile_seconds = False, 0.0
            self.progress = None

    def _shrink(self, facts: PassFacts) -> None:
        """Ask for less memory: half the micro-batch, then checkpointing."""
        torch.cuda.empty_cache()
        if facts.micro_batch > 1:
            facts.micro_batch //= 2
            todo = f"passes of {facts.micro_batch} windows"
        elif self.backward and not facts.checkpointing and self.settings.checkpointing == "auto":
            facts.checkpointing = True
            todo = "checkpointing of each block"
        else:
            raise UserError(
                f"a window of {self.tokens.shape[1]} tokens does not fit the memory of {self.device}; use a smaller "
                f"--seqlen, a larger --max-memory, or --checkpointing on"
            )
        warnings.warn(f"{self.device} ran out of memory: calibrating from the start with {todo}", stacklevel=3)

    def _attempt(self, facts: PassFacts, grow: bool, compile: str) -> fk.collect_statistics:
        self.decoder = find_decoder(self.model)
        self.generator = self._label_generator()
        done, sums = (0, None) if self.progress is None else (self.progress.done, self.progress.sums)
        bar = tqdm(total=len(self.tokens), desc=self.label, unit="seq", disable=True if self.label is None else None)
        with bar, self.beside, fk.collect_statistics(self.modules, sums) as collected:
            bar.update(done)
            for size in self._sizes(facts, grow, compile, done, collected):
                done += size
                bar.update(size)
        return collected

    def _sizes(
        self, facts: PassFacts, grow: bool, compile: str, done: int, collected: fk.collect_statistics
    ) -> Iterator[int]:
        """Run all passes; yields the windows of each. The first is not compiled: it shows what memory a window takes,
        and which modules share an input.
        """
        base = self._reset_peak()
        if done < len(self.tokens):
            with self._checkpointing(facts.checkpointing or compile == "on"):  # uncompiled activations are larger
                done += (size := self._pass(done, 1 if grow else facts.micro_batch))
            yield size
        if grow:
            facts.micro_batch = min(self._micro_batch(base), len(self.tokens) - done or 1)
        compiled, seen = _Compiled([*self.blocks, *_norms_beside(self.model, self.path)], self.modules.values()), {}
        seconds: dict[bool, list[float]] = {True: [], False: []}  # of the next passes, by whether compiled
        kept = time.monotonic()
        with self._checkpointing(facts.checkpointing):
            while done < len(self.tokens):
                whole = len(self.tokens) - done >= facts.micro_batch
                if not facts.compiled and self._should_compile(compile, seconds[False], done, facts.micro_batch):
                    facts.compiled, seen = True, _whole_counts(collected, done * self.tokens.shape[1])
                on = facts.compiled and whole
                with compiled.on(on), self._timed(seconds[on], whole):
                    done += (size := self._pass(done, facts.micro_batch))
                yield size
                if self.keep is not None and time.monotonic() - kept >= KEEP_SECONDS:
                    self.keep(Progress(done, facts, collected, self._generator_state()))
                    kept = time.monotonic()
        if facts.compiled and not seen.items() <= _whole_counts(collected, done * self.tokens.shape[1]).items():
            raise _CompileError("compiled blocks do not show all inputs of their modules")
        if len(seconds[True]) > 1:
            facts.compile_seconds = max(0.0, seconds[True][0] - seconds[True][1])

    def _label_generator(self) -> torch.Generator | None:
        if self.label_seed is None:
            return None
        generator = torch.Generator().manual_seed(self.label_seed)
        if self.progress is not None:
            generator.set_state(self.progress.generator)
        return generator

    def _generator_state(self) -> Tensor | None:
        return None if self.generator is None else self.generator.get_state()

    def _pass(self, start: int, size: int) -> int:
        """One pass over the windows from `start` on; returns how many there were."""
        ids = self.tokens[start : start + size].to(self.device)
        if self.backward:
            backward_of_summed_loss(self.model, self.decoder, ids, self.generator)
        else:
            with torch.no_grad():
                self.decoder(input_ids=ids, use_cache=False)
        return len(ids)

    @contextmanager
    def _timed(self, seconds: list[float], whole: bool) -> Iterator[None]:
        """Add the seconds of one of the first two whole passes of a kind; later ones do not wait for the device."""
        if not whole or len(seconds) > 1:
            yield
            return
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        seconds.append(time.perf_counter() - start)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _should_compile(self, compile: str, seconds: list[float], done: int, micro_batch: int) -> bool:
        if compile != "auto" or self.device.type != "cuda" or len(seconds) < 2:
            return compile == "on"
        return seconds[1] * _COMPILE_GAIN * (len(self.tokens) - done) / micro_batch > _COMPILE_SECONDS

    def _reset_peak(self) -> int:
        """Bytes allocated, from where the peak of the first pass counts."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _micro_batch(self, base: int) -> int:
        """Windows that keep the device busy, as far as they fit beside `base` bytes."""
        if self.device.type != "cuda":
            return 1
        wanted = round(_BUSY / (self.model.config.get_text_config().hidden_size * self.tokens.shape[1]))
        window = torch.cuda.max_memory_allocated(self.device) - base
        return max(1, min(wanted, int(_SPARE * free_memory(self.device) / max(window, 1))))

    def _checkpointing(self, on: bool) -> AbstractContextManager[None]:
        """Run each block again in the backward pass instead of keeping its activations."""
        if not on or not self.backward:
            return nullcontext()
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return replaced("forward", {block: partial(run, block.forward) for block in self.blocks})


def _whole_counts(collected: fk.collect_statistics, tokens: int) -> dict[str, int]:
    """name -> how many times a module saw each of so many tokens; without experts, which see some of them."""
    counts = {name: layer.n_tokens for name, layer in collected.items()}
    return {name: count // tokens for name, count in counts.items() if count and count % tokens == 0}


class _CompileError(Exception):
    """A block could not be compiled; one line."""


def _call(block: nn.Module, *args, **kwargs):
    return block._call_impl(*args, **kwargs)


@cache
def _call_of(structure: Hashable) -> Callable:
    """_call() with code of its own for each structure.

    The compiler keeps what it made by the code, up to eight times for each, and compares no hooks: so calls are neither
    mixed up with other compiled ones, of the block or of one with other hooks, nor does one model use up the places of
    the next.
    """
    return FunctionType(_call.__code__.replace(), globals())


def _norms_beside(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules of vectors alone that lie beside the blocks: uncompiled, the last norm holds five copies in fp32."""
    beside = model.get_submodule(path.rpartition(".")[0]).children()
    dims = {module: {parameter.dim() for parameter in module.parameters()} for module in beside}
    return [module for module, found in dims.items() if found == {1}]


class _Compiled:
    """Compiled calls of blocks and norms, on for a pass at a time. Blocks of one structure, with hooks on the same
    modules, share one graph."""

    def __init__(self, blocks: Sequence[nn.Module], observed: Iterable[nn.Module]):
        self.blocks, self.observed = blocks, set(observed)
        self.calls: dict[nn.Module, Callable] | None = None

    @contextmanager
    def on(self, wanted: bool) -> Iterator[None]:
        if not wanted:
            yield
            return
        calls = self.calls
        if calls is None:
            own = {block: _call_of(self._structure(block)) for block in self.blocks}
            compiled = {call: torch.compile(call, dynamic=False) for call in own.values()}
            calls = {block: partial(compiled[call], block) for block, call in own.items()}
        try:
            with replaced("_compiled_call_impl", calls):
                yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler raises; a pass that ran before has nothing left to raise
            if self.calls is not None:
                raise
            raise _CompileError(one_line(error)) from error
        self.calls = calls

    def _structure(self, block: nn.Module) -> Hashable:
        """What blocks that share a graph have in common: their type, their weights, and which modules have hooks."""
        weights = tuple((name, weight.shape, weight.dtype) for name, weight in block.named_parameters())
        return type(block), weights, tuple(n for n, module in block.named_modules() if module in self.observed)
