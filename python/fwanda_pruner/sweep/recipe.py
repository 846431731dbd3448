"""Recipes: YAML files that list the settings of a sweep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import PruneConfig
from ..errors import UserError, did_you_mean, one_line, refuse_pipe, shortened
from ..yaml_file import read_yaml

RECIPES = Path(__file__).parent / "recipes"
MOST_CELLS = 10_000  # each is a run of seconds at least
_KEYS = ("base", "cells", "seeds", "tasks", "share_statistics")
_NAMED = ("method", "allocation", "pattern", "sparsity", "order", "seed")  # describe() shows them in its own way


@dataclass(frozen=True)
class Recipe:
    """The settings of a sweep. A cell is one run: one combination of settings with one seed.

    Attributes:
        cells: the settings of each cell, without repetitions.
        tasks: names for fwanda_pruner.evaluate_tasks(), which runs on the dense model and on each cell.
        share_statistics: cells with the same text and Fisher information share one calibration, and cells whose masks
            are the same share the choice of "auto" or "response". The seconds and joules of a cell then leave the
            shared part out. If false, each cell measures and chooses by itself, so its seconds and joules are those of
            a run on its own.
    """

    cells: tuple[PruneConfig, ...]
    tasks: tuple[str, ...] = ()
    share_statistics: bool = True

    @classmethod
    def load(cls, name: str | Path, overrides: dict | None = None) -> Recipe:
        """Read a YAML file, or a recipe of the package by its name.

        The file is a mapping with these keys. `base`: settings of every cell. `cells`: a list of mappings; each list of
        values in a mapping is combined with all others. A setting that takes a list, such as eval, gets a list of lists
        there. `seeds`: every cell that reads text runs with each of them; [0] by default. `tasks` and
        `share_statistics`: see above.

        Args:
            name: the name of a recipe of the package, or a path.
            overrides: settings that replace those of every cell.

        Raises:
            UserError: there is no such recipe, or a setting is wrong.
        """
        path = Path(name)
        if not path.suffix and (RECIPES / f"{name}.yaml").is_file():
            path = RECIPES / f"{name}.yaml"
        values = _read(path, name)
        shares = values.get("share_statistics", True)
        if not isinstance(shares, bool):
            raise UserError(f"{path}: share_statistics must be true or false, got {type(shares).__name__}")
        tasks = _list_of(path, values, "tasks", [])
        if not all(isinstance(task, str) for task in tasks):
            raise UserError(f"{path}: tasks must be a list of names")
        cells = tuple(dict.fromkeys(_combinations(path, values, overrides or {})))
        if len({(config.device, config.dtype) for config in cells}) > 1:
            raise UserError(f"{path}: one model serves all cells; give device and dtype in base")
        return cls(cells, tuple(tasks), shares)


def recipe_names() -> list[str]:
    """Names of the recipes of the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def describe(config: PruneConfig, among: Iterable[PruneConfig]) -> str:
    """One line with the settings that tell a cell from others; the seed is left out."""
    words = [config.method, config.allocation, config.pattern or config.sparsity]
    values = {key: _in_words(value) for key, value in config.to_dict().items() if key not in _NAMED}
    varying = [
        key for key, value in values.items() if any(getattr(other, key) != getattr(config, key) for other in among)
    ]
    order = [] if config.order == config.traits.order else [f"order={config.order}"]
    return " ".join([*words, *order, *(f"{key}={values[key]}" for key in varying)])


def _in_words(value) -> str:
    return "+".join(value) if isinstance(value, list) else str(value)


def _read(path: Path, name: str | Path) -> dict:
    refuse_pipe(path, "the recipe")
    try:
        values = read_yaml(path)
    except (OSError, ValueError, RecursionError) as error:
        reason, known = getattr(error, "strerror", None) or one_line(error, 200), recipe_names()
        hint = did_you_mean(str(name), known) or f"; recipes of the package: {', '.join(known)}"
        raise UserError(f"cannot read the recipe {name}: {reason}{hint}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must be a mapping with the keys {', '.join(_KEYS)}, got {type(values).__name__}")
    if unknown := [key for key in values if key not in _KEYS]:
        raise UserError(f"{path}: unknown key {unknown[0]!r}; the keys are {', '.join(_KEYS)}")
    return values


def _combinations(path: Path, values: dict, overrides: dict) -> Iterable[PruneConfig]:
    """Yield every combination of the lists in each cell, on top of base, with each seed."""
    base, seeds = values.get("base", {}), _list_of(path, values, "seeds", [0])
    cells = _list_of(path, values, "cells", [])
    if not isinstance(base, dict) or not cells or not all(isinstance(cell, dict) for cell in cells):
        raise UserError(f"{path}: base must be a mapping, and cells a list of mappings, at least one")
    if any("save" in settings for settings in (base, *cells)):
        raise UserError(f"{path}: a sweep saves no models, so save has no effect; leave it out")
    if any("seed" in settings for settings in (base, *cells)):
        raise UserError(f"{path}: give a list of seeds beside cells, and no seed in base or in a cell")
    if not seeds or [] in [value for cell in cells for value in cell.values()]:
        raise UserError(f"{path}: a list of seeds or of values is empty")
    crossed = [[value if isinstance(value, list) else [value] for value in cell.values()] for cell in cells]
    count = sum(math.prod(map(len, lists)) for lists in crossed) * len(seeds)
    if count > MOST_CELLS:
        raise UserError(
            f"{path}: its lists make {shortened(str(count), 20)} cells, at most {MOST_CELLS} are allowed; take values "
            f"or seeds out, or write several recipes"
        )
    for cell, lists in zip(cells, crossed, strict=True):
        for *combination, seed in itertools.product(*lists, seeds):
            settings = {**base, **dict(zip(cell, combination, strict=True)), "seed": seed, **overrides}
            try:
                config = PruneConfig.from_dict(settings).resolved()
            except UserError as error:
                raise UserError(f"{path}: {error}") from error
            yield config if config.reads_statistics or config.runs_blocks else replace(config, seed=0)


def _list_of(path: Path, values: dict, key: str, default: list) -> list:
    value = values.get(key, default)
    if not isinstance(value, list):
        raise UserError(f"{path}: {key} must be a list, got {type(value).__name__}")
    return value
