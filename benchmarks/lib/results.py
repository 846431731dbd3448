"""The JSON files of results: writing one, and reading those of one kind. benchmarks/results has what the pages show."""

import json
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
UNSHARED = RESULTS.parent.parent / ".benchmarks"  # where new results go unless asked; git ignores it


def slug(*words: object) -> str:
    """Words as a part of a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(map(str, words)).lower()).strip("-")


def write(path: Path, result: dict) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def read_all(kind: str, folder: Path = RESULTS) -> dict[Path, dict]:
    """Path -> result of every file KIND-*.json, older dates first."""
    found = {path: read(path) for path in folder.glob(f"{kind}-*.json")}
    return dict(sorted(found.items(), key=lambda item: (item[1]["date"], item[0].stem)))


class OpRows:
    """The file of `pytest benchmarks/ --benchmark`, written after each row, so that an early end loses none."""

    def __init__(self, folder: Path, facts: dict):
        folder.mkdir(parents=True, exist_ok=True)
        card = slug(facts["card"]).replace(".", "-")
        self.path = folder / f"ops-{card}-{facts['date']}.json"
        self.facts = facts | {"rows": []}

    def add(self, row: dict) -> None:
        self.facts["rows"].append(row)
        write(self.path, self.facts)
