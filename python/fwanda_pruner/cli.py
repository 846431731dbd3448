"""The command line `fwanda`: it parses and calls a command. A user's mistake is one line and exit code 2."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from dataclasses import fields

from .commands import calibrate, demo, doctor, evaluate, prune, report, sample, sweep
from .config import CALIBRATION, GROUPS, PruneConfig
from .errors import UserError, install_hint
from .setting_checks import flag


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


class _Version(argparse.Action):
    def __call__(self, parser, *_args):
        from importlib.metadata import version

        print(f"fwanda {version('fwanda-kernels')}")
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    warnings.showwarning = lambda message, *_args, **_kwargs: print(f"warning: {message}", file=sys.stderr)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hides its retries; a failure is one line of ours
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as Ctrl-C does
    try:
        args = build_parser()[0].parse_args(argv)
        _check_backend()
        args.run(args)
        return 0
    except UserError as error:
        message = " ".join(str(error).splitlines())
    except ModuleNotFoundError as error:
        message = f"{error}; {install_hint('prune')}"
    except RuntimeError as error:
        # recognised by name, because neither package is imported yet
        hints = {"BackendError": "", "OutOfMemoryError": "; use a smaller --micro-batch or --seqlen, or --device cpu"}
        if type(error).__name__ not in hints:
            raise
        message = " ".join(str(error).split()) + hints[type(error).__name__]
    except KeyboardInterrupt as interrupt:
        print("; ".join(["fwanda: interrupted", *interrupt.args]), file=sys.stderr)
        return 130
    print(f"fwanda: error: {message}", file=sys.stderr)
    return 2


def _check_backend() -> None:
    name = os.environ.get("FWANDA_BACKEND")
    if not name:
        return
    import fwanda_kernels

    try:
        with fwanda_kernels.use_backend(name):
            pass
    except ValueError as error:
        raise UserError(str(error)) from error


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the command line, and the parser of each command by its name."""
    parser = _Parser(prog="fwanda", description="Prune causal language models in one shot, without retraining.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_add_prune, _add_calibrate, _add_sample, _add_eval, _add_sweep, _add_report, _add_demo, _add_doctor):
        add(commands)
    return parser, commands.choices


def _add_prune(commands) -> None:
    parser = _command(commands, "prune", prune, "prune a model and write it as a Hugging Face folder")
    _add_model(parser)
    parser.add_argument("--output", metavar="DIR", help="folder to write; it appears complete or not at all")
    parser.add_argument("--overwrite", action="store_true", help="delete what DIR holds and write the result there")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run of the same command; if it had finished, only check the zeros in DIR",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list every matrix and how much of it would go, and write nothing"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="read settings from a YAML or JSON file; flags take precedence over it"
    )
    parser.add_argument(
        "--statistics",
        metavar="FILE",
        help="statistics of the dense model, written by `fwanda calibrate`; --order then defaults to onepass",
    )
    _add_settings(parser, *GROUPS)


def _add_calibrate(commands) -> None:
    parser = _command(
        commands, "calibrate", calibrate, "measure the statistics of a model once, to prune it at any sparsity later"
    )
    _add_model(parser)
    parser.add_argument(
        "--output",
        metavar="FILE.safetensors",
        required=True,
        help="file to write; it replaces a file of statistics, and no other",
    )
    _add_settings(parser, *CALIBRATION, "place", "passes")


def _add_sample(commands) -> None:
    parser = _command(commands, "sample", sample, "let a model write text for its own calibration")
    _add_model(parser)
    parser.add_argument(
        "--output",
        metavar="FILE.jsonl",
        required=True,
        help="file to write, for --calibration; it replaces a file of this command, and no other",
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run of the same command")
    texts = {"nsamples": "number of windows", "seqlen": "tokens in a window", "seed": "seed of the draws"}
    _add_settings(parser, "place", **texts, start_token=None, max_memory=None)


def _add_eval(commands) -> None:
    parser = _command(
        commands, "eval", evaluate, "measure the perplexity of a model, its accuracy on tasks, and its sparsity"
    )
    _add_model(parser)
    parser.add_argument(
        "--tasks",
        metavar="TASKS",
        default="ppl",
        help="what to measure, separated by commas: ppl (perplexity), zeroshot (seven tasks), mmlu (five-shot), and "
        "any task of lm-eval (default: %(default)s)",
    )
    _add_task_settings(parser)
    _add_settings(parser, "eval", "bos", "place")


def _add_sweep(commands) -> None:
    from .sweep.recipe import recipe_names

    parser = _command(commands, "sweep", sweep, "run many settings on one model, and write tables and pictures")
    _add_model(parser)
    recipes = ", ".join(recipe_names())
    parser.add_argument("recipe", metavar="RECIPE", help=f"YAML file, or a recipe of the package: {recipes}")
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="folder of the results; finished cells there do not run again"
    )
    _add_task_settings(parser)
    _add_settings(parser, "text", "bos", "eval", "place", "passes")


def _add_report(commands) -> None:
    parser = _command(commands, "report", report, "print the reports of several runs as one table")
    parser.add_argument("reports", nargs="+", metavar="REPORT", help="a fwanda.json, or the folder that holds it")


def _add_demo(commands) -> None:
    parser = _command(commands, "demo", demo, "prune SmolLM2-135M by four methods and compare them")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for the best model (default: smollm2-pruned, or smollm2-pruned-quick with --quick)",
    )
    parser.add_argument("--quick", action="store_true", help="use less text and two methods, to see that all runs")


def _add_doctor(commands) -> None:
    _command(commands, "doctor", doctor, "list what is installed, and what is missing for which purpose")


def _command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="Hugging Face id, model folder, .gguf file, or smollm2 (from its own package)"
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read weights from .bin files if there are no others; such a file can run any code",
    )
    parser.add_argument(
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


def _add_settings(parser: argparse.ArgumentParser, *groups: str, **single: str | None) -> None:
    """Add the flags of some groups of settings, and single ones with a help text of their own or None.

    PruneConfig checks their values.
    """
    for group in GROUPS:
        wanted = [
            f for f in fields(PruneConfig) if f.metadata["group"] == group and (group in groups or f.name in single)
        ]
        section = parser.add_argument_group(GROUPS[group]) if group in groups else parser
        for f in wanted:
            _add_setting(section, f, single.get(f.name))


def _add_setting(section, f, help: str | None = None) -> None:
    choices, kind = f.metadata["choices"], f.metadata["type"]
    shown = ", ".join(f.default) if isinstance(f.default, tuple) else f.default
    default = "" if shown is None or shown is False or shown == "" else f" (default: {shown})"
    metavar = f.metadata["metavar"] or ("|".join(choices) if choices else f.name.upper().removeprefix("EVAL_"))
    form = {
        list: {"action": "append", "metavar": metavar},
        bool: {"action": "store_true"},
    }.get(kind, {"type": kind, "metavar": metavar})
    help = ((help or f.metadata["help"]) + default).replace("%", "%%")
    section.add_argument(flag(f.name), default=argparse.SUPPRESS, help=help, **form)
