"""Reading a YAML or JSON file that a user wrote."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .errors import show

_DEEPEST = 8  # nesting of lists and mappings


def read_yaml(path: str | Path):
    """The values of a file. JSON is YAML, too.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not YAML, is nested too deeply, or gives a key twice.
    """
    import yaml

    text, depth = Path(path).read_text(encoding="utf-8"), 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):  # fast at any depth
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError("nested too deeply")
        _refuse_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _refuse_twice(node) -> None:
    """Refuses a mapping that gives a key twice: YAML would silently take the last one."""
    import yaml

    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:  # an alias leads to the same node
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if keys and (most := keys.most_common(1)[0])[1] > 1:
            raise ValueError(f"it gives {show(most[0])} twice; leave one of them out")
        waiting += [value for _, value in node.value]
