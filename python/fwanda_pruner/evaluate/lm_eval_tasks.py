"""Tasks of lm-eval on a loaded model: the seven zero-shot tasks, MMLU, or any other, with lm-eval's own prompts."""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..engine.device import evaluating
from ..errors import UserError, has_control, install_hint, one_line, show
from ..model.arguments import expect_model, expect_tokenizer
from ..model.placement import blocks_lie_apart, is_sharded
from ..model.targets import check_dtypes
from ..setting_checks import check_value, expect_flags, expect_path, plain
from ..terminal import is_terminal
from .perplexity import check_ids

ZEROSHOT = ("boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa")
BATCH_SIZE = 8
_MOST = 1_000_000_000  # examples, and requests in one forward pass
_MMLU_SHOTS = 5
_PYTHON_SEED = 0  # this and the next are the defaults of lm-eval
_NUMPY_SEED = _FEWSHOT_SEED = 1234


def evaluate_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    batch_size: int = BATCH_SIZE,
    limit: int | None = None,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> dict:
    """Run tasks of lm-eval. The model, the tokenizer and the random states do not change.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer. lm-eval decides by it whether prompts begin with BOS.
        tasks: "zeroshot" (the seven of ZEROSHOT), "mmlu" (five-shot), names of lm-eval's tasks, or paths of YAML files
            in its format.
        batch_size: requests in one forward pass. It changes results by rounding only.
        limit: use only the first this many examples of each task and of each MMLU subject; None uses all.
        data_dir: folder with the data sets: the files of the repository ORG/NAME lie in its subfolder ORG/NAME. Nothing
            is downloaded then. None lets lm-eval download.
        progress: show progress bars if standard error is a terminal.

    Returns:
        A dict of JSON values:
        - "version" of lm-eval, "batch_size", "limit", "data_dir", "bos": whether prompts begin with BOS.
        - "tasks": task -> {metric: value, metric_stderr: its standard error, "version", "num_fewshot", "samples":
          examples used, "samples_total": examples there are}.
        - "zeroshot", if asked for: {"acc": mean accuracy of the seven tasks, "acc_stderr"}.
        - "mmlu", if asked for: the same keys as a task, and "tasks" with one entry a subject.
        A standard error is None if one example is all there is.

    Raises:
        UserError: the model or the tokenizer is none, the model is a wrapper of torch.compile or does not run with the
            dtypes of its weights, another argument is not allowed, lm-eval is not installed, a task is unknown, its
            data cannot be loaded, it fails in lm-eval, the tokenizer has tokens that the model lacks, or memory runs
            out.
    """
    expect_model(model)
    expect_tokenizer(tokenizer, needed=True)
    expect_flags(progress=progress)
    tasks, batch_size, limit = plain(tasks, list), plain(batch_size, int), plain(limit, int)
    check_tasks(tasks, batch_size=batch_size, limit=limit, data_dir=data_dir)
    check_place(model, tasks)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    expanded = [name for task in tasks for name in (ZEROSHOT if task == "zeroshot" else (task,))]
    names = list(dict.fromkeys(name for name in expanded if name != "mmlu"))
    with evaluating(model), _seeded(), _quiet(progress), _data_sets(data_dir):
        check_dtypes(model)
        parts = names, ["mmlu"] if "mmlu" in tasks else []
        loaded = [_load(parts[0]), _load(parts[1], shots=_MMLU_SHOTS)]
        lm = HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)
        bos = tokenizer.bos_token_id is not None and lm.tok_encode("a")[:1] == [tokenizer.bos_token_id]
        results: dict = {"version": lm_eval.__version__, "batch_size": batch_size, "limit": limit}
        results |= {"data_dir": None if data_dir is None else str(data_dir), "bos": bos}
        with _ids_checked(model, lm.tokenizer):
            results["tasks"], mmlu = (_run(lm, *part, limit) for part in zip(parts, loaded, strict=True))
    if "zeroshot" in tasks:
        results["zeroshot"] = mean_accuracy([results["tasks"][name] for name in ZEROSHOT])
    if mmlu:
        results["mmlu"] = {**mmlu.pop("mmlu"), "tasks": mmlu}
    return results


def check_place(model: nn.Module, tasks: Sequence[str]) -> None:
    """Refuses a model for the streamed or the sharded engine.

    Raises:
        UserError: its decoder blocks are not on the device of the rest, or divided over ranks.
    """
    if blocks_lie_apart(model) or is_sharded(model):
        where = "divided over ranks" if is_sharded(model) else "in RAM"
        raise UserError(
            f"the tasks of lm-eval ({', '.join(tasks)}) need all weights on the device, but the decoder blocks are "
            f"{where}; load the model by load_model(name, engine='resident')"
        )


def check_tasks(
    tasks: Sequence[str], *, batch_size: int = BATCH_SIZE, limit: int | None = None, data_dir: str | Path | None = None
) -> None:
    """Refuse arguments that evaluate_tasks() cannot serve; this needs no model.

    Raises:
        UserError: as for evaluate_tasks().
    """
    for flag, number in (("--batch-size", batch_size), ("--limit", 1 if limit is None else limit)):
        if type(number) is not int or not 1 <= number <= _MOST:
            raise UserError(f"{flag} must be an integer in [1, {_MOST}], got {show(number)}")
    check_value("tasks", plain(tasks, list), kind=list, choices=None)
    if not tasks:
        raise UserError(f"--tasks must name a task, got {show(tasks)}; for example zeroshot")
    if data_dir is not None:
        expect_path("data_dir", data_dir)
        if has_control(str(data_dir)) or not os.path.isdir(data_dir):
            problem = "no folder of this name" if not has_control(str(data_dir)) else "unprintable name"
            raise UserError(
                f"--eval-data must be a folder of data sets, ORG/NAME each, got {show(str(data_dir))}: {problem}"
            )
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"--tasks {','.join(tasks)} needs lm-eval; {install_hint('lm-eval>=0.4.13')}")
    for name in tasks:
        if name == "ppl":  # a name of `fwanda eval --tasks`, which does not come here
            raise UserError("tasks: perplexity (ppl) is no task here; name the texts to measure it on with eval")
        known = name == "zeroshot" or name in _manager().all_tasks
        if not known and Path(name).suffix == ".yaml" and not os.path.isfile(name):
            raise UserError(f"--tasks {name}: no such file")
        if not known and Path(name).suffix != ".yaml":
            raise UserError(
                "--tasks takes ppl, zeroshot, mmlu, names listed by `lm-eval ls tasks`, and .yaml files in its format, "
                f"got {name!r}"
            )


@cache
def _manager():
    """lm-eval's index of tasks. Making it takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _load(names: list[str], shots: int | None = None) -> dict:
    """Load tasks and groups with their data. `shots` is the number of few-shot examples; None: each task's own."""
    try:
        loaded = _manager().load(names)
    except UserError:
        raise
    except Exception as error:  # lm-eval raises any kind of error for a bad task file
        raise UserError(f"lm-eval cannot load {', '.join(names)}: {one_line(error)}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"{name} runs code that the model writes, which fwanda refuses; use lm-eval itself for it")
        own = task.get_config("num_fewshot") or 0
        task.set_config("num_fewshot", own if shots is None else shots)
        task.set_fewshot_seed(_FEWSHOT_SEED)
    return loaded


def _run(lm: Any, names: list[str], loaded: dict, limit: int | None) -> dict[str, dict]:
    """Run loaded tasks: name of each task and group -> its result."""
    from lm_eval import evaluate

    if not loaded["tasks"]:
        return {}
    try:
        output = evaluate(lm, loaded, limit=limit, log_samples=False)
        return {name: _result(name, metrics, output, loaded) for name, metrics in output["results"].items()}
    except UserError:
        raise
    except torch.OutOfMemoryError as error:
        raise UserError(f"the tasks do not fit the memory of {lm.device}; use a smaller --batch-size") from error
    except Exception as error:  # lm-eval and the code of a task raise any kind of error
        raise UserError(f"lm-eval cannot run {', '.join(names)}: {one_line(error)}") from error


def _result(name: str, metrics: dict, output: dict, loaded: dict) -> dict:
    """The metrics of a task or group without lm-eval's suffixes, with its version, shots and sample counts."""
    values = {
        key.removesuffix(",none"): None if value == "N/A" else value for key, value in metrics.items() if "," in key
    }
    leaves = [name] if name in loaded["tasks"] else [t.task_name for t in loaded["groups"][name].get_all_tasks()]
    counts, shots = [output["n-samples"][leaf] for leaf in leaves], {output["n-shot"][leaf] for leaf in leaves}
    return {
        **values,
        "version": output["versions"].get(name),
        "num_fewshot": shots.pop() if len(shots) == 1 else None,
        "samples": sum(count["effective"] for count in counts),
        "samples_total": sum(count["original"] for count in counts),
    }


def mean_accuracy(results: list[dict]) -> dict:
    """Average the accuracies of independent tasks, each task with the same weight.

    Args:
        results: of tasks, each with "acc" and "acc_stderr".

    Returns:
        {"acc": the mean, "acc_stderr": its standard error, or None if that of a task is None}.
    """
    errors = [result["acc_stderr"] for result in results]
    known = None not in errors
    return {
        "acc": sum(result["acc"] for result in results) / len(results),
        "acc_stderr": math.sqrt(sum(error**2 for error in errors)) / len(results) if known else None,
    }


@contextmanager
def _ids_checked(model: nn.Module, tokenizer: Any) -> Iterator[None]:
    """Inside the block, refuse token ids beyond the vocabulary before the model looks them up.

    Where the tokenizer has no such ids, nothing is looked at: each look waits for the device.
    """
    vocabulary = tokenizer.get_vocab().values() if hasattr(tokenizer, "get_vocab") else ()
    if max(vocabulary, default=math.inf) < model.get_input_embeddings().weight.shape[0]:
        yield
        return

    def check(_embedding, args, kwargs):
        check_ids(model, [*args, *kwargs.values()][0])

    with model.get_input_embeddings().register_forward_pre_hook(check, with_kwargs=True):
        yield


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the generators that some tasks shuffle their options with, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(_PYTHON_SEED)
    np.random.seed(_NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Keep standard output clean: what lm-eval prints goes to standard error if that is a terminal, else nowhere."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    stream = sys.stderr if progress and is_terminal(sys.stderr) else io.StringIO()
    try:
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _data_sets(folder: str | Path | None) -> Iterator[None]:
    """Make lm-eval read its data sets from a folder, if one is given, and turn loading errors into UserError."""
    import datasets

    load = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, **options):
        local = Path(folder or "", path)
        if folder is not None and "data_files" not in options:
            if not local.is_dir():
                raise UserError(
                    f"--eval-data {folder} has no folder {path}; `hf download --repo-type dataset {path} --local-dir "
                    f"{local}` fetches it"
                )
            path = str(local)
        try:
            return load(path, name, **options)
        except Exception as error:  # datasets raises errors of the network, the hub, its cache and every file format
            hint = "; --eval-data DIR reads it from a folder" if folder is None else ""
            raise UserError(f"cannot load the data set {path}: {one_line(error)}{hint}") from error

    datasets.load_dataset = load_dataset
    try:
        yield
    finally:
        datasets.load_dataset = load
