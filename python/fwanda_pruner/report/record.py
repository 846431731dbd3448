"""The facts of one run: `fwanda.json`, the comparison table, and the closing summary."""

import json
import math
import platform
import reprlib
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch

from ..errors import UserError

FILE_NAME = "fwanda.json"
PROTOCOL = ("seqlen", "windows", "tokens_sha256", "bos", "tokenizer")


@dataclass
class MatrixRow:
    """What happened to one weight matrix.

    Attributes:
        name: module name; the weight is `name + ".weight"`, unless tensor is given.
        shape: (R, C); as stored where a tensor of another rank was skipped, (weights,) where a part of the model was.
        asked: weights the budget keeps.
        kept: weights the mask keeps.
        kept_zero: kept weights that are zero all the same.
        skipped: why the matrix was left alone, None if it was pruned.
        tensor, index: the matrix is `tensor[index]`, a slice (transposed or not) of a parameter of fused experts.
    """

    name: str
    shape: tuple[int, ...]
    asked: int
    kept: int
    kept_zero: int
    skipped: str | None = None
    tensor: str | None = None
    index: int | None = None

    @property
    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def zeros(self) -> int:
        """Zeros in the matrix: removed weights and kept ones that were zero."""
        return self.numel - self.kept + self.kept_zero


@dataclass
class Report:
    """Everything one pruning run reports; `fwanda.json` is its `to_dict`.

    Attributes:
        config: the full configuration of the run, JSON values only.
        matrices: one row for each target, skipped ones included.
        block_parameters: parameters of the decoder blocks.
        model_parameters: parameters of the whole model, tied ones counted once.
        model_zeros: zeros over the whole model.
        perplexity: {dense, pruned, seqlen, windows, tokens_sha256, bos, tokenizer}, None if not measured.
        seconds: stage -> seconds.
        peak_memory_bytes: peak memory of the run in bytes.
        energy: gross joules of calibration, budgets and pruning, or the string "not measured: <why>", or "not resolved:
            <why>" under 2 s.
        energy_details: {"total": ..., "phases": {stage: ...}}, each a dict of gross and net joules by counter and
            samples, watts and a flag, or such a string.
        versions: see `versions`.
        tokens_sha256: hash of the calibration tokens, None without calibration.
        bos: whether each window begins with BOS, None if no text was read.
        warnings: the warnings of the run, one line each.
        omega_floored_rows: rows whose omega met the floor, None if no method in use has one.
        check: mean loss in nats on calibration text, of the pruned model (`pruned`) and of the dense model with Wanda's
            masks (`wanda`), and whether calibration had not read it (`held_out`; a response chooses its round on it);
            None where there is no comparison.
        passes: how the calibration passes ran (micro_batch, compiled, checkpointing, compile_seconds), None without.
    """

    config: dict
    matrices: list[MatrixRow]
    block_parameters: int
    model_parameters: int
    model_zeros: int
    perplexity: dict | None
    seconds: dict[str, float]
    peak_memory_bytes: int
    energy: float | str
    energy_details: dict
    versions: dict
    tokens_sha256: str | None
    bos: bool | None
    warnings: list[str]
    omega_floored_rows: int | None
    check: dict | None
    passes: dict | None

    @property
    def sparsity(self) -> dict[str, float]:
        """Fractions of zeros: `asked` and found (`matrices`) over the pruned set, `model` over all parameters."""
        pruned = [row for row in self.matrices if row.skipped is None]
        numel = sum(row.numel for row in pruned)
        return {
            "asked": _ratio(numel - sum(row.asked for row in pruned), numel),
            "matrices": _ratio(sum(row.zeros for row in pruned), numel),
            "model": _ratio(self.model_zeros, self.model_parameters),
        }

    @property
    def coverage(self) -> dict[str, float]:
        """Share of the parameters that lie in pruned matrices, of the decoder `blocks` and of the whole `model`."""
        numel = sum(row.numel for row in self.matrices if row.skipped is None)
        return {"blocks": _ratio(numel, self.block_parameters), "model": _ratio(numel, self.model_parameters)}

    def to_dict(self) -> dict:
        """The report under its stable keys, valid JSON: a perplexity that is not finite becomes "nan" or "inf"."""
        matrices = [
            {**asdict(row), "shape": list(row.shape), "sparsity": _ratio(row.zeros, row.numel)} for row in self.matrices
        ]
        perplexity = self.perplexity
        if perplexity is not None:
            perplexity = {key: _json_number(value) for key, value in perplexity.items()}
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        derived = {"sparsity": self.sparsity, "coverage": self.coverage}
        return {**facts, "perplexity": perplexity, **derived, "matrices": matrices}

    @classmethod
    def from_dict(cls, data: dict) -> "Report":
        """The inverse of `to_dict`; derived numbers are computed anew.

        Raises:
            UserError: a key is missing or holds the wrong kind of value.
        """
        facts = {key: _get(data, key, kinds) for key, kinds in _KINDS.items()}
        for stage, seconds in facts["seconds"].items():
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or abs(seconds) > 1e18:
                raise UserError(f"key {_show('seconds.' + stage)} holds {_show(seconds)}, expected a number")
        facts["matrices"] = [_matrix_row(row, i) for i, row in enumerate(facts["matrices"])]
        if facts["perplexity"] is not None:
            facts["perplexity"] = dict(facts["perplexity"])
            for key in ("dense", "pruned"):
                facts["perplexity"][key] = _perplexity(facts["perplexity"], key)
        return cls(**facts)

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Reads a report from a `fwanda.json` or from the folder that holds one.

        Raises:
            UserError: the file is missing, unreadable, not JSON, or not a report.
        """
        file = path = Path(path)
        try:
            file = path / FILE_NAME if path.is_dir() else path
            data = json.loads(file.read_text(encoding="utf-8"))
            json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair cannot be printed
            return cls.from_dict(data)
        except FileNotFoundError:
            raise UserError(f"report {path}: {file.name} not found; give a {FILE_NAME} or its folder") from None
        except UserError as error:
            raise UserError(f"report {file}: {error}") from None
        except (OSError, ValueError, RecursionError, OverflowError) as error:
            raise UserError(f"report {str(file)[:200]}: cannot be read as JSON ({str(error)[:200]})") from None


def versions(device: torch.device | str | None = None) -> dict[str, str | None]:
    """Versions of what computed the result, None for what is not installed.

    Args:
        device: the device the run used; by default the GPU if there is one.

    Returns:
        {fwanda_kernels, torch, transformers, triton, python, device}.
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else f"{kind.type} {platform.machine()}"
    found = {package: _version(package) for package in ("torch", "transformers", "triton")}
    return {"fwanda_kernels": _kernels_version(), **found, "python": platform.python_version(), "device": name}


def table(reports: list[tuple[str, Report]]) -> str:
    """Aligned text tables of labelled reports, one for each evaluation protocol.

    Perplexities of different protocols never share a column. Rows keep their order.
    """
    groups: dict[str, list[tuple[str, Report]]] = {}
    for label, report in reports:
        groups.setdefault(_protocol(report), []).append((label, report))
    return "\n\n".join(f"{protocol}\n{_grid(rows)}" for protocol, rows in groups.items())


def summary(report: Report) -> str:
    """A few lines that close a run: sparsity found, coverage, perplexity, cost, skipped matrices."""
    share, skipped = report.sparsity, [row for row in report.matrices if row.skipped is not None]
    covered = report.coverage
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.seconds.items())
    lines = [
        f"sparsity    {_percent(share['matrices'])} of {len(report.matrices) - len(skipped)} pruned matrices"
        f" (asked {_percent(share['asked'])}), {_percent(share['model'])} of the model",
        f"coverage    {_percent(covered['blocks'])} of the block parameters lie in pruned matrices,"
        f" {_percent(covered['model'])} of the model's",
        f"perplexity  {_perplexities(report)}  ({_protocol(report)})",
        f"seconds     {sum(report.seconds.values()):.1f} ({stages})",
        f"memory      {report.peak_memory_bytes / 2**30:.2f} GiB peak",
        f"energy      {_energy(report)}",
    ]
    return "\n".join(lines + [f"skipped     {line}" for line in skipped_lines(skipped)])


def skipped_lines(rows: list[MatrixRow]) -> list[str]:
    """One line for each reason: the first matrix, how many more there are, their weights, and why."""
    by_reason: dict[str, list[MatrixRow]] = {}
    for row in rows:
        by_reason.setdefault(row.skipped, []).append(row)
    return [
        f"{same[0].name}{f' and {len(same) - 1} more' if len(same) > 1 else ''}"
        f" ({sum(row.numel for row in same)} weights): {reason}"
        for reason, same in by_reason.items()
    ]


def _energy(report: Report) -> str:
    if isinstance(report.energy, str):
        return report.energy
    total = report.energy_details["total"]
    net = "" if total["net_joules"] is None else f", {total['net_joules']:.0f} J net"
    flag = "" if total["flag"] is None else f" ({total['flag']})"
    return f"{report.energy:.0f} J gross{net}{flag}"


def _grid(rows: list[tuple[str, Report]]) -> str:
    cells = [("model", "method", "allocation", "sparsity", "perplexity", "seconds")]
    for label, report in rows:
        method = " ".join(str(report.config[key]) for key in ("method", "pattern") if report.config.get(key))
        cells.append((
            label,
            method or "-",
            str(report.config.get("allocation") or "-"),
            _percent(report.sparsity["matrices"]),
            _perplexities(report),
            f"{sum(report.seconds.values()):.1f}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _protocol(report: Report) -> str:
    if report.perplexity is None:
        return "perplexity not measured"
    seqlen, windows, sha256, bos, tokenizer = (report.perplexity.get(key) for key in PROTOCOL)
    parts = [
        f"{windows} windows of {seqlen}",
        f"BOS {'in each window' if bos else 'none'}",
        f"tokens {str(sha256)[:12]}",
    ]
    return ", ".join(parts + [f"tokenizer {tokenizer}"] * (tokenizer is not None))


def _perplexities(report: Report) -> str:
    if report.perplexity is None:
        return "-"
    return f"{report.perplexity['dense']:.2f} -> {report.perplexity['pruned']:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _json_number(value):
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_KINDS = {
    "config": dict,
    "matrices": list,
    "block_parameters": int,
    "model_parameters": int,
    "model_zeros": int,
    "perplexity": (dict, type(None)),
    "seconds": dict,
    "peak_memory_bytes": int,
    "energy": (int, float, str),
    "energy_details": dict,
    "versions": dict,
    "tokens_sha256": (str, type(None)),
    "bos": (bool, type(None)),
    "warnings": list,
    "omega_floored_rows": (int, type(None)),
    "check": (dict, type(None)),
    "passes": (dict, type(None)),
}
_ROW_KINDS = {
    "name": str,
    "asked": int,
    "kept": int,
    "kept_zero": int,
    "skipped": (str, type(None)),
    "tensor": (str, type(None)),
    "index": (int, type(None)),
}


def _get(data: dict, key: str, kinds, where: str = ""):
    if not isinstance(data, dict) or key not in data:
        raise UserError(f"key {where + key!r} is missing; the file is not a complete report")
    value = data[key]
    if not isinstance(value, kinds) or (isinstance(value, int) and abs(value) >= 2**63):
        raise UserError(f"key {where + key!r} holds {_show(value)}, which is not what a report has there")
    return value


def _show(value) -> str:
    """A short text of any JSON value."""
    return f"{reprlib.repr(value):.60}"


def _matrix_row(data: dict, index: int) -> MatrixRow:
    where = f"matrices[{index}]."
    shape = _get(data, "shape", list, where)
    sizes = len(shape) <= 8 and all(isinstance(size, int) and size >= 0 for size in shape)
    if not sizes or math.prod(shape) >= 2**63:
        raise UserError(f"key {where + 'shape'!r} holds {_show(shape)}, expected a list of sizes")
    return MatrixRow(shape=tuple(shape), **{key: _get(data, key, kinds, where) for key, kinds in _ROW_KINDS.items()})


def _perplexity(data: dict, key: str) -> float:
    value = _get(data, key, (int, float, str), "perplexity.")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise UserError(f"key 'perplexity.{key}' holds {_show(value)}, expected a number") from None


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
