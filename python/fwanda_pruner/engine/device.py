"""Where a model lies, and the rules that hold there during a run: mode, memory limit, determinism."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ..config import PruneConfig
from ..errors import UserError, one_line
from ..formats.files import TOO_MANY_FILES, system_error
from ..model.in_use import in_use


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module into evaluation mode inside the block, and back into its own mode afterwards.

    Outputs have names inside, also where the configuration asks for tuples (return_dict=False). Modes of torch that the
    caller may have set have no effect inside: inference mode, no_grad and autocast.

    Raises:
        UserError: another thread uses the model.
    """
    with in_use(model):
        plain = torch.autocast(model_device(model).type, enabled=False)
        modes = {module: module.training for module in model.modules()}
        configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        tuples = [config for config in configs.values() if getattr(config, "return_dict", True) is False]
        model.eval()
        for config in tuples:
            config.return_dict = True
        try:
            with torch.inference_mode(False), torch.enable_grad(), plain:
                yield
        finally:
            for config in tuples:
                config.return_dict = False
            for module, training in modes.items():
                module.training = training


def writing(weights: Iterable[Tensor]) -> AbstractContextManager:
    """A context in which weights may be changed in place, those made under torch.inference_mode() too."""
    return torch.inference_mode() if any(weight.is_inference() for weight in weights) else nullcontext()


@contextmanager
def device_rules(model: nn.Module, config: PruneConfig) -> Iterator[None]:
    """Applies config.max_memory and config.deterministic inside the block.

    Raises:
        UserError: the memory cannot be limited, or the model uses an operation that has no deterministic form.
    """
    with _limited_memory(model, config), _deterministic_algorithms(config.deterministic):
        yield


@contextmanager
def machine_limits() -> Iterator[None]:
    """Turns errors at the limits of this machine into a UserError: no memory on the CPU, or too many open files."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if system_error(error) in TOO_MANY_FILES:
            raise UserError("too many files are open; close some, or raise the limit (ulimit -n)") from error
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            raise UserError(
                f"not enough memory on the CPU ({one_line(error)}); free some, or use a smaller --micro-batch or "
                f"--seqlen"
            ) from error
        raise


class _Determinism:
    """torch's deterministic algorithms: a setting of the whole process, which runs in several threads may want at once.

    The first run switches it on, and the last one to end restores what was there before the first.
    """

    def __init__(self):
        self._lock, self._users, self._before = threading.Lock(), 0, (False, False)

    def begin(self) -> None:
        with self._lock:
            if not self._users:
                warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
                self._before = (torch.are_deterministic_algorithms_enabled(), warn_only)
                torch.use_deterministic_algorithms(True)
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                enabled, warn_only = self._before
                torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


_determinism = _Determinism()


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    _determinism.begin()
    try:
        yield
    except RuntimeError as error:
        if "determinis" not in str(error):
            raise
        raise UserError(f"--deterministic: {one_line(error)}") from error
    finally:
        _determinism.end()


@contextmanager
def _limited_memory(model: nn.Module, config: PruneConfig) -> Iterator[None]:
    """Keeps torch's allocations on the model's GPU within config.max_memory.

    Raises:
        UserError: the model is not on a GPU, or already takes that much.
    """
    limit, device = config.memory_limit, model_device(model)
    if limit is None:
        yield
        return
    if device.type != "cuda":
        raise UserError(f"--max-memory limits the memory of a GPU, but the model is on {device}; leave it out")
    if limit <= torch.cuda.memory_allocated(device):
        taken = torch.cuda.memory_allocated(device) / 2**30
        raise UserError(f"--max-memory {config.max_memory} is less than the {taken:.1f} GiB of the loaded model")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info(device)[1]), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
