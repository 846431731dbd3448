"""Write docs/cli.md from the parser of the command line:

python docs/make_cli.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fwanda_pruner.arguments import build_parser

PAGE = Path(__file__).with_name("cli.md")
HEAD = """\
# Command line

`docs/make_cli.py` writes this page from the parser of `fwanda`; please change the help texts, not this page.

`fwanda --version` prints the version. After a mistake in a command, fwanda prints one line and exits with code 2; after
Ctrl-C it exits with code 130. In YAML and JSON files, a setting has the name of its flag with `_` in place of `-`, for
example `eval_windows`. [methods.md](methods.md) explains the methods and their settings, and [sweeps.md](sweeps.md) the
recipes.
"""


class Markdown(argparse.HelpFormatter):
    """Formats the help of one command as Markdown: a heading, a line on how to call it, and a list for each group."""

    def __init__(self, prog: str):
        super().__init__(prog)
        self.command, self.lines = prog, [f"## {prog}"]

    def add_text(self, text) -> None:
        if text:
            self.lines += ["", text]

    def add_usage(self, usage, actions, groups, prefix=None) -> None:
        self.lines += ["", f"`{usage % {'prog': self.command}}`"]

    def start_section(self, heading) -> None:
        self.heading = "arguments" if heading == "positional arguments" else heading

    def end_section(self) -> None:
        pass

    def add_arguments(self, actions) -> None:
        if shown(actions):
            self.lines += ["", f"**{self.heading[0].upper()}{self.heading[1:]}**", ""]
            self.lines += [f"- `{name(action)}`: {action.help % vars(action)}" for action in shown(actions)]

    def format_help(self) -> str:
        return "\n".join(self.lines) + "\n"


def shown(actions) -> list[argparse.Action]:
    """All arguments but --help, which every command has."""
    return [action for action in actions if "--help" not in action.option_strings]


def name(action: argparse.Action) -> str:
    """How an argument is written: MODEL, REPORT ..., --output DIR or --overwrite."""
    flag, value = "".join(action.option_strings), "" if action.nargs == 0 else action.metavar
    more = "..." if action.nargs == "+" else ""
    return " ".join(part for part in (flag, value, more) if part)


def render() -> str:
    """The page."""
    commands = build_parser()[1]
    for parser in commands.values():
        parser.formatter_class = Markdown
    table = ["", "| command | what it does |", "|---|---|"]
    table += [f"| [`{name}`](#fwanda-{name}) | {parser.description} |" for name, parser in commands.items()]
    return "\n".join([HEAD.rstrip(), *table, "", *(parser.format_help() for parser in commands.values())])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
