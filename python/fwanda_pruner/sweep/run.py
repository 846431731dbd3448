"""`fwanda sweep`: many settings on one model, each cell a file, so that an interrupted sweep goes on."""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import fwanda_kernels as fk

from ..allocate.budgets import keep_total
from ..config import PruneConfig
from ..errors import UserError, one_line
from ..evaluate.perplexity import check_dense
from ..evaluate.tasks import check_tasks, evaluate_tasks
from ..formats.dense import atomic_file, user_errors
from ..measure.statistics import Statistics, fingerprint
from ..model.targets import Target, find_targets
from ..run.pipeline import collect, evaluate_model, prune
from ..run.state import RunState
from ..text.sources import file_sha256

RECIPES = Path(__file__).parent / "recipes"
_CELLS = "cells"
_BINS = 50
_KEYS = ("base", "cells", "seeds", "tasks", "share_statistics")
_EVALUATION = ("calibration", "seqlen", "eval", "eval_seqlen", "eval_windows", "bos", "device", "dtype")
_TOLD = ("method", "allocation", "pattern", "sparsity", "order", "seed")
_PARTS = ("report", "dense", "kept")  # of a cell
# what a calibration depends on; the rest of a cell can share one
_CALIBRATION = ("calibration", "nsamples", "seqlen", "seed", "fisher", "bos")


@dataclass(frozen=True)
class Recipe:
    """What to run.

    Attributes:
        cells: the settings of each cell, without repetitions.
        tasks: names for fwanda_pruner.evaluate_tasks(), run on the dense model and on each cell.
        share_statistics: one forward and backward pass serves all cells with the same text and Fisher information, and
            what "auto" or "response" chose serves every method; seconds and joules of a cell are of the rest. Without
            it each cell measures and chooses by itself, so that they are those of a run by itself.
    """

    cells: tuple[PruneConfig, ...]
    tasks: tuple[str, ...] = ()
    share_statistics: bool = True

    @classmethod
    def load(cls, name: str | Path, overrides: dict | None = None) -> Recipe:
        """Read a YAML file, or a recipe that comes with the package by its name.

        The file is a mapping: `base` (settings of every cell), `cells` (a list of mappings; a list as a value is
        crossed with the others), `seeds` (each cell that reads text runs with each; default 0), `tasks` and
        `share_statistics`.

        Args:
            name: of the recipe, or its file.
            overrides: settings that take the place of those of every cell.

        Raises:
            UserError: there is no such recipe, or a setting is wrong; one line that names it.
        """
        import yaml

        path = Path(name)
        if not path.suffix and (RECIPES / f"{name}.yaml").is_file():
            path = RECIPES / f"{name}.yaml"
        try:
            values = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
            known = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.yaml")))
            line = one_line(error, 200)
            raise UserError(f"cannot read the recipe {name}: {line}; recipes that come along: {known}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path} must be a mapping with the keys {', '.join(_KEYS)}, got {type(values).__name__}")
        if unknown := [key for key in values if key not in _KEYS]:
            raise UserError(f"{path}: unknown key {unknown[0]!r}; the keys are {', '.join(_KEYS)}")
        shares = values.get("share_statistics", True)
        if not isinstance(shares, bool):
            raise UserError(f"{path}: share_statistics must be true or false, got {type(shares).__name__}")
        tasks = _listed(path, values, "tasks", [])
        if not all(isinstance(task, str) for task in tasks):
            raise UserError(f"{path}: tasks must be a list of names")
        cells = tuple(dict.fromkeys(_expanded(path, values, overrides or {})))
        if len({(config.device, config.dtype) for config in cells}) > 1:
            raise UserError(f"{path}: one model serves all cells; give device and dtype in base")
        return cls(cells, tuple(tasks), shares)


def _expanded(path: Path, values: dict, overrides: dict) -> Iterable[PruneConfig]:
    """Every combination of the cells' lists, on top of the base, with each seed."""
    base, seeds = values.get("base", {}), _listed(path, values, "seeds", [0])
    crossed = _listed(path, values, "cells", [])
    if not isinstance(base, dict) or not crossed or not all(isinstance(cell, dict) for cell in crossed):
        raise UserError(f"{path}: base must be a mapping, and cells a list of mappings, at least one")
    if any("seed" in settings for settings in (base, *crossed)):
        raise UserError(f"{path}: give seeds, a list beside cells, in place of seed")
    if not seeds or [] in [value for cell in crossed for value in cell.values()]:
        raise UserError(f"{path}: a list of seeds or of values is empty")
    for cell in crossed:
        lists = [value if isinstance(value, list) else [value] for value in cell.values()]
        for *combination, seed in itertools.product(*lists, seeds):
            settings = {**base, **dict(zip(cell, combination, strict=True)), "seed": seed, **overrides}
            try:
                config = PruneConfig.from_dict(settings).resolved()
            except UserError as error:
                raise UserError(f"{path}: {error}") from error
            yield config if config.reads_statistics or config.runs_blocks else replace(config, seed=0)


def _listed(path: Path, values: dict, key: str, default) -> list:
    found = values.get(key, default)
    if not isinstance(found, list):
        raise UserError(f"{path}: {key} must be a list, got {type(found).__name__}")
    return found


def run(
    model: nn.Module,
    tokenizer,
    recipe: Recipe,
    output: str | Path,
    *,
    source: str | None = None,
    eval_data: str | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> list[dict]:
    """Run every cell that has no file yet; the model has its dense weights again afterwards.

    Args:
        model, tokenizer: as prune().
        recipe: what to run.
        output: folder of the results; `cells/` in it holds one JSON file a cell.
        source: name of the model, for the tables.
        eval_data, batch_size, limit: as evaluate_tasks().
        progress: show bars.

    Returns:
        One dict for each cell, in the order of the recipe: {"model": source, "report": the report, all that
        evaluate_model() returns, "lm_eval": tasks or None, "dense": both of the dense model, "shared": whether the
        statistics are those of other cells too, "kept": histogram, "disagreement": by matrix or None}.

    Raises:
        UserError: as prune(), naming the cell; the cells before it are kept.
    """
    output = Path(output)
    tasks = {"batch_size": batch_size, "limit": limit, "data_dir": eval_data}
    tasks = {name: value for name, value in tasks.items() if value is not None}
    if recipe.tasks:
        check_tasks(recipe.tasks, **tasks)
    tasks["progress"] = progress
    with user_errors(output):
        (output / _CELLS).mkdir(parents=True, exist_ok=True)
    targets = find_targets(model)[0]
    names = {name for config in recipe.cells for name in (config.calibration, config.eval)}
    sources = _Sources(fingerprint(targets), {name: file_sha256(name) for name in names})
    dense = {target.name: target.weight.to("cpu", copy=True) for target in targets}
    cells: dict[PruneConfig, dict] = {}
    choices: dict[PruneConfig, tuple] = {}
    shared: tuple[tuple, Statistics] | None = None
    for index, config in enumerate(sorted(recipe.cells, key=_calibration)):
        path = output / _CELLS / f"{_key(config, recipe, sources, tasks)}.json"
        if path.is_file():
            cells[config] = _read(path, _PARTS)
            continue
        if progress:
            told = describe(config, recipe.cells)
            print(f"cell {index + 1} of {len(recipe.cells)}: {told}, seed {config.seed}", flush=True)
        asked = config
        before = _dense_facts(model, tokenizer, config, recipe, output, tasks, sources)
        config = replace(config, bos={True: "window", False: "none", None: config.bos}[before.get("bos")])
        statistics, state = None, None
        if recipe.share_statistics and config.reads_statistics:
            shared = _shared(model, tokenizer, config, shared, progress)
            statistics, state = shared[1], _Choices(choices, config)
        cell = _cell(model, tokenizer, config, recipe, statistics, state, targets, dense, tasks, progress)
        cell = {"model": source, **cell, "dense": before}
        with user_errors(output), atomic_file(path) as temporary:
            temporary.write_text(json.dumps(cell) + "\n", encoding="utf-8")
        cells[asked] = cell
    return [cells[config] for config in recipe.cells]


def describe(config: PruneConfig, among: Iterable[PruneConfig]) -> str:
    """The settings of a cell that tell it from others, but for the seed, on one line."""
    words = [config.method, config.allocation, config.pattern or config.sparsity]
    values = {key: value for key, value in config.to_dict().items() if key not in _TOLD}
    varying = [
        key for key, value in values.items() if any(getattr(other, key) != getattr(config, key) for other in among)
    ]
    order = [] if config.order == config.facts.order else [f"order={config.order}"]
    return " ".join([*words, *order, *(f"{key}={values[key]}" for key in varying)])


@dataclass(frozen=True)
class _Sources:
    """Hashes of what a sweep reads: the dense weights, and each text that is a file by its name."""

    weights: str
    texts: dict[str | None, str | None]


def _key(config: PruneConfig, recipe: Recipe, sources: _Sources, tasks: dict) -> str:
    """Name of a cell's file: what its result depends on."""
    facts = {
        **config.to_dict(),
        "version": fk.__version__,
        "weights": sources.weights,
        "texts": [sources.texts[name] for name in (config.calibration, config.eval)],
        "tasks": recipe.tasks,
        "limit": tasks.get("limit"),
        "shared": recipe.share_statistics,
    }
    if "data_dir" in tasks:
        facts["data_dir"] = str(Path(tasks["data_dir"]).resolve())
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path, parts: Iterable[str]) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not found.keys() >= set(parts):
            raise ValueError("not what a sweep writes")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is broken ({error}); remove it, and its cell runs again") from error


def _measured(model, tokenizer, config: PruneConfig, recipe: Recipe, tasks: dict) -> dict:
    """Perplexity with its protocol, and the tasks, of the model as it is."""
    accuracies = evaluate_tasks(model, tokenizer, recipe.tasks, **tasks) if recipe.tasks else None
    return evaluate_model(model, tokenizer, config=config, progress=tasks["progress"]) | {"lm_eval": accuracies}


def _dense_facts(model, tokenizer, config: PruneConfig, recipe: Recipe, output: Path, tasks: dict, sources) -> dict:
    """_measured() of the dense model, once for each way to evaluate."""
    neutral = PruneConfig(**{key: getattr(config, key) for key in _EVALUATION}).resolved()
    path = output / _CELLS / f"dense-{_key(neutral, recipe, sources, tasks)}.json"
    if path.is_file():
        return _read(path, ("sparsity", "lm_eval"))
    found = _measured(model, tokenizer, config, recipe, tasks)
    if "perplexity" in found and (note := check_dense(found["perplexity"], model.config.get_text_config().vocab_size)):
        warnings.warn(note, stacklevel=2)
    with user_errors(output), atomic_file(path) as temporary:
        temporary.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return found


def _calibration(config: PruneConfig) -> tuple[str, ...]:
    """What the statistics of a cell depend on; cells with the same run one after the other."""
    return tuple(str(getattr(config, name)) for name in _CALIBRATION)


def _shared(model, tokenizer, config: PruneConfig, last, progress: bool) -> tuple[tuple, Statistics]:
    """The statistics of the cell's text: those of the cell before where they are the same."""
    key = _calibration(config)
    if last is not None and last[0] == key:
        return last
    return key, collect(model, tokenizer, config=config, progress=progress)


class _Choices(RunState):
    """What "auto" and "response" chose for a cell serves those that do something else with the same masks."""

    def __init__(self, choices: dict[PruneConfig, tuple], config: PruneConfig):
        super().__init__()
        self._choices = choices
        self._key = replace(config, method="fwanda", order="onepass")

    def recall(self, stage: str) -> tuple[dict[str, Tensor], dict] | None:
        if stage != "chosen" or self._key not in self._choices:
            return None
        tensors, facts, notes = self._choices[self._key]
        self.notes += [note for note in notes if note not in self.notes]
        return tensors, facts

    def keep(self, stage: str, tensors: dict[str, Tensor], facts: dict | None = None) -> None:
        if stage == "chosen":
            self._choices[self._key] = tensors, facts, list(self.notes)


def _cell(
    model, tokenizer, config, recipe, statistics, state, targets: list[Target], dense, tasks: dict, progress: bool
) -> dict:
    """Prune, evaluate, and put the dense weights back."""
    try:
        settings = replace(config, eval=None)
        report = prune(model, tokenizer, config=settings, statistics=statistics, state=state, progress=progress)
        found = _measured(model, tokenizer, config, recipe, tasks)
        names = {row.name for row in report.matrices if row.skipped is None}
        pruned = [target for target in targets if target.name in names]
        return {
            "report": report.to_dict() | {"config": report.config | {"eval": config.eval}},
            **found,
            "shared": statistics is not None,
            "kept": _histogram(pruned),
            "disagreement": None if statistics is None else _disagreement(config, pruned, dense, statistics),
        }
    except UserError as error:
        raise UserError(f"{describe(config, recipe.cells)}: {error}") from error
    finally:
        for target in targets:
            target.weight.copy_(dense[target.name])


def _histogram(targets: list[Target]) -> list[int]:
    """How many rows keep a share of their weights in each of 50 equal bins of [0, 1]."""
    shares = [(t.weight != 0).float().mean(1) for t in targets]
    return torch.histc(torch.cat(shares), bins=_BINS, min=0, max=1).long().tolist()


def _disagreement(
    config: PruneConfig, targets: list[Target], dense: dict[str, Tensor], statistics: Statistics
) -> dict[str, float] | None:
    """Share of the mask entries of each matrix that are not those of Wanda at the same sparsity."""
    if config.nm:
        return None
    shares = {}
    for target in targets:
        weight, norm = dense[target.name].to(target.weight.device), statistics.layer(target.name).norm
        cols = weight.shape[1]
        mask = fk.row_topk_mask(weight, norm, keep_total(cols, config.removed))
        shares[target.name] = float((mask != (target.weight != 0)).float().mean())
    return shares
