"""PruneConfig: every setting of a run, as a frozen dataclass that YAML, JSON and the command line share."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path

from .errors import UserError

ALLOCATIONS = {
    "magnitude": ("layer",),
    "wanda": ("uniform",),
    "fwanda": ("row", "uniform", "global"),
    "sparsegpt": ("uniform",),
    "fsparsegpt": ("uniform", "row", "global"),
}
ORDERS = {
    "magnitude": "onepass",
    "wanda": "onepass",
    "fwanda": "onepass",
    "sparsegpt": "sequential",
    "fsparsegpt": "sequential",
}
DTYPES = ("float32", "bfloat16", "float16")


def _setting(default, help: str, choices: tuple | None = None, type: type = str):
    return field(default=default, metadata={"help": help, "choices": choices, "type": type})


@dataclass(frozen=True)
class PruneConfig:
    """What to prune, how, and on which text. Settings that depend on others are None until resolved() fills them.

    Raises:
        UserError: a value is not allowed, or two settings contradict each other.
    """

    method: str = _setting("fwanda", "pruning method", tuple(ALLOCATIONS))
    allocation: str | None = _setting(
        None, "how the keep budget is divided (default: the method's first)", ("layer", "uniform", "row", "global")
    )
    sparsity: str | None = _setting(
        None, "fraction of the weights removed, an exact decimal in [0, 1) (default 0.5, or what the pattern implies)"
    )
    pattern: str | None = _setting(None, "n:m, keep n of every m consecutive weights of a row, e.g. 2:4")
    nm_tail: str = _setting(
        "error", "columns left over by the pattern: refuse, or leave them dense", ("error", "dense")
    )
    power: float = _setting(0.5, "exponent p of omega^p, for row allocation and the F-SparseGPT row weight", type=float)
    row_exponent: float = _setting(0.75, "damping exponent b of the global allocation across rows", type=float)
    layer_exponent: float = _setting(0.5, "damping exponent c of the global allocation across layers", type=float)
    order: str | None = _setting(
        None,
        "onepass: statistics of the dense model; sequential: of the pruned blocks below",
        ("onepass", "sequential"),
    )
    fisher: str = _setting("empirical", "labels of the Fisher information: those of the text", ("empirical",))
    calibration: str = _setting(
        "sample", "text: a .txt, .jsonl or .parquet file, c4, wikitext2, sample, or a dataset name"
    )
    nsamples: int = _setting(128, "number of calibration sequences", type=int)
    seqlen: int = _setting(2048, "tokens in a calibration sequence", type=int)
    seed: int = _setting(0, "seed of the choice of calibration sequences", type=int)
    bos: str = _setting(
        "auto",
        "start windows with BOS: whichever gives the lower dense loss, never, or each window",
        ("auto", "none", "window"),
    )
    eval: str | None = _setting(None, "text for perplexity: a file, wikitext2 or sample (default: not measured)")
    eval_seqlen: int | None = _setting(None, "tokens in an evaluation window (default: seqlen)", type=int)
    eval_windows: int | None = _setting(None, "evaluate the first N windows only (default: all)", type=int)
    device: str = _setting("auto", "cpu, cuda, or auto: cuda where there is one", ("auto", "cpu", "cuda"))
    dtype: str | None = _setting(None, "compute and write in this dtype (default: as stored; GGUF: float32)", DTYPES)

    def __post_init__(self):
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if choices and value is not None and value not in choices:
                raise UserError(f"{_flag(f.name)} must be one of {', '.join(choices)}, got {value!r}")
        allowed = ALLOCATIONS[self.method]
        if self.allocation is not None and self.allocation not in allowed:
            raise UserError(
                f"--allocation must be one of {', '.join(allowed)} with --method {self.method}, got {self.allocation!r}"
            )
        if self.method == "magnitude" and self.order == "sequential":
            raise UserError("--method magnitude reads no text, so there is no --order sequential; leave --order out")
        self._check_sparsity()
        for name in ("nsamples", "seqlen", "eval_seqlen", "eval_windows"):
            value, least = getattr(self, name), 2 if name.endswith("seqlen") else 1
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise UserError(f"{_flag(name)} must be an integer >= {least}, got {value!r}")
        for name in ("power", "row_exponent", "layer_exponent"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise UserError(f"{_flag(name)} must be a finite number >= 0, got {value!r}")

    def _check_sparsity(self) -> None:
        if self.sparsity is not None:
            object.__setattr__(self, "sparsity", str(self.sparsity))
            try:
                valid = 0 <= Fraction(self.sparsity) < 1
            except (ValueError, ZeroDivisionError):
                valid = False
            if not valid:
                raise UserError(f"--sparsity must be a decimal in [0, 1), got {self.sparsity!r}")
        if self.pattern is None:
            return
        match = re.fullmatch(r"(\d+):(\d+)", str(self.pattern))
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(
                f"--pattern must be n:m with 1 <= n <= m, keep n of every m, e.g. 2:4, got {self.pattern!r}"
            )
        n, m = self.nm
        if self.sparsity is not None and Fraction(self.sparsity) != 1 - Fraction(n, m):
            raise UserError(
                f"--sparsity {self.sparsity} contradicts --pattern {self.pattern}, which keeps {n} of {m} and removes "
                f"{float(1 - Fraction(n, m)):g}; give only one of them"
            )

    @property
    def nm(self) -> tuple[int, int] | None:
        """(n, m) of the pattern: n kept of m; None when unstructured."""
        if self.pattern is None:
            return None
        n, m = self.pattern.split(":")
        return int(n), int(m)

    @property
    def removed(self) -> Fraction:
        """The exact fraction removed."""
        if self.pattern is not None:
            n, m = self.nm
            return 1 - Fraction(n, m)
        return Fraction("0.5" if self.sparsity is None else self.sparsity)

    def resolved(self) -> PruneConfig:
        """The same config with every default that depends on another setting filled in."""
        return replace(
            self,
            allocation=self.allocation or ALLOCATIONS[self.method][0],
            sparsity=self.sparsity or _decimal(self.removed),
            order=self.order or ORDERS[self.method],
            eval_seqlen=self.eval_seqlen or self.seqlen,
        )

    def to_dict(self) -> dict:
        """Plain values, as written to fwanda.json and read by from_dict()."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> PruneConfig:
        """Build from plain values.

        Raises:
            UserError: a key is unknown or a value is not allowed.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(f"unknown setting {unknown[0]!r}; the settings are {', '.join(sorted(known))}")
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> PruneConfig:
        """Read a YAML or JSON file of settings, named as the fields of this class.

        Raises:
            UserError: the file is missing, is not a mapping, or holds a bad setting.
        """
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"cannot read the settings in {path}: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path} must hold a mapping of settings, got {type(values).__name__}")
        return cls.from_dict(values)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _decimal(value: Fraction) -> str:
    """The exact decimal where there is one, else the fraction p/q."""
    short = f"{float(value):.15g}"
    return short if Fraction(short) == value else str(value)
