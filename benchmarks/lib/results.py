"""The JSON files of results: writing one, and reading those of one kind. benchmarks/results has what the pages show."""

import json
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
UNSHARED = RESULTS.parent.parent / ".benchmarks"  # where new results go unless asked; git ignores it

# kind of result -> what its tables read
_KEYS = {
    "ops": {"date": str, "card": str, "rows": list},
    "prune": {"date": str, "card": str},
    "scaling": {"date": str, "card": str, "gpus": int, "cases": list},
    "quality": {
        "date": str, "card": str, "driver": object, "torch": str, "model": str, "recipe": str, "dtype": str,
        "texts": list, "dense": dict, "calibration": object, "lines": list,
    },
}  # fmt: skip
_LINE_KEYS = {"label", "method", "allocation", "sparsity", "pattern", "seeds"}


def slug(*words: object) -> str:
    """Words as a part of a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(map(str, words)).lower()).strip("-")


def write(path: Path, result: dict) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def read_all(kind: str, folder: Path = RESULTS) -> dict[Path, dict]:
    """Path -> result of every file KIND-*.json, older dates first.

    Raises:
        SystemExit: a file is no result of such a benchmark; the message is one line.
    """
    found = {path: _checked(path, _KEYS[kind]) for path in folder.glob(f"{kind}-*.json")}
    return dict(sorted(found.items(), key=lambda item: (item[1]["date"], item[0].stem)))


def _checked(path: Path, keys: dict[str, type]) -> dict:
    """A result, if it has the keys that its tables read."""
    try:
        result = read(path)
        if not isinstance(result, dict):
            raise ValueError(f"it holds a {type(result).__name__}, expected an object")
        for key, kind in keys.items():
            if key not in result or not isinstance(result[key], kind):
                raise ValueError(f"its key {key!r} is missing or of another type")
        for line in result["lines"] if "lines" in keys else ():
            if not isinstance(line, dict) or not _LINE_KEYS <= line.keys():
                raise ValueError(f"each of its lines must have {', '.join(sorted(_LINE_KEYS))}")
    except (OSError, ValueError, RecursionError) as error:
        raise SystemExit(f"{path}: not a result of these benchmarks ({error}); move it elsewhere") from error
    return result


class OpRows:
    """The file of `pytest benchmarks/ --benchmark`, written after each row, so that an early end loses none."""

    def __init__(self, folder: Path, facts: dict, backend: str | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        card, which = slug(facts["card"]).replace(".", "-"), f"-{backend}" if backend else ""
        self.path = folder / f"ops-{card}-{facts['date']}{which}.json"
        self.facts = facts | {"rows": []}

    def add(self, row: dict) -> None:
        self.facts["rows"].append(row)
        write(self.path, self.facts)
