"""PruneConfig: every setting of a run, as a frozen dataclass that YAML, JSON and the command line share."""

from __future__ import annotations

import re
import reprlib
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path

from .errors import UserError, one_line


@dataclass(frozen=True)
class Method:
    """What the stages need to know of a method.

    Attributes:
        allocations: the budgets it accepts; the first is its default.
        order: its default order.
        scores_inputs: ranks by |W| * norm of the input columns, so it needs x2.
        updates_weights: sweeps with a Hessian, so it reads the calibration text block by block.
        weighs_rows: multiplies its errors by omega^p, so it needs omega under any allocation; under a pattern, where
            that cancels, it weighs tokens instead.
    """

    allocations: tuple[str, ...]
    order: str
    scores_inputs: bool = False
    updates_weights: bool = False
    weighs_rows: bool = False


METHODS = {
    "magnitude": Method(("layer",), "onepass"),
    "wanda": Method(("uniform",), "onepass", scores_inputs=True),
    "fwanda": Method(("row", "uniform", "global", "response", "auto"), "onepass", scores_inputs=True),
    "sparsegpt": Method(("uniform",), "sequential", updates_weights=True),
    "fsparsegpt": Method(
        ("uniform", "row", "global", "response", "auto"), "sequential", updates_weights=True, weighs_rows=True
    ),
}
RESPONSES = ("response", "auto")  # allocations measured on the pruned model
FISHER_ALLOCATIONS = ("row", "global", *RESPONSES)
DTYPES = ("float32", "bfloat16", "float16")
SWITCH = ("auto", "on", "off")
TEXT_NUMBERS = ("nsamples", "seqlen", "seed")
PASS_SETTINGS = ("micro_batch", "compile", "checkpointing", "max_memory", "deterministic")
LARGEST_EXPONENT = 4
LARGEST_GROUP = 1024
_DEEPEST = 8  # of the lists and mappings in a file of settings
_RANGES = {
    "nsamples": (1, 1_000_000),
    "seqlen": (2, 10_000_000),
    "eval_seqlen": (2, 10_000_000),
    "eval_windows": (1, 1_000_000_000),
    "seed": (0, 2**63 - 1),
}


def _setting(default, help: str, choices: tuple | None = None, type: type = str):
    return field(default=default, metadata={"help": help, "choices": choices, "type": type})


@dataclass(frozen=True)
class PruneConfig:
    """What to prune, how, and on which text. Settings that depend on others are None until resolved() fills them.

    Raises:
        UserError: a value is not allowed, or two settings contradict each other.
    """

    method: str = _setting("fwanda", "pruning method", tuple(METHODS))
    allocation: str | None = _setting(
        None,
        "how the keep budget is divided; response: as the loss of the pruned model answers, auto: what does best on "
        "held-out calibration text (default: fwanda row, magnitude layer, others uniform)",
        ("layer", "uniform", "row", "global", "response", "auto"),
    )
    sparsity: str | None = _setting(
        None, "fraction of the weights removed, an exact decimal in [0, 1) (default 0.5, or what the pattern implies)"
    )
    pattern: str | None = _setting(None, "n:m, keep n of every m consecutive weights of a row, e.g. 2:4")
    nm_tail: str = _setting(
        "error", "columns left over by the pattern: refuse, or leave them dense", ("error", "dense")
    )
    power: float = _setting(
        0.5,
        "exponent p of omega^p, for row allocation and F-SparseGPT's weights of rows (not with response), or of tokens "
        "under a pattern",
        type=float,
    )
    row_exponent: float = _setting(0.75, "damping exponent b of the global allocation across rows", type=float)
    layer_exponent: float = _setting(0.5, "damping exponent c of the global allocation across layers", type=float)
    order: str | None = _setting(
        None,
        "onepass: statistics of the dense model; sequential: of the pruned blocks below; true-sequential: also of the "
        "pruned matrices before it in its block (default: sequential for sparsegpt and fsparsegpt, else onepass)",
        ("onepass", "sequential", "true-sequential"),
    )
    include: tuple[str, ...] = _setting((), "prune only matrices whose name matches GLOB; repeatable", type=list)
    exclude: tuple[str, ...] = _setting((), "leave matrices dense whose name matches GLOB; repeatable", type=list)
    fisher: str | None = _setting(
        None,
        "Fisher information: empirical, from the labels of the text; true, from labels drawn from the model's own "
        "predictions; mean, the squared mean gradient, for comparison (default: empirical, or as in the statistics)",
        ("empirical", "true", "mean"),
    )
    calibration: str = _setting(
        "sample", "text: a .txt, .jsonl or .parquet file, c4, wikitext2, sample, or a dataset name"
    )
    nsamples: int = _setting(128, "number of calibration sequences", type=int)
    seqlen: int = _setting(2048, "tokens in a calibration sequence", type=int)
    seed: int = _setting(0, "seed of the choice of calibration sequences, and of the labels of --fisher true", type=int)
    bos: str = _setting(
        "auto",
        "start windows with BOS: whichever gives the lower dense loss, never, or each window",
        ("auto", "none", "window"),
    )
    eval: str | None = _setting(
        None,
        "text for perplexity: a file, wikitext2, sample, or a dataset name (default: none; eval: wikitext2)",
    )
    eval_seqlen: int | None = _setting(None, "tokens in an evaluation window (default: seqlen, 2048)", type=int)
    eval_windows: int | None = _setting(None, "evaluate the first N windows only (default: all)", type=int)
    device: str = _setting("auto", "cpu, cuda, cuda:N, or auto: cuda where there is one")
    dtype: str | None = _setting(None, "compute and write in this dtype (default: as stored; GGUF: float32)", DTYPES)
    micro_batch: str = _setting(
        "auto", "calibration sequences in a pass; auto: as many as keep a GPU busy and fit its memory, 1 on a CPU"
    )
    compile: str = _setting(
        "auto", "torch.compile the blocks for calibration; auto: where that saves more time than it takes", SWITCH
    )
    checkpointing: str = _setting(
        "auto", "run each block twice instead of keeping its activations; auto: where memory is short", SWITCH
    )
    max_memory: str | None = _setting(None, "most memory that torch may take on a GPU, e.g. 16GiB (default: all)")
    deterministic: bool = _setting(
        False, "the same bits in every run on a GPU too, where some kernels are slower for it", type=bool
    )
    no_check: bool = _setting(False, "skip the comparison with Wanda's masks on held-out calibration text", type=bool)

    def __post_init__(self):
        for name in ("sparsity", "micro_batch"):  # numbers in YAML
            if isinstance(getattr(self, name), (int, float)):
                object.__setattr__(self, name, _show(getattr(self, name)))
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.default is not None:
                raise UserError(f"{_flag(f.name)} must have a value, got none")
            self._check_value(f.name, value, f.metadata)
        if self.allocation is not None and self.allocation not in self.facts.allocations:
            raise UserError(
                f"--allocation must be one of {', '.join(self.facts.allocations)} with --method {self.method}, "
                f"got {_show(self.allocation)}"
            )
        if self.method == "magnitude" and self.order not in (None, "onepass"):
            raise UserError(f"--method magnitude reads no text, so there is no --order {self.order}; leave --order out")
        self._check_sparsity()
        if self.weighs_tokens and self.fisher == "mean":
            raise UserError("--fisher mean has no weight for a token; choose empirical or true with --pattern")
        self._check_memory()

    def _check_value(self, name: str, value, metadata) -> None:
        """The type and range that a setting has on its own; None is left to resolved()."""
        choices, kind = metadata["choices"], metadata["type"]
        if value is None:
            return
        if choices and value not in choices:
            raise UserError(f"{_flag(name)} must be one of {', '.join(choices)}, got {_show(value)}")
        if kind is str and not isinstance(value, str):
            hint = ' (quote it in YAML: "2:4")' if name == "pattern" else ""
            raise UserError(f"{_flag(name)} must be text, got {_show(value)}{hint}")
        if kind is str and "\0" in value:
            raise UserError(f"{_flag(name)} holds a null character, got {_show(value)}")
        if kind is list and not (isinstance(value, tuple) and all(isinstance(glob, str) for glob in value)):
            raise UserError(f"{_flag(name)} must be a list of globs, got {_show(value)}")
        if kind is bool and not isinstance(value, bool):
            raise UserError(f"{_flag(name)} must be true or false, got {_show(value)}")
        if kind is int:
            least, most = _RANGES[name]
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise UserError(f"{_flag(name)} must be an integer in [{least}, {most}], got {_show(value)}")
        if kind is float and not (
            isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LARGEST_EXPONENT
        ):
            raise UserError(f"{_flag(name)} must be a number in [0, {LARGEST_EXPONENT}], got {_show(value)}")

    def _check_sparsity(self) -> None:
        if self.sparsity is not None:
            try:
                # a short text, so that the exact fraction stays small
                valid = re.fullmatch(r"[-+\d./]{1,40}(e-?\d{1,3})?", self.sparsity) and 0 <= Fraction(self.sparsity) < 1
            except (ValueError, ZeroDivisionError):
                valid = False
            if not valid:
                raise UserError(f"--sparsity must be a decimal in [0, 1), got {_show(self.sparsity)}")
        if self.pattern is None:
            return
        match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", self.pattern)
        if not match or not 1 <= int(match[1]) <= int(match[2]) <= LARGEST_GROUP:
            raise UserError(
                f"--pattern must be n:m, keep n of every m, with 1 <= n <= m <= {LARGEST_GROUP}, e.g. 2:4, "
                f"got {_show(self.pattern)}"
            )
        n, m = self.nm
        if self.sparsity is not None and Fraction(self.sparsity) != 1 - Fraction(n, m):
            raise UserError(
                f"--sparsity {self.sparsity} contradicts --pattern {self.pattern}, which keeps {n} of {m} and removes "
                f"{float(1 - Fraction(n, m)):g}; give only one of them"
            )

    def _check_memory(self) -> None:
        if self.micro_batch != "auto" and not re.fullmatch("[1-9][0-9]{0,5}", self.micro_batch):
            raise UserError(f"--micro-batch must be auto or a number of sequences, got {_show(self.micro_batch)}")
        if self.compile == self.checkpointing == "on":
            raise UserError("--compile on contradicts --checkpointing on; give only one of them")
        if self.max_memory is not None and not self.memory_limit:
            raise UserError(f"--max-memory must be a size above 0, e.g. 16GiB or 900MB, got {_show(self.max_memory)}")

    @property
    def memory_limit(self) -> int | None:
        """Bytes of max_memory; None without it."""
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT])(i?)B", self.max_memory or "")
        if match is None:
            return None
        return int(float(match[1]) * (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2])))

    @property
    def facts(self) -> Method:
        """The entry of METHODS."""
        return METHODS[self.method]

    @property
    def needs_fisher(self) -> bool:
        """Whether omega decides anything; under a pattern all but a response cancels inside each group."""
        return self.responds or (self.nm is None and (self.facts.weighs_rows or self.allocation in FISHER_ALLOCATIONS))

    @property
    def responds(self) -> bool:
        """Whether the pruned model is measured too; F-SparseGPT selects by its Hessian under a pattern."""
        return self.allocation in RESPONSES and (self.nm is None or self.facts.scores_inputs)

    @property
    def weighs_tokens(self) -> bool:
        """Whether tokens count by their gradients in Hessians: what omega is to rows, where those cancel."""
        return self.nm is not None and self.facts.weighs_rows

    @property
    def reads_statistics(self) -> bool:
        """Whether statistics of the dense model decide anything: omega, or x2 unless it is measured block by block."""
        return self.needs_fisher or (self.facts.scores_inputs and self.order == "onepass")

    @property
    def checks(self) -> bool:
        """Whether the result is compared with Wanda's masks: where Fisher information made it another."""
        return self.needs_fisher and not (self.no_check or (self.method == "fwanda" and self.allocation == "uniform"))

    @property
    def runs_blocks(self) -> bool:
        """Whether the blocks run one at a time on the calibration text, for Hessians or the inputs of pruned blocks."""
        return self.facts.updates_weights or (self.facts.scores_inputs and self.order != "onepass")

    @property
    def needs_budgets(self) -> bool:
        """Whether each row gets a count: not under a pattern, nor where a sweep selects over all rows."""
        return self.nm is None and (self.allocation in FISHER_ALLOCATIONS or not self.facts.updates_weights)

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
            allocation=self.allocation or self.facts.allocations[0],
            sparsity=self.sparsity or _decimal(self.removed),
            order=self.order or self.facts.order,
            fisher=self.fisher or "empirical",
            eval_seqlen=self.eval_seqlen or self.seqlen,
        )

    def to_dict(self) -> dict:
        """Plain values, as written to fwanda.json and read by from_dict()."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict) -> PruneConfig:
        """Build from plain values.

        Raises:
            UserError: a key is unknown or a value is not allowed.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known, key=_show)
        if unknown:
            raise UserError(f"unknown setting {_show(unknown[0])}; the settings are {', '.join(sorted(known))}")
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> PruneConfig:
        """Read a YAML or JSON file of settings, named as the fields of this class.

        Raises:
            UserError: the file is missing, is not a mapping, or holds a bad setting.
        """
        import yaml

        try:
            text, depth = Path(path).read_text(encoding="utf-8"), 0
            for event in yaml.parse(text, Loader=yaml.SafeLoader):  # which stays fast, however deep
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if depth > _DEEPEST:
                    raise ValueError("nested too deeply")
            values = yaml.safe_load(text)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(f"cannot read the settings in {path}: {one_line(error)}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path} must hold a mapping of settings, got {type(values).__name__}")
        return cls.from_dict(values)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _show(value) -> str:
    """A short text of any value a file can hold: numbers of a million digits, lists that hold themselves."""
    try:
        text = reprlib.repr(value) if not isinstance(value, (int, float)) else str(value)
    except ValueError:
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _decimal(value: Fraction) -> str:
    """The exact decimal where there is one, else the fraction p/q."""
    short = f"{float(value):.15g}"
    return short if Fraction(short) == value else str(value)
