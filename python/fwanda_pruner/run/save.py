"""A pruned model on disk: its weights, its model card and its record in one folder."""

import warnings
from pathlib import Path

from ..config import PruneConfig, settings_of
from ..errors import UserError
from ..formats import dense
from ..formats.audit import Part, WrongZeros, ZeroCount
from ..formats.files import atomic_folder, remove_leftovers
from ..model.targets import is_multimodal
from ..report.card import model_card
from ..report.record import FILE_NAME, Report
from .stage import StageName, timed

_CARD_NAME = "README.md"


def save_pruned(model, tokenizer, report: Report, output: str | Path, *, overwrite: bool = False) -> None:
    """Writes a Hugging Face folder with `README.md` and `fwanda.json`, and checks the zeros in its files.

    A hidden folder beside `output` takes all files. It is renamed to `output` once they are checked and on disk. On any
    failure neither folder remains; with `overwrite`, the old folder comes back.

    Args:
        model: the pruned model; written in its own dtype.
        tokenizer: None writes none.
        report: its pruned `matrices` say how many zeros the files must hold. Its `seconds` gain the time of saving.
        output: the folder to be made. Missing parents are made.
        overwrite: replace a folder that is not empty.

    Raises:
        UserError: `output` cannot be written (see files.check_output()), or the disk becomes full or not writable.
        RuntimeError: a written matrix does not hold the zeros that the report lists.

    Warns:
        UserWarning: some matrices were not found in the files, so their zeros were not counted.
    """
    with atomic_folder(output, overwrite=overwrite, needed_bytes=dense.model_bytes(model)) as folder:
        with timed(report.seconds, StageName.SAVE):
            dense.write(folder, model, tokenizer)
        card = model_card(report, multimodal=is_multimodal(model))
        (folder / _CARD_NAME).write_text(card, encoding="utf-8")
        (folder / FILE_NAME).write_text(report.to_json(), encoding="utf-8")
        slices = {row.name: Part(row.tensor, row.index) for row in report.matrices if row.tensor is not None}
        not_found = dense.verify(folder, _expected_zeros(report), model=model, slices=slices)
    if not_found:
        warnings.warn(
            f"{output}: the zeros of {len(not_found)} matrices were not counted, because the files hold them under "
            f"unknown names; the first is {not_found[0]}",
            stacklevel=2,
        )


def verify_finished(output: str | Path, config: PruneConfig, *, model: str, statistics: str | None) -> None:
    """Checks that a folder is the result of a command, and that its files hold the zeros that its record lists.

    Matrices that the files hold under other names (fused experts) are not counted.

    Args:
        output: a folder of save_pruned().
        config: the settings of the command, resolved.
        model, statistics: what the command names.

    Raises:
        UserError: the folder is the result of other settings, or its files have changed.
    """
    remove_leftovers(output)
    report = Report.load(output)
    for key, value in _settings_to_compare(report, config, model, statistics).items():
        if report.config.get(key) != value:
            raise UserError(
                f"{output} is finished with {key} {report.config.get(key)!r}, this command has {value!r}; choose "
                f"another folder or pass --overwrite"
            )
    try:
        dense.verify(output, _expected_zeros(report))
    except WrongZeros as error:
        raise UserError(
            f"{output} has changed since it was written: {error}; pass --overwrite to write it again"
        ) from error


def _expected_zeros(report: Report) -> dict[str, ZeroCount]:
    """Name -> zeros and weights that the files must hold, for each pruned matrix."""
    return {
        row.name: ZeroCount(row.numel - row.asked + row.kept_zero, row.numel)
        for row in report.matrices
        if row.skipped is None
    }


def _settings_to_compare(report: Report, config: PruneConfig, model: str, statistics: str | None) -> dict:
    """The settings of a command that its record must repeat."""
    settings = {**config.without("energy"), "model": model, "statistics": statistics}
    ignored = {name for name in settings_of("place") if settings[name] in (None, "auto")}  # the record has the result
    if statistics is not None:
        ignored.update(settings_of("text", "fisher"))  # the statistics bring their own text
        if config.eval_seqlen == config.seqlen:  # the default follows the length of their windows
            settings["eval_seqlen"] = report.config.get("seqlen")
    return {name: value for name, value in settings.items() if name not in ignored}
