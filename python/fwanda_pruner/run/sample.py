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
from ..errors import UserError
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

_KEYS = {"text", "model", "seed", "window"}  # of each line; --calibration reads the text alone


def check_sample_file(path: str | Path) -> None:
    """Refuses a file that write_sample() could not write, or that it did not write.

    Raises:
        UserError: the name does not end in .jsonl, the folder is missing or not writable, or another file has the name.
    """
    path = check_file(path, ".jsonl")
    if path.exists() and not _is_sample(path):
        raise UserError(f"--output {path} exists and was not written by fwanda sample; choose another name")


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
        ranks.check_same(lambda: facts)
        ranks.share(lambda: state.identify({**facts, "windows": ranks.division}))
        tokens, energy = stages.sampled(stage, engine, config, start, config.nsamples)
    if ranks.first:
        _write(model, tokenizer, output, tokens, config.seed)
    return stage.seconds.get(StageName.SAMPLE.value, 0.0), energy.result


def _write(model: nn.Module, tokenizer, output: str | Path, tokens: Tensor, seed: int) -> None:
    with atomic_file(output) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for window, ids in enumerate(tokens.tolist()):
            line = {"text": tokenizer.decode(ids, clean_up_tokenization_spaces=False)}
            line |= {"model": model.config.name_or_path, "seed": seed, "window": window}
            file.write(json.dumps(line) + "\n")


def _is_sample(path: Path) -> bool:
    """Whether the first line of a file is one of write_sample(); an empty file is nobody's."""
    try:
        with path.open(encoding="utf-8") as file:
            line = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(line, dict) and line.keys() == _KEYS
