"""The record of one pruning run, which `fwanda.json` holds."""

from __future__ import annotations

import copy
import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch

from ..config import PruneConfig
from ..errors import UserError, one_line, refuse_pipe, shown_path
from ..setting_checks import expect_path
from ..source_shares import SourceShare, parse_sources
from . import read_record

FILE_NAME = "fwanda.json"
ROW_BINS = 50  # bins of Report.row_histogram


@dataclass
class MatrixRow:
    """The result of one weight matrix.

    Attributes:
        name: module that owns the matrix. The weight is `name + ".weight"`, unless `tensor` is given.
        shape: (R, C). If the matrix was skipped, it may be the shape of a tensor of another rank, or (weights,) of a
            part of the model.
        asked: weights that the budget keeps.
        kept: weights that the mask keeps.
        kept_zero: weights that the mask keeps although they are zero.
        skipped: why the matrix was not pruned; None if it was.
        tensor, index: the matrix is `tensor[index]`, one slice (perhaps transposed) of a parameter of fused experts.
        zeros_before: zeros that the matrix held before it was pruned; None if it was skipped, and in records of older
            versions.
        wanda_disagreement: share, in [0, 1], of the R * C mask entries that differ from the mask of Wanda at the same
            sparsity. None if it was not measured: with an n:m pattern, or without statistics.
    """

    name: str
    shape: tuple[int, ...]
    asked: int
    kept: int
    kept_zero: int
    skipped: str | None = None
    tensor: str | None = None
    index: int | None = None
    wanda_disagreement: float | None = None
    zeros_before: int | None = None

    @property
    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def zeros(self) -> int:
        """Zeros in the matrix: the removed weights, and the kept ones that are zero."""
        return self.numel - self.kept + self.kept_zero


@dataclass(repr=False)
class Report:
    """The record of one pruning run. `fwanda.json` holds its to_dict().

    Attributes:
        config: all settings of the run, as JSON values.
        matrices: one row for each target matrix, and for each that was skipped.
        block_parameters: number of parameters in the decoder blocks.
        model_parameters: number of parameters in the whole model. Tied parameters count once.
        model_zeros: number of zeros in the whole model.
        perplexity: {source, dense, pruned, seqlen, windows, tokens_sha256, bos, tokenizer} for each evaluation text.
        seconds: stage -> seconds.
        peak_memory_bytes: peak memory of the run.
        energy: gross joules of calibration, budgets and pruning; or "not measured: <why>"; or, for under 2 s of work,
            "not resolved: <why>".
        energy_details: {"total": ..., "phases": {stage: ...}}. Each value is such a string, or a dict of gross and net
            joules by counter and by samples, watts, and a flag.
        versions: see versions().
        tokens_sha256: hash of the calibration tokens; None without calibration.
        bos: whether each window of the texts starts with BOS; None if the run read no text, or only token ids.
        warnings: the warnings of the run, one line each.
        omega_floored_rows: number of rows whose omega was raised to the floor; None if the method has no floor.
        domains: one dict for each calibration source and guard: its `source`; whether calibration reads that text
            (`calibrated`); whether these windows of it are not read by calibration (`unread`); the number of `windows`;
            and their mean loss in nats with the `dense` model, with Wanda's masks (`wanda`) and with the `pruned`
            model. A loss that was not measured or is not finite is None. Empty if no_check is set.
        passes: how calibration ran (micro_batch, compiled, checkpointing, compile_seconds); None without calibration.
        refit: {"blocks": n, "kept": k}: in k of n blocks the update of the weights was kept, because the held-out loss
            fell; the other blocks have their dense weights under the masks. None if updates are not tested.
        row_histogram: number of rows by the share of weights that they keep, over all pruned matrices. Bin i of
            ROW_BINS holds the shares in [i / ROW_BINS, (i + 1) / ROW_BINS); the last bin also holds 1. None in records
            of older versions.
        backends: op of fwanda_kernels -> the backend that comes first for it on the device of the run. None in records
            of older versions.
        engine: how text went through the model: "resident", all weights on one device; "streamed", a few decoder blocks
            at a time; "sharded", divided over the ranks.
        segment: decoder blocks that were on the device at a time; None if all were.
        bytes_loaded: of weights that were copied to the device, again and again; None if all stayed there.
        ranks: number of processes that shared the run.
    """

    config: dict
    matrices: list[MatrixRow]
    block_parameters: int
    model_parameters: int
    model_zeros: int
    perplexity: list[dict]
    seconds: dict[str, float]
    peak_memory_bytes: int
    energy: float | str
    energy_details: dict
    versions: dict
    tokens_sha256: str | None
    bos: bool | None
    warnings: list[str]
    omega_floored_rows: int | None
    domains: list[dict]
    passes: dict | None
    refit: dict | None = None
    row_histogram: list[int] | None = None
    backends: dict[str, str] | None = None
    engine: str = "resident"
    ranks: int = 1
    segment: int | None = None
    bytes_loaded: int | None = None

    def __repr__(self) -> str:
        count = sum(row.skipped is None for row in self.matrices)
        return f"<Report: {self.config.get('method')}, {self.sparsity['matrices']:.4f} zeros in {count} matrices>"

    @property
    def sparsity(self) -> dict[str, float]:
        """Shares of zeros: `asked` by the budgets and held by the pruned `matrices`, and held by the whole `model`."""
        pruned = [row for row in self.matrices if row.skipped is None]
        numel = sum(row.numel for row in pruned)
        return {
            "asked": _ratio(numel - sum(row.asked for row in pruned), numel),
            "matrices": _ratio(sum(row.zeros for row in pruned), numel),
            "model": _ratio(self.model_zeros, self.model_parameters),
        }

    @property
    def asked(self) -> float:
        """Share of the weights to remove that the settings name; where they name none, that of the budgets.

        Budgets may remove a little less: a weight is whole, and each row may have to keep some.
        """
        names = {name: self.config[name] for name in ("sparsity", "pattern") if self.config.get(name) is not None}
        try:
            return float(PruneConfig(**names).removed) if names else self.sparsity["asked"]
        except UserError:  # a record of another version
            return self.sparsity["asked"]

    @property
    def coverage(self) -> dict[str, float]:
        """Share of the parameters that pruned matrices hold: of the decoder `blocks`, and of the whole `model`."""
        numel = sum(row.numel for row in self.matrices if row.skipped is None)
        return {"blocks": _ratio(numel, self.block_parameters), "model": _ratio(numel, self.model_parameters)}

    @property
    def sources(self) -> tuple[SourceShare, ...]:
        """The calibration texts and their shares; none where the settings do not name them."""
        names = self.config.get("calibration")
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            return ()
        try:
            return parse_sources(tuple(names))
        except UserError:  # a record of another version
            return ()

    def to_dict(self) -> dict:
        """The record as JSON values, under stable keys. A perplexity that is not finite becomes "nan" or "inf"."""
        matrices = [
            {**asdict(row), "shape": list(row.shape), "sparsity": _ratio(row.zeros, row.numel)} for row in self.matrices
        ]
        perplexity = [{key: _json_number(value) for key, value in text.items()} for text in self.perplexity]
        own = {"matrices": matrices, "perplexity": perplexity}
        facts = {
            name: own[name] if name in own else copy.deepcopy(getattr(self, name)) for name in self.__dataclass_fields__
        }
        return {**facts, "sparsity": self.sparsity, "coverage": self.coverage}

    def to_json(self) -> str:
        """The text of `fwanda.json`: to_dict() as strict JSON, with one matrix a line.

        Raises:
            ValueError: a number is not finite where no report has such a number.
        """
        return _json_text(self.to_dict())

    def expect_valid(self) -> None:
        """Refuses values that load() would not read back, as Python code may leave them.

        Raises:
            UserError: naming what is wrong.
        """
        try:
            _read_text(self.to_json())
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
            raise UserError(f"the report is not as prune() made it: {one_line(error)}") from error

    @classmethod
    def from_dict(cls, data: dict) -> Report:
        """The inverse of to_dict(). It ignores derived numbers and computes them again.

        Raises:
            UserError: a key is missing, or holds a value that no report has.
        """
        facts = read_record.facts_of(data, row_bins=ROW_BINS)
        facts["matrices"] = [MatrixRow(**row) for row in facts["matrices"]]
        return cls(**facts)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Reads a report from `fwanda.json`, or from the folder that holds it.

        Raises:
            UserError: the file is missing, unreadable, not JSON, or not a report.
        """
        expect_path("report", path)
        path = Path(path)
        file = path / FILE_NAME if os.path.isdir(path) else path
        refuse_pipe(file, "the report")
        try:
            return _read_text(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            problem = f"the folder has no {FILE_NAME}" if os.path.isdir(path) else "no such file or folder"
            if (path / "cells").is_dir():
                problem = "the folder of a sweep, whose tables are results.md and results.csv"
            raise UserError(
                f"report {shown_path(path)}: {problem}; give a {FILE_NAME}, or the folder that holds it"
            ) from None
        except UserError as error:
            raise UserError(f"report {shown_path(file)}: {error}") from None
        except (OSError, ValueError, RecursionError, OverflowError) as error:
            raise UserError(
                f"report {shown_path(file)}: cannot be read as JSON: {one_line(error, 200)}; give a {FILE_NAME}"
            ) from None


def versions(device: torch.device | str | None = None) -> dict[str, str | None]:
    """Versions of the software and name of the device; None for a package that is not installed.

    Args:
        device: the device of the run. None is the GPU if there is one, else the CPU.

    Returns:
        {fwanda_kernels, torch, transformers, triton, python, device}.
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else f"{kind.type} {platform.machine()}"
    found = {package: _version(package) for package in ("torch", "transformers", "triton")}
    return {"fwanda_kernels": _kernels_version(), **found, "python": platform.python_version(), "device": name}


def first_backends(device: torch.device) -> dict[str, str]:
    """Op of fwanda_kernels -> the backend that comes first for it on a device; it may leave some calls to others."""
    from fwanda_kernels import backends

    return {op: names[device.type][0] for op, names in backends().items() if names.get(device.type)}


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _json_number(value):
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json_text(data: dict) -> str:
    """Strict JSON of a record: indented, but each matrix and the histogram on a line of its own."""
    parts = []
    for key, value in data.items():
        text = json.dumps(value, indent=1, allow_nan=False).replace("\n", "\n ")
        if key == "row_histogram":
            text = json.dumps(value)
        elif key == "matrices" and value:
            text = ",\n  ".join(json.dumps(row, allow_nan=False) for row in value)
            text = f"[\n  {text}\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _read_text(text: str) -> Report:
    """The inverse of Report.to_json()."""
    data = json.loads(text)
    # half a surrogate pair cannot be printed, and no record holds NaN or Infinity, which are no JSON
    json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    if isinstance(data, dict) and "lm_eval" in data:
        raise UserError("a cell of a sweep, and no report; the tables of a sweep are its results.md and results.csv")
    return Report.from_dict(data)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _kernels_version() -> str | None:
    try:
        from fwanda_kernels import __version__
    except ImportError:
        return None
    return __version__
