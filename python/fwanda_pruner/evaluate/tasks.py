"""Zero-shot tasks, MMLU, and whatever else lm-eval holds, with its own prompts, on a model that is already loaded."""

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

from ..errors import UserError, one_line
from .perplexity import evaluating

ZEROSHOT = ("boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa")
BATCH_SIZE = 8
_MMLU_SHOTS = 5
_RANDOM_SEED, _OTHER_SEED = 0, 1234  # lm-eval's own: of Python's generator; of numpy's and the few-shot examples


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
    """Run tasks of lm-eval; the model, the tokenizer and the random states are as before afterwards.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer; lm-eval's rule decides by it whether a prompt begins with BOS.
        tasks: "zeroshot" (the seven of ZEROSHOT), "mmlu" (five-shot), names of lm-eval, or YAML files of its format.
        batch_size: requests in a forward pass; rounding alone depends on it.
        limit: examples of each task and of each MMLU subject, the first ones; None: all.
        data_dir: a folder that holds the files of each data set repository ORG/NAME in ORG/NAME; nothing is then
            downloaded. None: lm-eval downloads.
        progress: show bars, where standard error is a terminal.

    Returns:
        JSON values: "version" (of lm-eval), "batch_size", "limit", "data_dir", "bos" (whether prompts begin with BOS);
        "tasks": task -> {metric: ..., metric_stderr: ..., "version", "num_fewshot", "samples": evaluated,
        "samples_total"}; with "zeroshot" {"acc": mean over the seven, "acc_stderr"}; with "mmlu" as for a task, and
        "tasks" inside. A standard error that one example does not give is None.

    Raises:
        UserError: lm-eval is not installed, a task is unknown or needs what is not there, or memory does not suffice.
    """
    check_tasks(tasks, batch_size=batch_size, limit=limit, data_dir=data_dir)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    wanted = [name for task in tasks for name in (ZEROSHOT if task == "zeroshot" else (task,))]
    names = list(dict.fromkeys(name for name in wanted if name != "mmlu"))
    with evaluating(model), _seeded(), _quiet(progress), _data_sets(data_dir):
        loaded = [_load(names), _load(["mmlu"] if "mmlu" in tasks else [], shots=_MMLU_SHOTS)]
        lm = HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)
        bos = tokenizer.bos_token_id is not None and lm.tok_encode("a")[:1] == [tokenizer.bos_token_id]
        facts: dict = {"version": lm_eval.__version__, "batch_size": batch_size, "limit": limit}
        facts |= {"data_dir": None if data_dir is None else str(data_dir), "bos": bos}
        facts["tasks"], mmlu = (_run(lm, part, limit) for part in loaded)
    if "zeroshot" in tasks:
        facts["zeroshot"] = _mean([facts["tasks"][name] for name in ZEROSHOT])
    if mmlu:
        facts["mmlu"] = {**mmlu.pop("mmlu"), "tasks": mmlu}
    return facts


def check_tasks(
    tasks: Sequence[str], *, batch_size: int = BATCH_SIZE, limit: int | None = None, data_dir: str | Path | None = None
) -> None:
    """Refuse what evaluate_tasks() cannot run, as far as that shows without a model.

    Raises:
        UserError: as evaluate_tasks().
    """
    for flag, number in (("--batch-size", batch_size), ("--limit", 1 if limit is None else limit)):
        if number < 1:
            raise UserError(f"{flag} must be at least 1, got {number}")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise UserError(f"--eval-data must be a folder of data sets, got {data_dir}")
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f'--tasks {",".join(tasks)} needs lm-eval: pip install "fwanda-kernels[eval]"')
    for name in tasks:
        known = name == "zeroshot" or name in _manager().all_tasks
        if not known and not (Path(name).suffix == ".yaml" and os.path.isfile(name)):
            raise UserError(
                "--tasks takes ppl, zeroshot, mmlu, what `lm-eval ls tasks` lists, and .yaml files of its format, "
                f"got {name!r}"
            )


@cache
def _manager():
    """lm-eval's index of tasks, which takes seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _load(names: list[str], shots: int | None = None) -> dict:
    """The tasks and groups of these names, with their data; shots: None leaves their number to each task."""
    try:
        loaded = _manager().load(names)
    except UserError:
        raise
    except Exception as error:  # files of tasks hold anything, and lm-eval raises whatever comes of it
        raise UserError(f"lm-eval cannot load {', '.join(names)}: {one_line(error)}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"{name} runs code that the model writes; run it by lm-eval itself")
        own = task.get_config("num_fewshot") or 0
        task.set_config("num_fewshot", own if shots is None else shots)
        task.set_fewshot_seed(_OTHER_SEED)
    return loaded


def _run(lm: Any, loaded: dict, limit: int | None) -> dict[str, dict]:
    """Results of tasks and of the groups that they form."""
    from lm_eval import evaluate

    if not loaded["tasks"]:
        return {}
    try:
        found = evaluate(lm, loaded, limit=limit, log_samples=False)
    except torch.OutOfMemoryError as error:
        raise UserError(f"the tasks do not fit the memory of {lm.device}; use a smaller --batch-size") from error
    return {name: _facts(name, metrics, found, loaded) for name, metrics in found["results"].items()}


def _facts(name: str, metrics: dict, found: dict, loaded: dict) -> dict:
    """The metrics of a task or group under plain names, and how they came about."""
    values = {
        key.removesuffix(",none"): None if value == "N/A" else value for key, value in metrics.items() if "," in key
    }
    leaves = [name] if name in loaded["tasks"] else [t.task_name for t in loaded["groups"][name].get_all_tasks()]
    counts, shots = [found["n-samples"][leaf] for leaf in leaves], {found["n-shot"][leaf] for leaf in leaves}
    return {
        **values,
        "version": found["versions"].get(name),
        "num_fewshot": shots.pop() if len(shots) == 1 else None,
        "samples": sum(count["effective"] for count in counts),
        "samples_total": sum(count["original"] for count in counts),
    }


def _mean(results: list[dict]) -> dict:
    """Mean accuracy, each task counting the same, and its standard error from those of the tasks."""
    errors = [result["acc_stderr"] for result in results]
    known = None not in errors
    return {
        "acc": sum(result["acc"] for result in results) / len(results),
        "acc_stderr": math.sqrt(sum(error**2 for error in errors)) / len(results) if known else None,
    }


@contextmanager
def _seeded() -> Iterator[None]:
    """The seeds that some tasks shuffle their options by; the random states of before afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(_RANDOM_SEED)
    np.random.seed(_OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Standard output is left to the caller: what lm-eval prints goes to a terminal's standard error or nowhere."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    stream = sys.stderr if progress and sys.stderr.isatty() else io.StringIO()
    try:
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _data_sets(folder: str | Path | None) -> Iterator[None]:
    """Within the block, lm-eval reads its data sets from a folder; one that is missing or broken is a UserError."""
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
        except Exception as error:  # any network, hub, cache or format error of `datasets` and what it is built on
            hint = "; --eval-data reads it from a folder" if folder is None else ""
            raise UserError(f"cannot load the data set {path}: {one_line(error)}{hint}") from error

    datasets.load_dataset = load_dataset
    try:
        yield
    finally:
        datasets.load_dataset = load
