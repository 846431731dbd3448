"""The command line `fwanda`: it parses, calls and prints. A user's mistake is one line and exit code 2."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from .config import CALIBRATION, GROUPS, PruneConfig, flag
from .errors import UserError
from .source_shares import parse_sources


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
        message = f'{error}; install the pruner: pip install "fwanda-kernels[prune]"'
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
    parser = _command(commands, "prune", _prune, "prune a model and write it as a Hugging Face folder")
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
        commands, "calibrate", _calibrate, "measure the statistics of a model once, to prune it at any sparsity later"
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
    parser = _command(commands, "sample", _sample, "let a model write the text that it is calibrated on")
    _add_model(parser)
    parser.add_argument(
        "--output",
        metavar="FILE.jsonl",
        required=True,
        help="file to write, for --calibration; it replaces a file of this command, and no other",
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run of the same command")
    parser.add_argument(
        "--start-token",
        metavar="ID|TOKEN",
        help="token that each text begins with, itself not written (default: BOS, else <|endoftext|>)",
    )
    texts = {"nsamples": "number of windows", "seqlen": "tokens in a window", "seed": "seed of the draws"}
    _add_settings(parser, "place", **texts, max_memory=None)


def _add_eval(commands) -> None:
    parser = _command(
        commands, "eval", _eval, "measure the perplexity of a model, its accuracy on tasks, and its sparsity"
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

    parser = _command(commands, "sweep", _sweep, "run many settings on one model, and write tables and pictures")
    _add_model(parser)
    recipes = ", ".join(recipe_names())
    parser.add_argument("recipe", metavar="RECIPE", help=f"YAML file, or a recipe of the package: {recipes}")
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="folder of the results; finished cells there do not run again"
    )
    _add_task_settings(parser)
    _add_settings(parser, "text", "bos", "eval", "place", "passes")


def _add_report(commands) -> None:
    parser = _command(commands, "report", _report, "print the reports of several runs as one table")
    parser.add_argument("reports", nargs="+", metavar="REPORT", help="a fwanda.json, or the folder that holds it")


def _add_demo(commands) -> None:
    parser = _command(commands, "demo", _demo, "prune SmolLM2-135M by four methods and compare them")
    parser.add_argument(
        "--output", metavar="DIR", default="smollm2-pruned", help="folder for the best model (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="use less text and two methods, to see that all runs")


def _add_doctor(commands) -> None:
    _command(commands, "doctor", _doctor, "list what is installed, and what is missing for which purpose")


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
    default = "" if shown in (None, False, "") else f" (default: {shown})"
    metavar = f.metadata["metavar"] or ("|".join(choices) if choices else f.name.upper().removeprefix("EVAL_"))
    form = {
        list: {"action": "append", "metavar": metavar},
        bool: {"action": "store_true"},
    }.get(kind, {"type": kind, "metavar": metavar})
    help = ((help or f.metadata["help"]) + default).replace("%", "%%")
    section.add_argument(flag(f.name), default=argparse.SUPPRESS, help=help, **form)


def _given(args: argparse.Namespace) -> dict:
    """The settings whose flags were given."""
    return {f.name: getattr(args, f.name) for f in fields(PruneConfig) if hasattr(args, f.name)}


def _config(args: argparse.Namespace) -> PruneConfig:
    """The settings of --config, overridden by the flags that were given."""
    base = PruneConfig.load(args.config).to_dict() if getattr(args, "config", None) else {}
    return PruneConfig.from_dict({**base, **_given(args)})


def _load(args: argparse.Namespace, config: PruneConfig):
    """The model and tokenizer of a command."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    from .model.load import load_model

    trust = {"allow_pickle": args.allow_pickle, "trust_remote_code": args.trust_remote_code}
    return load_model(args.model, device=config.device, dtype=config.dtype, **trust)


def _check_texts(*, calibration: Iterable[str] = (), guards: Iterable[str] = (), eval: Iterable[str] = ()) -> None:
    """Read local text files before the model is loaded, so that a mistake shows at once."""
    from .text.sources import READERS, load_documents

    names = {"calibration": [*(source.name for source in parse_sources(tuple(calibration))), *guards], "eval": eval}
    for purpose, source in ((purpose, name) for purpose, texts in names.items() for name in texts):
        if source and Path(source).suffix.lower() in READERS:
            load_documents(source, purpose=purpose)


def _prune(args: argparse.Namespace) -> None:
    config = _config(args)
    if not args.output and not args.dry_run:
        raise UserError("--output DIR is required (or --dry-run)")
    if not config.eval and (config.eval_windows or config.eval_seqlen):
        raise UserError("--eval-windows and --eval-seqlen need a text; add --eval TEXT, e.g. --eval wikitext2")
    from .formats.files import check_output
    from .measure.statistics import Statistics

    if _is_finished(args, config):
        return print(f"finished    {args.output} holds the result of this command, with the zeros of its report")
    if not args.dry_run:
        inputs = (
            args.model,
            args.statistics,
            *(source.name for source in config.sources),
            *config.guards,
            *config.eval,
        )
        check_output(args.output, overwrite=args.overwrite, inputs=inputs)
    statistics = Statistics.load(args.statistics) if args.statistics else None
    resolved = config.resolved()
    reads_calibration = resolved.runs_blocks or (resolved.reads_statistics and statistics is None)
    _check_texts(
        calibration=config.calibration if reads_calibration else (),
        guards=config.guards if resolved.responds or not config.no_check else (),
        eval=config.eval,
    )
    if args.dry_run:
        return _print_plan(_load(args, config)[0], resolved)
    _prune_and_save(args, config, statistics)


def _is_finished(args: argparse.Namespace, config: PruneConfig) -> bool:
    """Whether --resume meets a complete output; its files are then compared with its report.

    Raises:
        UserError: the output is of other settings, or differs from its report.
    """
    from .report.record import FILE_NAME
    from .run.save import verify_finished
    from .run.state import RunState

    if not (args.resume and args.output and Path(args.output, FILE_NAME).is_file() and not args.overwrite):
        return False
    verify_finished(args.output, config.resolved(), model=args.model, statistics=args.statistics)
    RunState(args.output).remove()
    return True


def _prune_and_save(args: argparse.Namespace, config: PruneConfig, statistics) -> None:
    from .formats.dense import model_bytes
    from .formats.files import check_output
    from .report.summary import summary
    from .run.pipeline import prune
    from .run.save import save_pruned
    from .run.stage import StageName, timed
    from .run.state import RunState

    with RunState(args.output, resume=args.resume) as state:
        _warn_of_fresh_start(args, state)
        with timed(seconds := {}, StageName.LOAD):
            model, tokenizer = _load(args, config)
        copies = 2 if config.resolved().runs_blocks else 1  # --resume keeps the pruned blocks too
        check_output(args.output, overwrite=args.overwrite, needed_bytes=copies * model_bytes(model))
        report = prune(model, tokenizer, config=config, statistics=statistics, state=state)
        report.config = {**report.config, "model": args.model, "statistics": args.statistics}
        report.seconds = seconds | report.seconds
        save_pruned(model, tokenizer, report, args.output, overwrite=args.overwrite)
        state.remove()
    print(summary(report))
    print(f"saved       {args.output}")


def _print_plan(model, config: PruneConfig) -> None:
    from .allocate.budgets import keep_total
    from .methods.block_loop import asked
    from .model.targets import find_blocks
    from .run.pipeline import plan

    targets, skipped = plan(model, config)
    size = removed = 0
    for target in targets:
        rows, cols = target.shape
        goes = rows * cols - asked(config, target)
        place = "" if target.slice_of is None else f"  = {target.parameter}[{target.slice_of.index}]"
        removes = goes if config.fixes_matrix_totals else "a share that the Fisher information decides"
        print(f"{target.name}  [{rows}, {cols}]  removes {removes}{place}")
        size, removed = size + rows * cols, removed + goes
    for item in skipped:
        print(f"{item.name}  {list(item.shape)}  skipped: {item.reason}")
    if not config.fixes_matrix_totals:
        removed = size - keep_total(size, config.removed)
    total, inside = (sum(p.numel() for p in m.parameters()) for m in (model, find_blocks(model)[1]))
    print(f"these matrices hold {size / inside:.2%} of the parameters of the blocks, {size / total:.2%} of the model's")
    print(f"{len(targets)} matrices of {size} weights, {removed} removed ({removed / size:.4f}); nothing was written")


def _calibrate(args: argparse.Namespace) -> None:
    config = _config(args)
    from .formats.files import check_file
    from .measure.statistics import Statistics
    from .run.pipeline import collect

    output = check_file(args.output, ".safetensors")
    if output.exists():
        Statistics.load(output)  # refuses to replace another kind of file
    _check_texts(calibration=config.calibration)
    model, tokenizer = _load(args, config)
    statistics = collect(model, tokenizer, config=config)
    statistics.save(output)
    print(f"statistics of {len(statistics.x2)} matrices saved in {args.output}")
    print(f"next: fwanda prune {args.model} --statistics {args.output} --sparsity 0.5 --output DIR")


def _sample(args: argparse.Namespace) -> None:
    config = _config(args)
    from .run.sample import check_sample_file, write_sample
    from .run.state import RunState

    check_sample_file(args.output)
    with RunState(args.output, resume=args.resume) as state:
        _warn_of_fresh_start(args, state)
        model, tokenizer = _load(args, config)
        seconds, energy = write_sample(
            model, tokenizer, args.output, config=config, start_token=args.start_token, state=state
        )
        state.remove()
    print(f"seconds     {seconds:.1f} for {config.nsamples} windows of {config.seqlen} tokens")
    print(f"energy      {energy if isinstance(energy, str) else f'{energy:.0f} J gross'}")
    print(f"saved       {args.output}")
    print(f"next: fwanda prune {args.model} --calibration {args.output} --sparsity 0.5 --output DIR")


def _warn_of_fresh_start(args: argparse.Namespace, state) -> None:
    if args.resume and not state.resumed:
        print("no interrupted run was found: starting from the beginning", file=sys.stderr)


def _eval(args: argparse.Namespace) -> None:
    config, names = _config(args), [name.strip() for name in args.tasks.split(",")]
    tasks, settings = [name for name in names if name != "ppl"], _task_settings(args)
    if tasks:
        from .evaluate.lm_eval_tasks import check_tasks, evaluate_tasks

        check_tasks(tasks, **settings)
    elif settings:
        raise UserError("--eval-data, --limit and --batch-size are for the tasks of lm-eval; name some by --tasks")
    if "ppl" in names:
        config = replace(config, eval=config.eval or ("wikitext2",))
    elif config.eval:
        raise UserError(f"--eval is the text of ppl, got --tasks {args.tasks}; add ppl or leave --eval out")
    _check_texts(eval=config.eval)
    from .run.pipeline import evaluate_model

    config = replace(config, bos=_recorded_bos(args.model, config))
    model, tokenizer = _load(args, config)
    result = evaluate_model(model, tokenizer, config=config)
    if tasks:
        result["lm_eval"] = evaluate_tasks(model, tokenizer, tasks, **settings)
    print(json.dumps({"model": args.model, **result}, indent=1))


def _recorded_bos(model: str, config: PruneConfig) -> str:
    """--bos; "auto" becomes what the dense model decided, if the model is a folder that fwanda wrote."""
    from .report.record import FILE_NAME, Report

    if config.bos != "auto" or not Path(model, FILE_NAME).is_file():
        return config.bos
    return {None: "auto", True: "window", False: "none"}[Report.load(model).bos]


def _task_settings(args: argparse.Namespace) -> dict:
    """The arguments of evaluate_tasks() whose flags were given."""
    given = {"data_dir": args.eval_data, "limit": args.limit, "batch_size": args.batch_size}
    return {name: value for name, value in given.items() if value is not None}


def _sweep(args: argparse.Namespace) -> None:
    from .evaluate.lm_eval_tasks import check_tasks
    from .sweep.figures import check_installed, draw
    from .sweep.recipe import Recipe
    from .sweep.run import TaskSettings, run
    from .sweep.tables import lines_of, markdown, write_tables

    check_installed()
    recipe = Recipe.load(args.recipe, _given(args))
    for config in recipe.cells:
        _check_texts(calibration=config.calibration, guards=config.guards, eval=config.eval)
    settings = _task_settings(args)
    if recipe.tasks:
        check_tasks(recipe.tasks, **settings)
    model, tokenizer = _load(args, recipe.cells[0])
    try:
        cells = run(model, tokenizer, recipe, args.output, source=args.model, tasks=TaskSettings(**settings))
    except KeyboardInterrupt as interrupt:
        interrupt.args = ("continue with the same command",)
        raise
    lines = lines_of(recipe.cells, cells)
    paths = write_tables(lines, args.output) + draw(lines, args.output)
    print(markdown(lines))
    print("\n".join(map(str, paths)))


def _report(args: argparse.Namespace) -> None:
    from .report.record import Report
    from .report.summary import table

    reports = {path: Report.load(path) for path in args.reports}
    print(table([(f"{path} ({report.config.get('model')})", report) for path, report in reports.items()]))


def _demo(args: argparse.Namespace) -> None:
    from .demo import run

    run(Path(args.output), quick=args.quick)


def _doctor(_args: argparse.Namespace) -> None:
    from .doctor import describe

    print(describe())
