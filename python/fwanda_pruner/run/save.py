"""A pruned model on disk: its weights, its model card and its record in one folder."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..config import PruneConfig, settings_of
from ..engine.ranks import Ranks
from ..errors import UserError, has_control, show
from ..formats import dense, masks, packed
from ..formats.audit import Part, WrongFiles, WrongZeros, ZeroCount
from ..formats.files import atomic_folder, remove_leftovers, system_error, trial_folder
from ..formats.source import carry_files, lost_tensors
from ..model.arguments import expect_model, expect_type
from ..model.names import check_names
from ..model.packed import packed_weights
from ..model.placement import is_sharded
from ..model.plain import check_shared
from ..model.targets import is_multimodal
from ..notes import warn
from ..report.card import model_card
from ..report.record import FILE_NAME, Report
from ..setting_checks import expect_flags, expect_path
from ..stage_names import StageName
from .stage import timed

_CARD_NAME = "README.md"
_FORMATS = {"dense": dense, "packed": packed, "masks": masks}


def check_savable(model, tokenizer=None, output: str | Path | None = None) -> None:
    """Tries before a run what save_pruned() does after it: writes all but the weights, and removes it again.

    Args:
        model: the model to be pruned.
        tokenizer: None, or one that cannot be saved at all, is left out.
        output: where the pruned model will be saved; None: only the model and the tokenizer are tried, if there is a
            temporary folder for that.

    Raises:
        UserError: no folder can be made at `output`, or the config, the generation config or the tokenizer cannot be
            saved or could not be loaded again.
    """
    try:
        with trial_folder(Path(tempfile.gettempdir(), "fwanda-trial") if output is None else output) as folder:
            dense.write_settings(folder, model, tokenizer if hasattr(tokenizer, "save_pretrained") else None)
    except (OSError, UserError) as error:  # gettempdir() raises OSError where no folder can be written
        refused = isinstance(error, OSError) or system_error(error.__cause__) not in (0, errno.ENOENT)
        if output is not None or not refused:  # ENOENT: a file of the tokenizer is gone
            raise


def save_pruned(
    model, tokenizer, report: Report, output: str | Path, *, overwrite: bool = False, note: str | None = None
) -> None:
    """Writes a Hugging Face folder with `README.md` and `fwanda.json`, and checks the zeros in its files.

    Licences, notices, chat templates and settings of image processors of the model's folder are copied unchanged.

    A hidden folder beside `output` takes all files. It is renamed to `output` once they are checked and on disk. On any
    failure neither folder remains; with `overwrite`, the old folder comes back. If several ranks share a run, the
    first writes; of a sharded model, the others give it their shares.

    Args:
        model: the pruned model; written in its own dtype. One that is packed is written packed, and its `report.config`
            says so.
        tokenizer: None writes none.
        report: its pruned `matrices` say how many zeros the files must hold. Its `seconds` gain the time of saving,
            unless they have one: a copy keeps the seconds of the run. Its `warnings` gain what the new folder lacks of
            the old one.
        output: the folder to be made. Missing parents are made.
        overwrite: replace a folder that is not empty.
        note: what else was done to the model, such as fine-tuning after prune(), which the numbers of the report do not
            show: a sentence for the card and for `warnings` of the record.

    Raises:
        UserError: `output` cannot be written (see files.check_output()), the disk becomes full or not writable, or the
            settings or the tokenizer cannot be saved (see check_savable()); or an argument is of another type, the
            model lacks a tensor of its class, or two of its modules or tensors are one.
        RuntimeError: a written matrix does not hold the zeros that the report lists.

    Warns:
        UserWarning: tensors or files of the folder that the model was loaded from are not in the new one; or some
            matrices were not found in the files, so their zeros were not counted.
    """
    model = getattr(model, "_orig_mod", model)  # a wrapper of torch.compile has the same weights
    expect_model(model)
    expect_type("report", report, Report, "give what prune() returned", needed=True)
    expect_type("note", note, str, "give one sentence of text")
    expect_path("output", output)
    expect_flags(overwrite=overwrite)
    check_names(model)
    if not is_sharded(model):  # shard_() has checked it
        check_shared(model)
    report.expect_valid()
    if note is not None and has_control(note):
        raise UserError(f"note must be one line of printable text, got {show(note)}")
    if report.config.get("save") in (None, "dense") and next(packed_weights(model), None) is not None:
        report.config = {**report.config, "save": "packed"}
    form = _format_of(report)
    if is_sharded(model) and form is not dense:
        raise UserError(
            f"a sharded model is saved in the form dense, got {report.config['save']}; use fwanda pack on it"
        )
    if not Ranks.current().first:
        dense.give_shares(model)
        return
    with _advice_on_zeros(), atomic_folder(output, overwrite=overwrite, needed_bytes=form.model_bytes(model)) as folder:
        with timed(taken := {}, StageName.SAVE):
            form.write(folder, model, tokenizer)
            unread = carry_files(model, tokenizer, folder)
        notes = [f"{', '.join(unread)} could not be read and copied"] if unread else []
        notes += filter(None, [lost_tensors(model, folder)])
        new = [text for text in [*notes, *([note] if note else [])] if text not in report.warnings]
        seconds = dict(report.seconds)
        seconds.setdefault(StageName.SAVE.value, taken[StageName.SAVE.value])  # a copy keeps the seconds of the run
        saved = replace(report, seconds=seconds, warnings=[*report.warnings, *new])
        card = model_card(saved, multimodal=is_multimodal(model), note=note)
        (folder / _CARD_NAME).write_text(card, encoding="utf-8")
        (folder / FILE_NAME).write_text(saved.to_json(), encoding="utf-8")
        not_found = form.verify(folder, _expected_zeros(report), model=model, slices=_slices(report))
        report.seconds = seconds
    report.warnings += new
    for text in notes:
        warn(text)
    if not_found:
        warn(
            f"{output}: the zeros of {len(not_found)} matrices were not counted, because the files hold them under "
            f"unknown names; the first is {not_found[0]}"
        )


@contextmanager
def _advice_on_zeros() -> Iterator[None]:
    """Adds to an error about zeros what helps a user who has trained the model."""
    try:
        yield
    except WrongZeros as error:
        advice = "if the model was trained after pruning, train it inside `with fwanda_pruner.keep_zeros(model):`"
        error.args = (f"{error}; {advice}",)
        raise


def verify_finished(output: str | Path, config: PruneConfig, *, model: str, statistics: str | None) -> str:
    """Checks that a folder is the result of a command, and that its files hold the zeros that its record lists.

    All files of weights must be there. Matrices that the files hold under other names (some fused experts) are not
    counted.

    Args:
        output: a folder of save_pruned().
        config: the settings of the command, resolved.
        model, statistics: what the command names.

    Returns:
        What was checked, for people.

    Raises:
        UserError: the folder is the result of other settings, or its files have changed.
    """
    remove_leftovers(output)
    report = Report.load(output)
    written = {"save": "dense", "offload": False} | report.config  # older records lack these
    for key, value in _settings_to_compare(report, config, model, statistics).items():
        if written.get(key) != value:
            raise UserError(
                f"{output} is finished with {key} {written.get(key)!r}, this command has {value!r}; choose "
                f"another folder or pass --overwrite"
            )
    expected, form = _expected_zeros(report), _format_of(report)
    try:
        if not expected:
            raise WrongFiles(f"its {FILE_NAME} lists no pruned matrix")
        not_counted = len(form.verify(output, expected, slices=_slices(report)))
        unknown = masks.load_masks(output).keys() - {row.name for row in report.matrices} if form is masks else ()
        if unknown:
            raise WrongFiles(
                f"its {masks.FILE_NAME} holds a mask of {min(unknown)}, which its {FILE_NAME} does not list"
            )
    except WrongFiles as error:
        raise UserError(
            f"{output} has changed since it was written: {error}; pass --overwrite to write it again"
        ) from error
    checked = f"{len(expected) - not_counted} matrices in its files have as many zeros as its report says"
    return f"{checked}; {not_counted} with other names there were not counted" if not_counted else checked


def _format_of(report: Report):
    """The module of the format that the record names; older records name none."""
    name = report.config.get("save") or "dense"
    if not isinstance(name, str) or name not in _FORMATS:
        raise UserError(f"config['save'] of the report must be one of {', '.join(_FORMATS)}, got {show(name)}")
    return _FORMATS[name]


def _expected_zeros(report: Report) -> dict[str, ZeroCount]:
    """Name -> zeros and weights that the files must hold, for each pruned matrix."""
    return {
        row.name: ZeroCount(row.numel - row.asked + row.kept_zero, row.numel)
        for row in report.matrices
        if row.skipped is None
    }


def _slices(report: Report) -> dict[str, Part]:
    """Name -> where the model holds a matrix that is one slice of a parameter."""
    return {row.name: Part(row.tensor, row.index) for row in report.matrices if row.tensor is not None}


def _settings_to_compare(report: Report, config: PruneConfig, model: str, statistics: str | None) -> dict:
    """The settings of a command that its record must repeat."""
    settings = {**config.without("energy"), "model": model, "statistics": statistics}
    ignored = {name for name in settings_of("place") if settings[name] in (None, "auto")}  # the record has the result
    if statistics is not None:
        ignored.update(settings_of("text", "fisher"))  # the statistics bring their own text
        if config.eval_seqlen == config.seqlen:  # the default follows the length of their windows
            settings["eval_seqlen"] = report.config.get("seqlen")
    return {name: value for name, value in settings.items() if name not in ignored}
