"""The arguments of every command of `fwanda`, and their help."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields

from .commands import bench, calibrate, demo, doctor, evaluate, pack, prune, report, sample, sweep, unpack
from .config import CALIBRATION, GROUPS, PruneConfig
from .errors import UserError, did_you_mean, one_line
from .setting_checks import flag

_OUTPUT, _RUN, _WHAT = "output", GROUPS["place"], GROUPS["method"]
# the first ones in --help; one without flags is left out
_SECTIONS = (_WHAT, GROUPS["amount"], GROUPS["text"], _RUN, _OUTPUT)


class _Parser(argparse.ArgumentParser):
    """Its errors are a UserError that names the right --help, and the closest word to a mistyped one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self._sections: dict[str, argparse._ArgumentGroup] = {}

    def section(self, title: str):
        """The group of arguments under a title; made at first use, which decides the order in --help."""
        if title not in self._sections:
            self._sections[title] = self.add_argument_group(title)
        return self._sections[title]

    def parse_known_args(self, args=None, namespace=None):
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:  # here the parser of the command speaks, not the one of all commands
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        for action in self._actions:
            value = getattr(namespace, action.dest, None)
            # an unset variable of a shell, or `--flag=--`, of which argparse makes []
            empty = value == "" or value == [] or (isinstance(value, list) and [] in value)
            if action.option_strings and empty:
                self.error(f"argument {action.option_strings[0]}: expected a value, got an empty one")
        return namespace, unknown

    def print_help(self, file=None):
        """Leaves the printing to the caller: argparse itself would hide that it failed."""
        raise SystemExit(self.format_help().rstrip())

    def error(self, message: str):
        mistyped = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        chosen = re.match(r"argument COMMAND: invalid choice: '(.*)' \(", message)
        hint = did_you_mean(mistyped[1], self._option_string_actions) if mistyped else ""
        if chosen:
            commands = [name for action in self._actions for name in action.choices or ()]
            message = f"there is no command {chosen[1]!r}"
            hint = did_you_mean(chosen[1], commands) or f"; the commands are {', '.join(commands)}"
        raise UserError(f"{one_line(message)}{hint}; see {self.prog} --help")


class _Version(argparse.Action):
    def __call__(self, parser, *_args):
        from importlib.metadata import version

        raise SystemExit(f"fwanda {version('fwanda-kernels')}")


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the command line, and the parser of each command by its name."""
    parser = _Parser(prog="fwanda", description="Prune causal language models in one shot, without retraining.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_prune, _add_calibrate, _add_sample, _add_eval, _add_sweep, _add_report, _add_pack, _add_unpack, _add_bench,
        _add_demo, _add_doctor,
    ):  # fmt: skip
        add(commands)
    return parser, commands.choices


_PRUNE_EXAMPLES = """\
examples:

    fwanda prune smollm2 --sparsity 0.5 --nsamples 16 --seqlen 256 --output out
    fwanda prune MODEL --method wanda --pattern 2:4 --output pruned-24
    fwanda prune MODEL --calibration c4:3 --calibration code --output pruned
    torchrun --nproc-per-node gpu -m fwanda_pruner prune MODEL --output pruned"""


def _add_prune(commands) -> None:
    parser = _command(
        commands, "prune", prune, "prune a model and write it as a Hugging Face folder", "MODEL --output DIR"
    )
    parser.epilog, parser.formatter_class = _PRUNE_EXAMPLES, argparse.RawDescriptionHelpFormatter
    output = parser.section(_OUTPUT)
    output.add_argument("--output", metavar="DIR", help="folder to write; it appears complete or not at all")
    _add_settings(parser, *GROUPS)
    _add_model(parser)
    parser.section(_WHAT).add_argument(
        "--statistics",
        metavar="FILE",
        help="statistics of the dense model, written by `fwanda calibrate`; --order then defaults to onepass",
    )
    parser.section(_RUN).add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run of the same command; if it had finished, only check the zeros in DIR, or run "
        "again with --overwrite",
    )
    parser.section(_RUN).add_argument(
        "--config", metavar="FILE", help="read settings from a YAML or JSON file; flags take precedence over it"
    )
    output.add_argument(
        "--overwrite",
        action="store_true",
        help="delete what DIR holds, and what an interrupted run has finished unless --resume is given, and write the "
        "result there",
    )
    output.add_argument(
        "--dry-run",
        action="store_true",
        help="list every matrix and how many of its weights would be removed, and write nothing",
    )
    output.add_argument(
        "--json", action="store_true", help="print the record, fwanda.json, and nothing else on standard output"
    )
    output.add_argument(
        "--push-to-hub",
        metavar="ID",
        help="also upload DIR to the Hugging Face Hub, as NAME or OWNER/NAME. A new repository is private. The token "
        "comes from `hf auth login` or HF_TOKEN",
    )


def _add_calibrate(commands) -> None:
    about = "measure the statistics of a model once, to prune it at any sparsity later"
    parser = _command(commands, "calibrate", calibrate, about, "MODEL --output FILE.safetensors")
    _add_model(parser)
    parser.add_argument(
        "--output",
        metavar="FILE.safetensors",
        required=True,
        help="file to write; it replaces a file of statistics, and no other",
    )
    _add_settings(parser, *CALIBRATION, "place", "passes")


def _add_sample(commands) -> None:
    parser = _command(
        commands, "sample", sample, "let a model write text for its own calibration", "MODEL --output FILE.jsonl"
    )
    _add_model(parser)
    parser.add_argument(
        "--output",
        metavar="FILE.jsonl",
        required=True,
        help="file to write, for --calibration; it replaces a file of this command, and no other",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run of the same command; if it had finished, only check the settings in FILE, or "
        "run again with --overwrite",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="start over, and remove what an interrupted run has written unless --resume is given",
    )
    texts = {"nsamples": "number of windows", "seqlen": "tokens in a window", "seed": "seed of the draws"}
    _add_settings(parser, "place", **texts, start_token=None, engine=None, segment=None, max_memory=None)


def _add_eval(commands) -> None:
    about = "measure the perplexity of a model, its accuracy on tasks, and its sparsity, and print them as JSON"
    parser = _command(commands, "eval", evaluate, about, "MODEL")
    _add_model(parser)
    parser.add_argument(
        "--tasks",
        metavar="TASKS",
        default="ppl",
        help="what to measure, separated by commas: ppl (perplexity), zeroshot (seven tasks), mmlu (five-shot), and "
        "any task of lm-eval (default: %(default)s)",
    )
    _add_task_settings(parser)
    tokens = "tokens in an evaluation window (default: as in the report beside the model, else 2048)"
    windows = (
        "evaluate only the first N windows of each text (default: as in the report beside the model, if its texts are "
        "read; else all)"
    )
    bos = (
        "whether each window starts with the BOS token. auto: as in the report beside the model; without one, if that "
        "lowers the loss on the first window of the first text; none: never; window: always"
    )
    own = {"eval_seqlen": tokens, "eval_windows": windows, "bos": bos}
    _add_settings(parser, "eval", "bos", "place", **own, engine=None, segment=None)


def _add_sweep(commands) -> None:
    from .sweep.recipe import recipe_names

    parser = _command(
        commands,
        "sweep",
        sweep,
        "run many settings on one model, and write tables and pictures",
        "MODEL RECIPE --output DIR",
    )
    _add_model(parser)
    recipes = ", ".join(recipe_names())
    parser.add_argument("recipe", metavar="RECIPE", help=f"YAML file, or a recipe of the package: {recipes}")
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="folder of the results; finished cells there do not run again"
    )
    _add_task_settings(parser)
    bos = (
        "whether each window starts with the BOS token. auto: if that lowers the loss of the dense model on the first "
        "window of --eval (of the calibration without --eval); none: never; window: always"
    )
    _add_settings(parser, "text", "bos", "eval", "place", "passes", bos=bos)


def _add_report(commands) -> None:
    about = "compare runs: a table of their results, and one of their losses on each text"
    parser = _command(commands, "report", report, about, "REPORT ...")
    parser.add_argument("reports", nargs="+", metavar="REPORT", help="a fwanda.json, or the folder that holds it")
    parser.add_argument(
        "--format",
        metavar="table|csv|json",
        help="table, csv with one row for each run, or json with the complete records (default: table)",
    )
    parser.add_argument("--html", metavar="FILE.html", help="write a page with pictures, instead of printing a table")


def _add_pack(commands) -> None:
    about = "write a packed copy of a pruned model: one bit per weight, and the kept values"
    parser = _command(commands, "pack", pack, about, "DIR --output DIR2")
    _add_folders(parser, "folder of a pruned model")
    parser.add_argument("--force", action="store_true", help="also pack matrices with less than 15 %% zeros")


def _add_unpack(commands) -> None:
    parser = _command(commands, "unpack", unpack, "write a dense copy of a packed model", "DIR --output DIR2")
    _add_folders(parser, "folder of a packed model")


def _add_bench(commands) -> None:
    about = "compare the speed and the memory of a pruned model, packed and dense"
    parser = _command(commands, "bench", bench, about, "DIR")
    parser.add_argument("folder", metavar="DIR", help="folder of a pruned model, packed or dense")
    parser.add_argument(
        "--batches",
        metavar="N,N",
        default="1,4,16",
        help="sequences to decode at once, up to 1024 (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", default=64, help="tokens to decode per sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts", metavar="N,N", default="512,2048", help="lengths of prompts, in tokens (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    _add_settings(parser, "place")


def _add_folders(parser: _Parser, what: str) -> None:
    parser.add_argument("folder", metavar="DIR", help=what)
    parser.add_argument(
        "--output", metavar="DIR2", required=True, help="folder to write; it appears complete or not at all"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete what DIR2 holds, and write the result there")


def _add_demo(commands) -> None:
    parser = _command(commands, "demo", demo, "prune SmolLM2-135M in four ways and compare them", "")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for the best model (default: smollm2-pruned, or smollm2-pruned-quick with --quick)",
    )
    parser.add_argument("--quick", action="store_true", help="use less text and two of the ways, to see that all runs")


def _add_doctor(commands) -> None:
    _command(commands, "doctor", doctor, "list what is installed, and what is missing for which purpose", "")


def _command(commands, name: str, run, help: str, needs: str) -> _Parser:
    """A parser of a command; `needs` are the arguments that it cannot do without."""
    usage = " ".join(filter(None, ("%(prog)s", needs, "[options]")))
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".", usage=usage)
    parser.set_defaults(run=run)
    for title in _SECTIONS:
        parser.section(title)
    return parser


def _add_model(parser: _Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="Hugging Face id, model folder, .gguf file, or smollm2 (from its own package)"
    )
    section = parser.section(_RUN)
    section.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read weights from .bin files if there are no others; such a file can run any code",
    )
    section.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that comes with the model"
    )


def _add_task_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--eval-data",
        metavar="DIR",
        help="folder with the data sets of the tasks, as DIR/ORG/NAME (default: lm-eval downloads them)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N examples of each task")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="requests of the tasks in one forward pass (default: 8)"
    )


def _add_settings(parser: _Parser, *groups: str, **single: str | None) -> None:
    """Add the flags of some groups of settings, and single ones with a help text of their own or None.

    PruneConfig checks their values.
    """
    for group in GROUPS:
        wanted = [
            f for f in fields(PruneConfig) if f.metadata["group"] == group and (group in groups or f.name in single)
        ]
        section = parser.section(GROUPS[group]) if group in groups else parser
        for f in wanted:
            _add_setting(section, f, single.get(f.name))


def _add_setting(section, f, help: str | None = None) -> None:
    choices, kind = f.metadata["choices"], f.metadata["type"]
    shown = ", ".join(f.default) if isinstance(f.default, tuple) else f.default
    default = "" if shown is None or shown is False or shown == "" else f" (default: {shown})"
    shapes = {int: "N", float: "NUMBER"}
    metavar = f.metadata["metavar"] or ("|".join(choices) if choices else shapes.get(kind, f.name.upper()))
    form = {
        list: {"action": "append", "metavar": metavar},
        bool: {"action": "store_true"},
    }.get(kind, {"type": kind, "metavar": metavar})
    help = ((help or f.metadata["help"]) + default).replace("%", "%%")
    section.add_argument(flag(f.name), default=argparse.SUPPRESS, help=help, **form)
