"""Writes packed copies of dense folders, and dense copies of packed ones.

Of the converted model, one file is in memory at a time. The files of the source are mapped, not read into memory.
Fused experts that files hold one by one are the exception: transformers splits and joins them in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import UserError
from ..formats import dense
from ..formats.audit import WrongZeros, stored_tensors
from ..formats.files import atomic_folder, check_output
from ..formats.source import carry_files
from ..model.checks import refuse_pipes
from ..model.lazy import LazyTensor
from ..model.load import is_packed, load_model, load_packed
from ..model.pack import pack_lazily_, unpack_lazily_
from ..notes import warn
from ..progress import begin_stage, planned, progress_bar
from ..report.record import FILE_NAME, Report
from ..stage_names import StageName
from .save import save_pruned

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as the files name them


def pack_folder(source: str | Path, output: str | Path, *, force: bool = False, overwrite: bool = False) -> str:
    """Write a packed copy of the folder of a pruned model.

    Args:
        source: a dense folder. Removed weights are those that are +0.0.
        output: the folder to be made.
        force: also pack matrices that are not sparse.
        overwrite: replace a folder that is not empty.

    Returns:
        One line about the sizes of both folders.

    Raises:
        UserError: `source` is packed already, cannot be loaded, or is dense and not `force`; or `output` cannot be
            written.
    """
    _check_folder(source)
    if is_packed(source):
        raise UserError(f"{source} is packed already; fwanda unpack {source} --output DIR writes it dense")
    return _convert(source, output, "packed", force=force, overwrite=overwrite)


def unpack_folder(source: str | Path, output: str | Path, *, overwrite: bool = False) -> str:
    """Write a dense copy of a packed folder; arguments, result and errors as pack_folder()."""
    _check_folder(source)
    if not is_packed(source):
        raise UserError(f"{source} is not packed; give a folder that fwanda pack or --save packed wrote")
    return _convert(source, output, "dense", force=False, overwrite=overwrite)


def _check_folder(source: str | Path) -> None:
    refuse_pipes(source)
    if not Path(source, "config.json").is_file():
        if Path(source).is_file():
            raise UserError(f"model {str(source)!r} is a file; expected the folder of a model")
        problem = "the folder has no config.json" if Path(source).is_dir() else "no such folder"
        raise UserError(f"model {str(source)!r}: {problem}; give the folder that a run of fwanda prune wrote")


def _convert(source: str | Path, output: str | Path, save: str, *, force: bool, overwrite: bool) -> str:
    check_output(output, overwrite=overwrite, inputs=[str(source)])
    with planned([StageName.LOAD.title, StageName.SAVE.title]):
        begin_stage(StageName.LOAD.title)
        model, tokenizer = (load_model if save == "packed" else load_packed)(source, device="cpu")
        _keep_dtypes(model, source)
        report = Report.load(source) if Path(source, FILE_NAME).is_file() else None
        before = _weight_bytes(source)
        begin_stage(StageName.SAVE.title)
        if save == "packed":
            pack_lazily_(model, force=force)
        else:
            unpack_lazily_(model)
        if report is not None:
            report.config = {**report.config, "save": save}
            try:
                with _conversion_shown(model, f"write {save}"):
                    save_pruned(model, tokenizer, report, output, overwrite=overwrite)
            except WrongZeros as error:
                raise UserError(
                    f"{source}: its weights are not those of its {FILE_NAME} ({error}); move {FILE_NAME} out of the "
                    f"folder to convert the weights as they are"
                ) from error
        else:
            with atomic_folder(output, overwrite=overwrite, needed_bytes=dense.model_bytes(model)) as folder:
                with _conversion_shown(model, f"write {save}"):
                    dense.write(folder, model, tokenizer)
                unread = carry_files(model, tokenizer, folder)
            if unread:
                warn(f"{', '.join(unread)} could not be read and copied")
    after = _weight_bytes(output)
    return f"{output}: weights take {after / 1e6:.1f} MB, {after / before:.1%} of the {before / 1e6:.1f} MB in {source}"


@contextmanager
def _conversion_shown(model, label: str) -> Iterator[None]:
    """Inside the block, a bar counts the tensors that are converted, each as it is written."""
    waiting = [tensor for tensor in (*model.parameters(), *model.buffers()) if isinstance(tensor, LazyTensor)]
    with progress_bar(total=len(waiting), label=label, unit="tensors") as bar:
        for tensor in waiting:
            tensor.make = _counted(tensor.make, bar)
        yield


def _counted(make: Callable[[], Tensor], bar) -> Callable[[], Tensor]:
    def made() -> Tensor:
        tensor = make()
        bar.update()
        return tensor

    return made


def _keep_dtypes(model, folder: str | Path) -> None:
    """Give tensors of a model the dtypes that they have in the files of its folder; transformers loads all in one."""
    held, by_file = model.state_dict(keep_vars=True), defaultdict(list)
    for name, file in stored_tensors(folder).items():
        if name in held:
            by_file[file].append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                stored = _FLOATS.get(tensors.get_slice(name).get_dtype(), held[name].dtype)
                if stored != held[name].dtype:
                    held[name].data = tensors.get_tensor(name)


def _weight_bytes(folder: str | Path) -> int:
    """Size of the files that hold the weights of a model; others may lie beside them."""
    return sum(file.stat().st_size for file in set(stored_tensors(folder).values()))
