"""Run the cells of a recipe on one model. Each finished cell is a file, so an interrupted sweep can go on."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import Tensor, nn

import fwanda_kernels as fk

from ..allocate.search import Choice
from ..config import CALIBRATION, PruneConfig
from ..engine.all_weights import fingerprint
from ..engine.device import device_rules
from ..engine.engine import Engine, make_engine
from ..engine.ranks import Ranks
from ..errors import UserError
from ..evaluate.lm_eval_tasks import BATCH_SIZE, check_place, check_tasks, evaluate_tasks
from ..evaluate.perplexity import check_dense, check_pruned
from ..formats.files import atomic_file, resolved_output, user_errors
from ..measure.statistics import Statistics
from ..model.plain import check_plain
from ..model.targets import check_columns, check_length, find_targets, select_targets
from ..notes import showing, warn
from ..report.record import Report
from ..run.pipeline import collect, evaluate_model, own_text, run_prune
from ..run.read_texts import own_seed
from ..source_shares import OWN_TEXT
from ..terminal import say
from ..text.sources import local_sha256
from ..text.tokenizer_hash import tokenizer_sha256
from ..text.windows import check_window
from .figures import PICTURES
from .recipe import Recipe, describe
from .tables import TABLES, evaluation, lines_of, markdown

# what reading a file of another form may raise
_BROKEN = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_CELL_NAME = re.compile(r"(dense-)?[0-9a-f]{16}\.json")  # as _cell_path()


@dataclass(frozen=True)
class TaskSettings:
    """How to run the tasks of a recipe; the fields are arguments of evaluate_tasks()."""

    batch_size: int = BATCH_SIZE
    limit: int | None = None
    data_dir: str | None = None


@dataclass(frozen=True)
class _Sweep:
    """What all cells have in common.

    Attributes:
        model, tokenizer, recipe: of run().
        folder: where the files of the cells lie.
        tasks: arguments of evaluate_tasks().
        weights: hash of the dense weights.
        tokens: hash of the tokenizer.
        texts: name of each text -> hash of its file; None if the text is no file.
        progress: show bars.
    """

    model: nn.Module
    tokenizer: object
    recipe: Recipe
    folder: Path
    tasks: TaskSettings
    weights: str
    tokens: str | None
    texts: dict[str | None, str | None]
    progress: bool


def run(
    model: nn.Module,
    tokenizer,
    recipe: Recipe,
    output: str | Path,
    *,
    source: str | None = None,
    tasks: TaskSettings | None = None,
    progress: bool = True,
) -> list[dict]:
    """Run every cell that has no file yet. The model has its dense weights again afterwards.

    Args:
        model, tokenizer: as in prune().
        recipe: what to run.
        output: folder of the results; its subfolder `cells` holds one JSON file for each cell.
        source: name of the model, for the tables.
        tasks: how to run the recipe's tasks.
        progress: show bars.

    Returns:
        One dict for each cell, in the order of the recipe. Its keys: "model" (source), "report" (of the run), those of
        evaluate_model(), "lm_eval" (the results of the tasks, or None), "dense" (the same figures of the dense model)
        and "shared" (whether other cells use the same statistics).

    Raises:
        UserError: as prune(); the message names the cell. The cells before it are kept.
    """
    tasks, folder, ranks = tasks or TaskSettings(), Path(output) / "cells", Ranks.current()
    if recipe.tasks:
        check_tasks(recipe.tasks, **asdict(tasks))
        check_place(model, recipe.tasks)
    check_plain(model)
    progress = progress and ranks.first
    engine = make_engine(model, find_targets(model)[0], recipe.cells[0])
    if engine.name == "sharded":
        raise UserError(
            "a sweep keeps a copy of all weights on each rank, so they cannot be sharded; use --engine streamed"
        )
    _check_cells(model, recipe)
    ranks.share(lambda: _make(folder))
    names = {name for config in recipe.cells for name in _text_names(config)}
    texts = {name: local_sha256(name) for name in names}
    hashes = fingerprint(engine), tokenizer_sha256(tokenizer)
    sweep = _Sweep(model, tokenizer, recipe, folder, tasks, *hashes, texts, progress)
    weights = _copied(engine)
    cells, shared = {}, _Shared()
    ordered = sorted(recipe.cells, key=lambda config: (_calibration(config), config.removed))
    with showing(ranks.first):
        for number, config in enumerate(ordered, 1):
            path, label = _cell_path(sweep, config), describe(config, recipe.cells)
            cell = ranks.share(lambda path=path: _kept(path, _check_cell))
            if cell is None:
                if progress:
                    say(f"cell {number} of {len(recipe.cells)}: {label}, seed {config.seed}")
                try:
                    cell = {"model": source, **_run_cell(sweep, config, label, shared, cells)}
                finally:
                    _restore(engine, weights)
                cell = ranks.share(lambda path=path, cell=cell: _written(path, cell, _check_cell))
            cells[config] = cell
    return [cells[config] for config in recipe.cells]


def check_folder(output: str | Path, model: str | None = None) -> None:
    """Refuses a folder whose results are not those of a sweep. Writes nothing.

    Args:
        output: folder of the results.
        model: name or folder of the model.

    Raises:
        UserError: it has a name that cannot be used, is the folder of the model, or holds a file that a sweep would
            replace, and no finished cell.
    """
    resolved, output = resolved_output(output), Path(output)
    if model and os.path.exists(model) and resolved == Path(model).resolve():
        raise UserError(f"--output {output} is the folder of the model; choose another folder")
    with user_errors(output):
        taken = next((name for name in (*TABLES, *PICTURES) if (output / name).exists()), None)
        if taken is not None and not any(_CELL_NAME.fullmatch(path.name) for path in (output / "cells").glob("*")):
            raise UserError(
                f"--output {output} holds {taken}, which was not written by fwanda sweep; choose another folder"
            )


def check_windows(recipe: Recipe, tokenizer) -> None:
    """Refuses a text that is shorter than one window of a cell.

    Raises:
        UserError: naming the text.
    """
    lengths: dict[tuple[str, str], int] = {}  # name and purpose of a text -> its longest window
    for config in recipe.cells:
        read = [(source.name, "calibration", config.seqlen) for source in config.sources if config.reads_text]
        read += [
            (name, "calibration", config.seqlen) for name in config.guards if config.responds or not config.no_check
        ]
        read += [(name, "eval", config.eval_seqlen or config.seqlen) for name in config.eval]
        for name, purpose, seqlen in read:
            lengths[name, purpose] = max(seqlen, lengths.get((name, purpose), 0))
    for (name, purpose), seqlen in lengths.items():
        if name != OWN_TEXT:
            check_window(name, tokenizer, seqlen, purpose)


def _check_cells(model: nn.Module, recipe: Recipe) -> None:
    """Refuses settings of cells that do not fit the model, before anything is measured or written."""
    found = find_targets(model)
    for config in recipe.cells:
        check_columns(select_targets(*found, config)[0], config)
        check_length(model, config.seqlen if config.reads_text else config.eval_seqlen or 0)
        with device_rules(model, config):
            pass


def _make(folder: Path) -> None:
    with user_errors(folder.parent):
        folder.mkdir(parents=True, exist_ok=True)


def _run_cell(
    sweep: _Sweep, config: PruneConfig, label: str, shared: _Shared, cells: Mapping[PruneConfig, dict]
) -> dict:
    """The figures of a cell.

    Args:
        label: describes the cell in messages.
        shared: from the cells before it.
        cells: those that are finished.
    """
    dense = _dense_figures(sweep, config)
    try:
        cell = {**_pruned_figures(sweep, _with_bos(config, dense), shared), "dense": dense}
    except UserError as error:
        raise UserError(f"{label}: {error}") from error
    if note := _damage(sweep, config, cell, cells):
        warn(f"{label}: {note}")
        cell["report"]["warnings"].append(note)
    return cell


@dataclass
class _Shared:
    """What a cell can take over from those before it.

    Attributes:
        calibration: the settings that `statistics` depend on.
        statistics: of the last calibration.
        choices: config -> what "auto" or "response" chose for it.
        written: the settings that `own` depends on.
        own: text that the dense model wrote.
    """

    calibration: tuple[str, ...] | None = None
    statistics: Statistics | None = None
    choices: dict[PruneConfig, Choice] = field(default_factory=dict)
    written: tuple | None = None
    own: Tensor | None = None


def _copied(engine: Engine) -> dict[str, Tensor]:
    """Copies of the target weights on the CPU, by name."""
    copies = {}
    for index in range(engine.block_count):
        with engine.block(index) as block:
            copies |= {name: weight.to("cpu", copy=True) for name, weight in block.weights.items()}
    return copies


def _restore(engine: Engine, weights: dict[str, Tensor]) -> None:
    for index in range(engine.block_count):
        with engine.block(index, writes=True) as block:
            for name, weight in block.weights.items():
                weight.copy_(weights[name])


def _with_bos(config: PruneConfig, dense: dict) -> PruneConfig:
    """The config with the BOS policy under which the dense model was measured."""
    decided = dense["perplexity"][0]["bos"] if dense["perplexity"] else None
    return replace(config, bos={True: "window", False: "none", None: config.bos}[decided])


def _pruned_figures(sweep: _Sweep, config: PruneConfig, shared: _Shared) -> dict:
    """Prune the model by the config, and measure it."""
    if shared.written != (written := _writing(config)):
        same = [cell for cell in sweep.recipe.cells if _writing(cell) == written]
        shared.own = own_text(sweep.model, sweep.tokenizer, configs=same, progress=sweep.progress)
        shared.written = written
    shares = sweep.recipe.share_statistics and config.reads_statistics
    if shares and shared.calibration != _calibration(config):
        shared.statistics = collect(
            sweep.model, sweep.tokenizer, config=config, progress=sweep.progress, own=shared.own
        )
        shared.calibration = _calibration(config)
    searches = shares and config.responds
    same_masks = replace(config, method="fwanda", order="onepass") if searches else None  # equal ones choose the same
    report, choice = run_prune(
        sweep.model,
        sweep.tokenizer,
        config=replace(config, eval=()),
        statistics=shared.statistics if shares else None,
        progress=sweep.progress,
        choice=shared.choices.get(same_masks),
        own=shared.own,
        measured_later=bool(config.eval),
    )
    if searches:
        shared.choices[same_masks] = choice
    report = report.to_dict() | {"config": report.config | {"eval": list(config.eval)}}
    return {"report": report, **_measured(sweep, config), "shared": shares}


def _dense_figures(sweep: _Sweep, config: PruneConfig) -> dict:
    """_measured() of the dense model; it is saved, and all cells with the same evaluation read it."""
    settings = config.select("eval", "bos", "place")
    path, ranks = _cell_path(sweep, PruneConfig(**settings).resolved(), prefix="dense-"), Ranks.current()
    if (kept := ranks.share(lambda: _kept(path, evaluation))) is not None:
        return kept
    figures = _measured(sweep, config)
    vocabulary = sweep.model.config.get_text_config().vocab_size
    for text in figures["perplexity"]:
        if note := check_dense(text["perplexity"], vocabulary, text["source"]):
            warn(note)
    ranks.share(lambda: _write(path, figures))
    return figures


def _damage(
    sweep: _Sweep, config: PruneConfig, cell: dict, finished: Mapping[PruneConfig, dict] | None = None
) -> str | None:
    """What check_pruned() says of a cell, and which lower sparsity among the finished cells does no such damage."""
    texts = zip(cell["dense"]["perplexity"], cell["perplexity"], strict=True)
    measured = {before["source"]: (before["perplexity"], after["perplexity"]) for before, after in texts}
    note = check_pruned(measured, sweep.model.config.get_text_config().vocab_size, config)
    if note is None or not finished:
        return note
    alike = [c for c in finished if {**c.to_dict(), "sparsity": None} == {**config.to_dict(), "sparsity": None}]
    lower = [c for c in alike if c.removed < config.removed and _damage(sweep, c, finished[c]) is None]
    if not lower:
        return note
    return f"{note}; here, --sparsity {max(lower, key=lambda c: c.removed).sparsity} did no such damage"


def _measured(sweep: _Sweep, config: PruneConfig) -> dict:
    """evaluate_model() and the tasks, of the model as it is now."""
    figures = evaluate_model(sweep.model, sweep.tokenizer, config=config, progress=sweep.progress)
    tasks = sweep.recipe.tasks
    if not tasks:
        return {**figures, "lm_eval": None}
    settings = {**asdict(sweep.tasks), "progress": sweep.progress}
    results = Ranks.current().share(lambda: evaluate_tasks(sweep.model, sweep.tokenizer, tasks, **settings))
    return {**figures, "lm_eval": results}


def _calibration(config: PruneConfig) -> tuple[str, ...]:
    """The settings that statistics depend on. Cells with the same ones run one after the other."""
    return tuple(map(str, config.select(*CALIBRATION).values()))


def _writing(config: PruneConfig) -> tuple:
    """The settings that the model's own text depends on, besides the number of its windows."""
    return config.seqlen, own_seed(config), config.start_token


def _text_names(config: PruneConfig) -> list[str]:
    return [*(source.name for source in config.sources), *config.guards, *config.eval]


def _cell_path(sweep: _Sweep, config: PruneConfig, prefix: str = "") -> Path:
    """The file of a cell. Its name is a hash of all that the result depends on."""
    facts = {
        **config.to_dict(),
        "version": fk.__version__,
        "dtype": str(sweep.model.dtype).removeprefix("torch."),
        "weights": sweep.weights,
        "tokenizer": sweep.tokens,
        "texts": [sweep.texts.get(name) for name in _text_names(config)],
        "tasks": sweep.recipe.tasks,
        "limit": sweep.tasks.limit,
        "shared": sweep.recipe.share_statistics,
    }
    if not (ranks := Ranks.current()).alone:
        facts["started"] = ranks.started
    if sweep.tasks.data_dir is not None:
        facts["data_dir"] = str(Path(sweep.tasks.data_dir).resolve())
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return sweep.folder / f"{prefix}{key}.json"


def _kept(path: Path, check: Callable[[dict], object]) -> dict | None:
    """What an earlier sweep wrote; None if there is no such file."""
    return _read(path, check) if path.is_file() else None


def _written(path: Path, values: dict, check: Callable[[dict], object]) -> dict:
    """Writes a file, and returns what is read from it."""
    _write(path, values)
    return _read(path, check)


def _read(path: Path, check: Callable[[dict], object]) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        check(values)
        return values
    except _BROKEN as error:
        reason = str(error) if isinstance(error, OSError | ValueError) else f"not what a sweep writes: {error!r}"
        raise UserError(f"{path} is broken ({reason}); remove it, and its cell runs again") from error


def _check_cell(cell: dict) -> None:
    """Reads all that tables and pictures show of a cell; fails in any way for what no sweep writes."""
    report = Report.from_dict(cell["report"])
    if not isinstance(cell["shared"], bool) or len(cell["perplexity"]) != len(cell["dense"]["perplexity"]):
        raise ValueError("not what a sweep writes")
    config = PruneConfig(method=report.config["method"]).resolved()
    markdown(lines_of([config], [cell]))


def _write(path: Path, values: dict) -> None:
    with user_errors(path.parents[1]), atomic_file(path) as temporary:
        temporary.write_text(json.dumps(values) + "\n", encoding="utf-8")
