"""PruneConfig: every setting of a run. YAML and JSON files, the command line and Python share it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path

from .errors import UserError, did_you_mean, one_line, refuse_pipe, show, shown_path
from .methods_table import ALLOCATIONS, METHODS, Allocation, Method
from .setting_checks import NUMBER_TEXTS, check_sparsity, check_value, expect_path, flag, number_text, plain
from .source_shares import OWN_TEXT, SourceShare, check_names, counts_of, named_as, parse_sources
from .yaml_file import read_yaml

GROUPS = {  # of settings, with their headings in --help; the flags of groups with one heading stand together
    "method": "what",
    "amount": "how much",
    "text": "text",
    "eval": "text",
    "check": "text",
    "bos": "text",
    "place": "run",
    "passes": "run",
    "energy": "run",
    "save": "output",
    "exponents": "fine tuning of methods",
    "fisher": "fine tuning of methods",
}
GUARDS = ("sample", "code")  # the guards without --guard
CALIBRATION = ("text", "bos", "fisher")  # groups of settings that statistics depend on
DTYPES = ("float32", "bfloat16", "float16")
SWITCH = ("auto", "on", "off")
ENERGY_PROTOCOLS = ("gross", "net")
ENGINES = ("auto", "resident", "streamed", "sharded")
_ENGINES_OF = {  # option -> the engines with which it has an effect
    "segment": ("auto", "streamed"),
    "offload": ("sharded",),
    "compile on": ("auto", "resident"),
    "checkpointing on": ("auto", "resident", "sharded"),
}
SAVE_FORMATS = ("dense", "packed", "masks")
LEAST_PACKED = Fraction("0.15")  # share of zeros; a packed matrix with fewer is hardly smaller than a dense one


def _setting(
    group: str, default, help: str, choices: tuple | None = None, type: type = str, metavar: str | None = None
):
    metadata = {"group": group, "help": help, "choices": choices, "type": type, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class PruneConfig:
    """What to prune, how, and on which text.

    A setting whose default depends on other settings is None until resolved() fills it in. The metadata of each field
    hold its group (a key of GROUPS), its help text, its choices, its type and the name of its value in --help.

    Raises:
        UserError: a value is not allowed, or two settings contradict each other.
    """

    method: str = _setting("method", "fwanda", "pruning method", tuple(METHODS))
    allocation: str | None = _setting(
        "method",
        None,
        "how many weights each matrix and row keeps. row: the published rule of F-Wanda; global: one threshold over "
        "the whole model; response: global, corrected by measuring the pruned model; auto: the best of these on "
        "held-out text (default: global for fwanda, layer for magnitude, uniform for the others)",
        tuple(ALLOCATIONS),
    )
    sparsity: str | None = _setting(
        "amount",
        None,
        "fraction of the weights to remove, an exact decimal or p/q in [0, 1) (default: 0.5, or what the pattern says)",
    )
    pattern: str | None = _setting(
        "amount", None, "n:m keeps n of every m consecutive weights of a row, for example 2:4"
    )
    nm_tail: str = _setting(
        "amount",
        "error",
        "what to do when the pattern does not divide the columns: refuse, or leave the last columns dense",
        ("error", "dense"),
    )
    power: float = _setting(
        "exponents",
        0.5,
        "exponent p of the Fisher information omega: in the row allocation, and in F-SparseGPT's weights of rows (of "
        "tokens under a pattern); the response allocation does not use it",
        type=float,
    )
    row_exponent: float = _setting(
        "exponents", 0.75, "exponent b of the global allocation; below 1 it damps differences between rows", type=float
    )
    layer_exponent: float = _setting(
        "exponents", 0.5, "exponent c of the global allocation; below 1 it damps differences between layers", type=float
    )
    order: str | None = _setting(
        "method",
        None,
        "the model on which the inputs of the layers are measured. onepass: the dense model; sequential: the model "
        "whose earlier blocks are pruned; true-sequential: also after the matrices already pruned in the same block "
        "(default: sequential for sparsegpt and fsparsegpt, onepass for the others)",
        ("onepass", "sequential", "true-sequential"),
    )
    include: tuple[str, ...] = _setting(
        "method", (), "prune only the matrices whose names match GLOB; may be repeated", type=list, metavar="GLOB"
    )
    exclude: tuple[str, ...] = _setting(
        "method", (), "leave the matrices whose names match GLOB dense; may be repeated", type=list, metavar="GLOB"
    )
    fisher: str | None = _setting(
        "fisher",
        None,
        "how Fisher information is measured. empirical: with the tokens of the text as labels; true: with labels drawn "
        "from the predictions of the model; mean: the squared mean gradient, for comparison (default: empirical, or "
        "what the statistics hold)",
        ("empirical", "true", "mean"),
    )
    fisher_samples: str = _setting(
        "fisher",
        "96",
        "run the backward pass on N of the calibration windows, spread evenly, or on all; the forward pass always runs "
        "on all",
        metavar="N|all",
    )
    calibration: tuple[str, ...] = _setting(
        "text",
        ("sample",),
        "calibration text: a .txt, .jsonl, .json or .parquet file (the first three also packed as .gz); sample and "
        "code, which come with Python; self, which the model writes itself; c4, wikitext2, or the name of a data set. "
        "May be repeated: each source gets windows in proportion to its SHARE, which is 1 if left out",
        type=list,
        metavar="SOURCE[:SHARE]",
    )
    nsamples: int = _setting("text", 128, "number of calibration windows, of all sources together", type=int)
    seqlen: int = _setting("text", 2048, "tokens in a calibration window", type=int)
    seed: int = _setting(
        "text",
        0,
        "seed that selects the calibration windows, the text that the model writes, and the labels of --fisher true",
        type=int,
    )
    start_token: str | None = _setting(
        "text",
        None,
        "token after which the model begins to write, as text or as its number (default: BOS, or <|endoftext|> without "
        "a BOS)",
        metavar="ID|TOKEN",
    )
    bos: str = _setting(
        "bos",
        "auto",
        "whether each window starts with the BOS token. auto: if that lowers the loss of the dense model on the first "
        "window of the calibration (of --eval, if no calibration is read); none: never; window: always",
        ("auto", "none", "window"),
    )
    eval: tuple[str, ...] = _setting(
        "eval",
        (),
        "text for perplexity: a file, wikitext2, code, sample, or the name of a data set; may be repeated (default: "
        "none; in `fwanda eval`: the texts of the report beside the model, else sample)",
        type=list,
        metavar="TEXT",
    )
    eval_seqlen: int | None = _setting(
        "eval", None, "tokens in an evaluation window (default: the value of --seqlen)", type=int
    )
    eval_windows: int | None = _setting(
        "eval", None, "evaluate only the first N windows of each text (default: all)", type=int, metavar="N"
    )
    device: str = _setting("place", "auto", "cpu, cuda, cuda:N, or auto: cuda if there is a GPU, else cpu")
    dtype: str | None = _setting(
        "place",
        None,
        "dtype to compute in, and of what is written (default: as the model is stored; GGUF: float32)",
        DTYPES,
    )
    engine: str = _setting(
        "passes",
        "auto",
        "where the weights are. resident: all on the device; streamed: a few decoder blocks at a time, and the others "
        "in RAM or in the files of the model; sharded: a share of each block on each rank of torchrun; auto: resident "
        "if the weights fit the device, else sharded if they fit the GPUs of all ranks together, else streamed",
        ENGINES,
    )
    offload: bool = _setting(
        "passes", False, "keep the weights of --engine sharded in RAM, and on a GPU only while they compute", type=bool
    )
    segment: int | None = _setting(
        "passes", None, "decoder blocks on the device at a time, if streamed (default: 4)", type=int, metavar="K"
    )
    micro_batch: str = _setting(
        "passes",
        "auto",
        "calibration windows in one pass. auto: on a GPU as many as keep it busy and fit its memory, on a CPU 1",
    )
    compile: str = _setting(
        "passes",
        "auto",
        "run torch.compile on the blocks for calibration. auto: if it saves more time than it takes",
        SWITCH,
    )
    checkpointing: str = _setting(
        "passes",
        "auto",
        "compute the activations of each block a second time instead of storing them. auto: if memory runs out",
        SWITCH,
    )
    max_memory: str | None = _setting(
        "passes", None, "GPU memory that torch may use at most, for example 16GiB (default: all)"
    )
    deterministic: bool = _setting(
        "passes",
        False,
        "give the same bits in every run on a GPU, or stop if an operation cannot; some kernels are slower",
        type=bool,
    )
    guard: tuple[str, ...] | None = _setting(
        "check",
        None,
        "text that should not become worse than under Wanda: the result is compared with Wanda's on it, and response "
        "and auto avoid masks that are worse. none: no guards. May be repeated (default: sample and code)",
        type=list,
        metavar="SOURCE",
    )
    no_check: bool = _setting(
        "check",
        False,
        "do not compare the losses of the dense model, of Wanda's masks and of the result on the calibration texts and "
        "guards",
        type=bool,
    )
    energy: str = _setting(
        "energy",
        "gross",
        "energy of the GPU. gross: read its energy counter, which takes no time; net: also measure the idle power "
        "first (2 s) and sample the power at 10 Hz",
        ENERGY_PROTOCOLS,
    )

    save: str = _setting(
        "save",
        "dense",
        "form of the written model. dense: removed weights are zeros; packed: one bit per weight and the kept values; "
        "masks: dense, and masks.safetensors with one bit per weight",
        SAVE_FORMATS,
    )

    def __post_init__(self):
        for name in NUMBER_TEXTS:
            object.__setattr__(self, name, number_text(getattr(self, name)))
        for f in fields(self):
            object.__setattr__(self, f.name, plain(getattr(self, f.name), f.metadata["type"]))
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.default is not None:
                raise UserError(f"{flag(f.name)} must have a value, got none")
            check_value(f.name, value, kind=f.metadata["type"], choices=f.metadata["choices"])
        if self.allocation is not None and self.allocation not in self.traits.allocations:
            raise UserError(
                f"--allocation must be one of {', '.join(self.traits.allocations)} with --method {self.method}, "
                f"got {show(self.allocation)}"
            )
        if self.method == "magnitude" and self.order not in (None, "onepass"):
            raise UserError(f"--method magnitude reads no text, so there is no --order {self.order}; leave --order out")
        check_sparsity(self.sparsity, self.pattern)
        if self.save == "packed" and self.removed < LEAST_PACKED:
            raise UserError(
                f"--save packed needs at least 15 % zeros to gain anything, got {100 * float(self.removed):g} %"
            )
        self._check_texts()
        if self.weighs_tokens and self.fisher == "mean":
            raise UserError("--fisher mean has no weight for a token; choose empirical or true with --pattern")
        self._check_memory()
        self._check_engine()

    def _check_texts(self) -> None:
        if not self.calibration:
            raise UserError("--calibration must name at least one text, got none")
        counts_of(self.sources, self.nsamples)
        check_names(self.guards, "--guard")
        check_names(self.eval, "--eval")
        if OWN_TEXT in self.eval:
            raise UserError(f"--eval {OWN_TEXT}: the text that a model writes is for calibration; name another text")
        if self.guard is not None and len(self.guard) > 1 and "none" in self.guard:
            raise UserError(
                f"--guard none turns all guards off, got {', '.join(self.guard)}; leave none or the others out"
            )
        if self.fisher_samples != "all" and not re.fullmatch("[1-9][0-9]{0,5}", self.fisher_samples):
            raise UserError(
                f"--fisher-samples must be all or a number of windows in [1, 999999], got {show(self.fisher_samples)}"
            )

    def _check_memory(self) -> None:
        if self.micro_batch != "auto" and not re.fullmatch("[1-9][0-9]{0,5}", self.micro_batch):
            raise UserError(
                f"--micro-batch must be auto or a number of windows in [1, 999999], got {show(self.micro_batch)}"
            )
        if self.compile == self.checkpointing == "on":
            raise UserError("--compile on contradicts --checkpointing on; give only one of them")
        if self.max_memory is not None and not self.memory_limit:
            raise UserError(
                f"--max-memory must be a size above 0 with its unit, e.g. 16GiB or 900MB, got {show(self.max_memory)}"
            )

    def _check_engine(self) -> None:
        """Refuses options that have no effect with the engine, and what it cannot do."""
        given = {
            "segment": self.segment is not None,
            "offload": self.offload,
            "compile on": self.compile == "on",
            "checkpointing on": self.checkpointing == "on",
        }
        for option, engines in _ENGINES_OF.items():
            if given[option] and self.engine not in engines:
                raise UserError(
                    f"--{option} has no effect with --engine {self.engine}; leave it out, or use --engine "
                    f"{' or '.join(engines)}"
                )
        if self.engine == "sharded" and self.save != "dense":
            raise UserError(f"--save {self.save} needs the whole model on one rank; use --save dense, then fwanda pack")
        if self.engine == "sharded" and OWN_TEXT in {source.name for source in self.sources}:
            raise UserError(f"--calibration {OWN_TEXT} does not work with --engine sharded; use another text")

    @property
    def memory_limit(self) -> int | None:
        """max_memory in bytes; None if it is not set."""
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([KMGT])(i?)B", self.max_memory or "")
        if match is None:
            return None
        return int(float(match[1]) * (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2])))

    @property
    def traits(self) -> Method:
        """The entry of METHODS."""
        return METHODS[self.method]

    @property
    def _allocation(self) -> Allocation:
        """The entry of ALLOCATIONS; of the method's default while the allocation is None."""
        return ALLOCATIONS[self.allocation or self.traits.allocations[0]]

    @property
    def needs_fisher(self) -> bool:
        """Whether omega changes the result. Under a pattern, where row scales cancel, only a response uses it."""
        return self.responds or (self.nm is None and (self.traits.weighs_rows or self._allocation.reads_fisher))

    @property
    def responds(self) -> bool:
        """Whether the allocation measures the pruned model; F-SparseGPT under a pattern uses its Hessian instead."""
        return self._allocation.responds and (self.nm is None or self.traits.scores_inputs)

    @property
    def weighs_tokens(self) -> bool:
        """Whether Hessians weigh each token by its gradient: under a pattern, where the weights of rows cancel."""
        return self.nm is not None and self.traits.weighs_rows

    @property
    def reads_statistics(self) -> bool:
        """Whether the method needs statistics of the dense model: omega, or x2 in --order onepass."""
        return self.needs_fisher or (self.traits.reads_inputs and self.order == "onepass")

    @property
    def sources(self) -> tuple[SourceShare, ...]:
        """The calibration texts and their shares."""
        return parse_sources(self.calibration)

    @property
    def guards(self) -> tuple[str, ...]:
        """The texts of --guard; GUARDS without it, nothing after --guard none."""
        guards = () if self.guard == ("none",) else GUARDS if self.guard is None else self.guard
        return named_as(guards, self.sources)

    @property
    def fisher_count(self) -> int:
        """Number of windows of the backward pass."""
        return self.nsamples if self.fisher_samples == "all" else min(int(self.fisher_samples), self.nsamples)

    @property
    def compares_with_wanda(self) -> bool:
        """Whether the masks may differ from Wanda's while x2 of the dense model, which Wanda's need, is measured."""
        return self.needs_fisher and not (self.method == "fwanda" and self.allocation == "uniform")

    @property
    def gives_wandas_masks(self) -> bool:
        """Whether the masks are those of Wanda on the dense model."""
        return self.traits.scores_inputs and self.order == "onepass" and not self.compares_with_wanda

    @property
    def reads_text(self) -> bool:
        """Whether calibration text decides the result, in this run or in the statistics that it is given."""
        return self.reads_statistics or self.runs_blocks

    @property
    def runs_blocks(self) -> bool:
        """Whether calibration text runs block by block, for Hessians or for the outputs of pruned blocks."""
        return self.traits.updates_weights or (self.traits.reads_inputs and self.order != "onepass")

    @property
    def fixes_matrix_totals(self) -> bool:
        """Whether the settings alone say how many weights each matrix keeps."""
        return self.nm is not None or self._allocation.fixes_matrix_totals

    @property
    def needs_budgets(self) -> bool:
        """Whether each row gets a budget: not under a pattern, nor if an OBS walk selects over all rows."""
        return self.nm is None and (self.allocation != "uniform" or not self.traits.updates_weights)

    @property
    def nm(self) -> tuple[int, int] | None:
        """(n, m) of the pattern, which keeps n of m weights; None without a pattern."""
        if self.pattern is None:
            return None
        n, m = self.pattern.split(":")
        return int(n), int(m)

    @property
    def removed(self) -> Fraction:
        """The exact fraction of the weights to remove."""
        if self.pattern is not None:
            n, m = self.nm
            return 1 - Fraction(n, m)
        return Fraction("0.5" if self.sparsity is None else self.sparsity)

    def resolved(self) -> PruneConfig:
        """The same config, with each default filled in that depends on other settings."""
        return replace(
            self,
            allocation=self.allocation or self.traits.allocations[0],
            sparsity=self.sparsity or _decimal(self.removed),
            order=self.order or self.traits.order,
            fisher=self.fisher or "empirical",
            eval_seqlen=self.eval_seqlen or self.seqlen,
        )

    def select(self, *groups: str) -> dict:
        """Name -> value of the settings of some groups, as settings_of()."""
        return {name: getattr(self, name) for name in settings_of(*groups)}

    def without(self, *groups: str) -> dict:
        """to_dict() without the settings of some groups."""
        return {name: value for name, value in self.to_dict().items() if name not in settings_of(*groups)}

    def to_dict(self) -> dict:
        """The settings as JSON values, as fwanda.json holds them and from_dict() reads them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict) -> PruneConfig:
        """Build a config from JSON values.

        Raises:
            UserError: a key is unknown or a value is not allowed.
        """
        if not isinstance(values, dict):
            raise UserError(f"settings must be a dict, got {type(values).__name__}; give their names and values")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known, key=show)
        if unknown:
            hint = did_you_mean(show(unknown[0]).strip("'"), known) or f"; the settings are {', '.join(sorted(known))}"
            raise UserError(f"unknown setting {show(unknown[0])}{hint}")
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> PruneConfig:
        """Read a YAML or JSON file of settings, named as the fields of this class.

        Raises:
            UserError: the file is missing, is not a mapping, or holds a bad setting. The message names the file.
        """
        expect_path("config", path)
        refuse_pipe(path, "the settings")
        try:
            values = read_yaml(path)
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise UserError(f"cannot read the settings in {shown_path(path)}: {reason}") from error
        if not isinstance(values, dict):
            raise UserError(f"{shown_path(path)} must hold a mapping of settings, got {type(values).__name__}")
        try:
            return cls.from_dict(values)
        except UserError as error:
            raise UserError(f"{shown_path(path)}: {error}") from error


def settings_of(*groups: str) -> tuple[str, ...]:
    """Names of the settings of some groups, in the order of the fields.

    Args:
        groups: keys of GROUPS.

    Raises:
        ValueError: a group does not exist.
    """
    if unknown := set(groups) - set(GROUPS):
        raise ValueError(f"settings_of: groups must be among {', '.join(GROUPS)}, got {', '.join(sorted(unknown))}")
    return tuple(f.name for f in fields(PruneConfig) if f.metadata["group"] in groups)


def _decimal(value: Fraction) -> str:
    """value as an exact decimal if there is one, else as p/q."""
    short = f"{float(value):.15g}"
    return short if Fraction(short) == value else str(value)
