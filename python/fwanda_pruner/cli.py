"""The command line `fwanda`: runs a command, prints its result, and turns a failure into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from contextlib import nullcontext
from typing import NoReturn

from .arguments import build_parser
from .commands import Result
from .errors import OtherRankError, UserError, install_hint, is_lost_connection, one_line
from .interrupt import CODE, Interrupt, ignore
from .launch import Job, ended_if_stuck, is_rank, joined
from .terminal import discard, say, styled

# Folder of the code that reads environment variables -> how their names begin.
_VARIABLES = {"tqdm": "TQDM_", "_logging": "TORCH_LOGS", "_inductor": "TORCHINDUCTOR_", "huggingface_hub": "HF_"}
_HEAD, _TAIL = 1000, 300  # characters of a message that are always shown
_NO_MEMORY = re.compile("allocate memory|failed to map segment", re.IGNORECASE)  # of the dynamic loader
_HINTS = {  # RuntimeErrors that a user can fix, by name, because neither package is imported yet
    "BackendError": "",
    "OutOfMemoryError": "; use a smaller --micro-batch or --seqlen, or --device cpu",
}

# Modules that fwanda cannot do without -> what pip installs for them, as the extra `prune` of pyproject.toml.
NEEDED = {
    "transformers": "transformers>=4.57",
    "huggingface_hub": "huggingface_hub",
    "safetensors": "safetensors",
    "tqdm": "tqdm",
    "yaml": "pyyaml",
    "numpy": "numpy",
    "pynvml": "nvidia-ml-py",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit code.

    0: done. 1: a fault of fwanda. 2: a user's mistake. 130: Ctrl-C. 141: the reader of standard output went away.
    With FWANDA_TRACEBACK=1, an error that fwanda does not expect shows its traceback.
    """
    _take_any_text()
    _raise_no_warnings()
    warnings.showwarning = lambda message, *_args, **_kwargs: _warn(" ".join(str(message).split()))
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hides its retries; a failure is one line of ours
    # transformers imports torchao, which fwanda does not use; what torchao misses of another torch is no news here
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    interrupt = Interrupt()
    interrupt.install()
    try:
        return _run_rank(argv, interrupt) if is_rank() else _run(argv)
    except BrokenPipeError:
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as error:
        say(f"fwanda: {_interrupted(error)}")
        return CODE
    except Exception as error:
        if interrupt.came:
            say("fwanda: interrupted")
            return CODE
        if os.environ.get("FWANDA_TRACEBACK"):
            raise
        message, code = _explained(error)
        _say_error(message)
        return code


def _run_rank(argv: list[str] | None, interrupt: Interrupt) -> int:
    """Runs one rank of a command. A rank that fails does not return: torch would wait for ranks that are gone."""
    job = Job()
    try:
        with ended_if_stuck(lambda: _end(job, "interrupted", CODE)):
            return _run(argv, job)
    except KeyboardInterrupt as error:
        ignore()
        _end(job, _interrupted(error), CODE)
    except Exception as error:
        ignore()
        if interrupt.came:
            _end(job, "interrupted", CODE)
        if os.environ.get("FWANDA_TRACEBACK"):
            raise
        if is_lost_connection(error):
            _end(job, "the connection to another rank is lost", 1)
        _end(job, *_explained(error), own=not isinstance(error, OtherRankError))


def _end(job: Job, message: str, code: int, *, own: bool = False) -> NoReturn:
    """Ends this rank of a job that failed, with a line about it unless another rank prints one."""
    line = job.explain(message, own=own)
    with job.speaking():
        if line is not None:
            _say_error(line)
    os._exit(code)


def _interrupted(error: KeyboardInterrupt) -> str:
    return "; ".join(["interrupted", *map(str, error.args)])


def _say_error(message: str) -> None:
    say(f"{styled('fwanda: error', 'red', sys.stderr)}: {message}")


def _run(argv: list[str] | None, job: Job | None = None) -> int:
    try:
        args = build_parser()[0].parse_args(argv)
    except SystemExit as stop:  # of --help and --version, with their text
        return _print(Result(str(stop.code)))
    _check_folder()
    _check_backend()
    with joined(job, args):
        return _run_command(args)


def _run_command(args: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr) if getattr(args, "json", False) else nullcontext():
        result = args.run(args)
    return _print(result)


def _print(result: Result) -> int:
    """Prints what a command returns. If that fails, nothing is lost where the result is saved."""
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        print(result.text, end="\n" if result.text else "", flush=True)
        return 0
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        discard(sys.stdout)
        reason = f"standard output cannot be written ({getattr(error, 'strerror', None) or error})"
        if result.saved is None:
            raise UserError(f"{reason}; send it to another file or program") from error
        _warn(f"{reason}; {result.saved} is complete")
        return 0


def _warn(message: str) -> None:
    say(f"{styled('warning', 'yellow', sys.stderr)}: {message}")


def _explained(error: Exception) -> tuple[str, int]:
    """One line about an error, and the exit code."""
    name = type(error).__name__
    if isinstance(error, UserError):
        return _without_middle(" ".join(str(error).split())), 2
    if isinstance(error, MemoryError) or (isinstance(error, ImportError) and _NO_MEMORY.search(str(error))):
        return f"not enough memory ({one_line(error)}); free some, or raise the limit of this process (ulimit -v)", 2
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        return f"{error}; {install_hint(*(NEEDED.values() if module in NEEDED else [module]))}", 2
    if isinstance(error, RuntimeError) and name in _HINTS:
        return " ".join(str(error).split()) + _HINTS[name], 2
    if isinstance(error, OSError):
        return one_line(error), 2
    frames = traceback.extract_tb(error.__traceback__)
    if variable := _misset_variable(str(error), frames[-1]):
        return f"the environment variable {variable} cannot be used: {one_line(error, 100)}; unset it", 2
    known = [frame for frame in frames if _is_ours(frame) or _is_of_model(frame)]
    if known and _is_of_model(known[-1]):
        return (
            f"the model's own code fails at {_place(known[-1])} ({name}: {one_line(error)}); check with transformers "
            f"alone that the model runs on text; FWANDA_TRACEBACK=1 shows more"
        ), 2
    where = _place(frames[-1])
    return (
        f"unexpected {name} at {where}: {one_line(error)}; please report this with the command; "
        f"FWANDA_TRACEBACK=1 shows more"
    ), 1


def _misset_variable(message: str, frame: traceback.FrameSummary) -> str | None:
    """NAME=value of a setting of another package whose value the code of that package refuses, else None."""
    folder = os.path.basename(os.path.dirname(frame.filename))
    start = _VARIABLES.get(folder)
    given = os.environ.items() if start else ()
    return next((f"{k}={v}" for k, v in given if k.startswith(start) and v and v in message), None)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    kernels = importlib.util.find_spec("fwanda_kernels").submodule_search_locations
    return frame.filename.startswith(tuple(f"{folder}{os.sep}" for folder in (os.path.dirname(__file__), *kernels)))


def _is_of_model(frame: traceback.FrameSummary) -> bool:
    """Whether a frame runs a file of a model, as transformers and the repositories of models name them."""
    folder, file = os.path.split(frame.filename)
    return file.startswith("modeling_") and os.path.basename(folder) != "transformers"  # modeling_utils.py loads models


def _place(frame: traceback.FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _without_middle(message: str) -> str:
    """A message; of a very long one, which holds a long value of a flag, the middle is left out."""
    return message if len(message) <= _HEAD + _TAIL + 5 else f"{message[:_HEAD]} ... {message[-_TAIL:]}"


def _take_any_text() -> None:
    """Lets both streams write what their encoding lacks, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _raise_no_warnings() -> None:
    """Lets warnings be shown where PYTHONWARNINGS or -W asks for errors; other filters stay."""
    warnings.filters[:] = [given for given in warnings.filters if given[0] != "error"]
    warnings.filterwarnings("default", category=UserWarning, append=True)  # also makes the change take effect


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:  # torch itself would end the process
        raise UserError(f"the current folder cannot be used ({error.strerror}); change to another one") from error


def _check_backend() -> None:
    name = os.environ.get("FWANDA_BACKEND")
    if not name:
        return
    import fwanda_kernels

    try:
        with fwanda_kernels.use_backend(name):
            pass
    except ValueError as error:
        raise UserError(str(error)) from error
