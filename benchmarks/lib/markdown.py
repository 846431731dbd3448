"""Markdown tables, and pages whose tables lie between markers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

SECTION = re.compile(r"<!-- ([a-z-]+): begin -->\n.*?<!-- \1: end -->", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def filled(page: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """The page with fresh text between each pair of markers `<!-- NAME: begin -->` and `<!-- NAME: end -->`.

    Args:
        page: Markdown.
        sections: name -> function that makes the text, which ends with a line break. Other names stay as they are.
    """

    def replacement(match: re.Match) -> str:
        name = match[1]
        if name not in sections:
            return match[0]
        return f"<!-- {name}: begin -->\n{sections[name]()}<!-- {name}: end -->"

    return SECTION.sub(replacement, page)
