"""Results in pages of the documentation."""

from pathlib import Path


def put_between(page: Path, begin: str, text: str, end: str) -> None:
    """Put text, which ends a line, between two markers of a page."""
    head, rest = page.read_text().split(begin)
    page.write_text(head + begin + "\n" + text + end + rest.split(end)[1])
