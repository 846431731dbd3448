"""Fills the tables of Markdown pages from benchmarks/results.

    python benchmarks/render.py                      README.md and docs/*.md
    python benchmarks/render.py docs/performance.md  these pages alone
    python benchmarks/render.py --print speed        one table, to standard output
    python benchmarks/render.py --pictures           a picture of the ops for each card, beside its first result

A table lies between `<!-- NAME: begin -->` and `<!-- NAME: end -->`; the names are the keys of SECTIONS. Where files of
one card have a row for the same op and case, the newest file counts.
"""

import argparse
from functools import partial
from pathlib import Path

from lib import pictures, quality_tables, run_tables, scaling_results, scaling_tables, speed_tables
from lib.markdown import filled
from lib.results import RESULTS

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {
    "quality": quality_tables.full,
    "readme-result": quality_tables.readme_result,
    "readme-quality": quality_tables.readme,
    "speed": speed_tables.full,
    "readme-speed": speed_tables.readme,
    "hosts": speed_tables.hosts,
    "runs": run_tables.full,
    "scaling": scaling_results.full,
    "paper-measured": scaling_tables.measured,
    "paper-several": lambda _folder: scaling_tables.several(),
    "paper-sizes": scaling_tables.sizes,
    "paper-large": lambda _folder: scaling_tables.large(),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("pages", type=Path, nargs="*", metavar="PAGE.md", help="pages to fill (default: README.md and docs/*.md)")
    option("--print", choices=SECTIONS, metavar="NAME", help=f"print one table instead: {', '.join(SECTIONS)}")
    option("--pictures", action="store_true", help="draw the pictures of the ops instead")
    option("--results", type=Path, default=RESULTS, metavar="DIR", help="folder of the JSON files (%(default)s)")
    args = parser.parse_args(arguments)
    if args.print:
        print(SECTIONS[args.print](args.results), end="")
    elif args.pictures:
        for card in speed_tables.cards(args.results, hosts=False).values():
            print(pictures.speed(card))
    else:
        for page in args.pages or default_pages():
            page.write_text(fresh(page.read_text(encoding="utf-8"), args.results), encoding="utf-8")


def default_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fresh(page: str, results: Path = RESULTS) -> str:
    """The text of a page with every table made anew."""
    return filled(page, {name: partial(section, results) for name, section in SECTIONS.items()})


if __name__ == "__main__":
    main()
