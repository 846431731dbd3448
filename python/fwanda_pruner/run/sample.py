"""Text that a model writes itself, as a file for --calibration."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor, nn

from ..config import PruneConfig
from ..engine.all_weights import check_finite, fingerprint
from ..engine.device import device_rules, evaluating, model_device
from ..engine.engine import make_engine
from ..engine.ranks import Ranks
from ..errors import UserError, one_line, refuse_pipe, show
from ..formats.files import atomic_file, check_file
from ..model.plain import check_plain
from ..model.targets import find_targets
from ..notes import recording, showing
from ..report.record import versions
from ..stage_names import StageName
from ..text.own_text import start_token_of
from . import stages
from .stage import Stages
from .state import RunState

_KEYS = {"text", "model", "seed", "window"}  # of each line, and settings; --calibration reads the text alone
_SETTINGS = ("seed", "seqlen", "start_token", "dtype")  # that each line holds


def check_sample_file(path: str | Path) -> None:
    """Refuses a file that write_sample() could not write, or that it did not write.

    Raises:
        UserError: the name does not end in .jsonl, the folder is missing or not writable, or another file has the name.
    """
    path = check_file(path, ".jsonl")
    if path.exists() and not _is_sample(path):
        raise UserError(f"--output {path} exists and was not written by fwanda sample; choose another name")


def verify_finished(path: str | Path, config: PruneConfig, *, model: str) -> None:
    """Checks that a file is the result of a command, by the settings and the number of its lines.

    Args:
        path: a file that check_sample_file() accepts.
        config: the settings of the command.
        model: that the command names.

    Raises:
        UserError: the file is the result of other settings, or has changed.
    """
    expected = {"model": model, **{name: getattr(config, name) for name in _SETTINGS}}
    if config.dtype is None:
        del expected["dtype"]  # that of the model
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        whole = all(line["window"] == number and isinstance(line["text"], str) for number, line in enumerate(lines))
        found = [{name: line.get(name) for name in expected} for line in lines]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} has changed since it was written ({one_line(error)}); remove it") from error
    if not whole:
        raise UserError(f"{path} has changed since it was written: its windows are not in order; remove it")
    for line in found:
        for name, value in expected.items():
            _check_same(path, name, line[name], value)
    _check_same(path, "nsamples", len(lines), config.nsamples)


def _check_same(path: str | Path, name: str, written, value) -> None:
    if written != value:
        raise UserError(
            f"{path} is finished with {name} {show(written)}, this command has {show(value)}; choose another file, or "
            f"leave --resume out to replace it"
        )


def write_sample(
    model: nn.Module,
    tokenizer,
    output: str | Path,
    *,
    config: PruneConfig,
    state: RunState | None = None,
    progress: bool = True,
) -> tuple[float, float | str]:
    """Writes windows of the model's own text, one {"text": ...} a line. The file appears whole or not at all.

    Special tokens that the model draws stay in the text.

    Args:
        model, tokenizer: a causal language model and its tokenizer.
        output: the file, see check_sample_file().
        config: nsamples, seqlen, seed, start_token, max_memory and energy count.
        state: keeps the windows, so that an interrupted run does not draw them again.
        progress: show a bar or lines of progress on standard error.

    Returns:
        Seconds of sampling, and its gross joules or the reason that there are none.

    Raises:
        UserError: see check_sample_file() and sample_tokens(); or there is no tokenizer.
    """
    Ranks.current().share(lambda: check_sample_file(output))
    if tokenizer is None:
        raise UserError("the model has no tokenizer, which turns sampled tokens into text; add its files to the folder")
    check_plain(model)
    device, state = model_device(model), state or RunState()
    ranks = Ranks.current()
    stage = Stages(state, device, ranks)
    with recording(stage.notes), showing(ranks.first), evaluating(model), device_rules(model, config):
        start = start_token_of(model, tokenizer, config.start_token)
        engine = make_engine(model, find_targets(model)[0], config, progress=progress)
        check_finite(engine)
        text = {"nsamples": config.nsamples, "seqlen": config.seqlen, "seed": config.seed}
        facts = {**text, "start_token": start, "weights": fingerprint(engine), **versions(device)}
        facts["dtype"] = str(model.dtype).removeprefix("torch.")  # the fingerprint is the same in every dtype
        ranks.check_same(lambda: facts)
        ranks.share(lambda: state.identify({**facts, "started": ranks.started}))
        tokens, energy = stages.sampled(stage, engine, config, start, config.nsamples)
    if ranks.first:
        _write(model, tokenizer, output, tokens, config)
    return stage.seconds.get(StageName.SAMPLE.value, 0.0), energy.result


def _write(model: nn.Module, tokenizer, output: str | Path, tokens: Tensor, config: PruneConfig) -> None:
    settings = {name: getattr(config, name) for name in _SETTINGS} | {"dtype": str(model.dtype).removeprefix("torch.")}
    with atomic_file(output) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for window, ids in enumerate(tokens.tolist()):
            line = {"text": tokenizer.decode(ids, clean_up_tokenization_spaces=False)}
            line |= {"model": model.config.name_or_path, "window": window, **settings}
            file.write(json.dumps(line) + "\n")


def _is_sample(path: Path) -> bool:
    """Whether the first line of a file is one of write_sample(); an empty file is nobody's."""
    try:
        refuse_pipe(path)
        with path.open(encoding="utf-8") as file:
            line = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(line, dict) and _KEYS <= line.keys() <= _KEYS | set(_SETTINGS)
