"""`fwanda`: the command line around the stages. Parses, calls, prints; user mistakes are one line and exit code 2."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import warnings
from dataclasses import fields, replace
from pathlib import Path

from .config import PASS_SETTINGS, PruneConfig
from .errors import UserError

_TEXT = ("calibration", "nsamples", "seqlen", "seed", "bos")
_PLACE = ("device", "dtype")
_EVAL = ("eval", "eval_seqlen", "eval_windows")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


class _Version(argparse.Action):
    def __call__(self, parser, *_args):
        from importlib.metadata import version

        print(f"fwanda {version('fwanda-kernels')}")
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    warnings.showwarning = lambda message, *_args, **_kwargs: print(f"warning: {message}", file=sys.stderr)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the failure itself is one line
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    try:
        args = _parser().parse_args(argv)
        _check_backend()
        args.run(args)
        return 0
    except UserError as error:
        print(f"fwanda: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f'fwanda: error: {error}; install the pruner: pip install "fwanda-kernels[prune]"', file=sys.stderr)
        return 2
    except RuntimeError as error:  # by name: neither package is imported yet
        hints = {"BackendError": "", "OutOfMemoryError": "; use a smaller --micro-batch or --seqlen, or --device cpu"}
        if type(error).__name__ not in hints:
            raise
        print(f"fwanda: error: {' '.join(str(error).split())}{hints[type(error).__name__]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("; ".join(["fwanda: interrupted", *interrupt.args]), file=sys.stderr)
        return 130


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


def _parser() -> _Parser:
    parser = _Parser(prog="fwanda", description="One-shot pruning of causal language models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    prune = _command(commands, "prune", _prune, "prune a model and write it as a Hugging Face folder")
    _add_model(prune)
    _add_settings(prune, [f.name for f in fields(PruneConfig)])
    prune.add_argument("--config", metavar="FILE", help="YAML or JSON file of these settings; flags override it")
    prune.add_argument(
        "--statistics",
        metavar="FILE",
        help="file of `fwanda calibrate`: x2 and omega of the dense model (default order then: onepass)",
    )
    prune.add_argument("--output", metavar="DIR", help="folder to write; appears whole or not at all")
    prune.add_argument("--overwrite", action="store_true", help="replace DIR, whatever it holds")
    prune.add_argument(
        "--resume",
        action="store_true",
        help="go on where an interrupted run of the same command stopped; if it finished, compare DIR with its report",
    )
    prune.add_argument("--dry-run", action="store_true", help="list every target and what would go, write nothing")

    calibrate = _command(commands, "calibrate", _calibrate, "measure statistics once, to prune at any sparsity later")
    _add_model(calibrate)
    _add_settings(calibrate, [*_TEXT, "fisher", *_PLACE, *PASS_SETTINGS])
    calibrate.add_argument(
        "--output", metavar="FILE.safetensors", required=True, help="file to write; one of statistics is replaced"
    )

    evaluate = _command(commands, "eval", _eval, "perplexity, accuracy on tasks, and sparsity of a model")
    _add_model(evaluate)
    evaluate.add_argument(
        "--tasks",
        default="ppl",
        help="some of ppl, zeroshot (seven tasks), mmlu (five-shot) and names of lm-eval, with commas (%(default)s)",
    )
    _add_tasks(evaluate)
    _add_settings(evaluate, [*_EVAL, "bos", *_PLACE])

    sweep = _command(commands, "sweep", _sweep, "many settings on one model: a table and pictures")
    _add_model(sweep)
    sweep.add_argument("recipe", metavar="RECIPE", help="YAML file, or one that comes along: " + ", ".join(_recipes()))
    sweep.add_argument(
        "--output", metavar="DIR", required=True, help="folder of the results; cells there do not run again"
    )
    _add_tasks(sweep)
    _add_settings(sweep, [*_TEXT, *_EVAL, *_PLACE, *PASS_SETTINGS])

    report = _command(commands, "report", _report, "one table from the reports of several runs")
    report.add_argument("reports", nargs="+", metavar="REPORT", help="fwanda.json, or the folder that holds it")

    demo = _command(commands, "demo", _demo, "prune the packaged SmolLM2-135M by four methods and compare them")
    demo.add_argument(
        "--output", metavar="DIR", default="smollm2-pruned", help="folder for the best model (%(default)s)"
    )
    demo.add_argument("--quick", action="store_true", help="less text and two methods: a check that everything runs")

    _command(commands, "doctor", _doctor, "what is installed here, and what is missing for what")
    return parser


def _command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Hugging Face id or folder, .gguf file, or smollm2 (packaged)")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read weights from .bin files, which can run code, if need be"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that comes with the model"
    )


def _load(args: argparse.Namespace, config: PruneConfig):
    """The model and tokenizer of a command."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    from .model.load import load_model

    trust = {"allow_pickle": args.allow_pickle, "trust_remote_code": args.trust_remote_code}
    return load_model(args.model, device=config.device, dtype=config.dtype, **trust)


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--eval-data", metavar="DIR", help="data sets of the tasks as DIR/ORG/NAME (default: lm-eval downloads them)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N examples of each task (default: all)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="requests of the tasks in a forward pass (8)")


def _recipes() -> list[str]:
    return sorted(path.stem for path in (Path(__file__).parent / "sweep" / "recipes").glob("*.yaml"))


def _add_settings(parser: argparse.ArgumentParser, names: list[str]) -> None:
    """Flags for fields of PruneConfig; which values are allowed is the config's to check."""
    for f in fields(PruneConfig):
        if f.name not in names:
            continue
        choices, kind = f.metadata["choices"], f.metadata["type"]
        default = "" if f.default in (None, (), False) else f" ({f.default})"
        metavar = "|".join(choices) if choices else f.name.upper().replace("EVAL_", "")
        form = {
            list: {"action": "append", "metavar": "GLOB"},
            bool: {"action": "store_true"},
        }.get(kind, {"type": kind, "metavar": metavar})
        parser.add_argument(
            "--" + f.name.replace("_", "-"),
            default=argparse.SUPPRESS,
            help=(f.metadata["help"] + default).replace("%", "%%"),
            **form,
        )


def _config(args: argparse.Namespace) -> PruneConfig:
    """The settings of --config, overridden by the flags that were given."""
    base = {}
    if getattr(args, "config", None):
        base = PruneConfig.load(args.config).to_dict()
    given = {f.name: getattr(args, f.name) for f in fields(PruneConfig) if hasattr(args, f.name)}
    return PruneConfig.from_dict({**base, **given})


def _prune(args: argparse.Namespace) -> None:
    config = _config(args)
    if not args.output and not args.dry_run:
        raise UserError("--output DIR is required (or --dry-run)")
    if config.eval is None and (config.eval_windows or config.eval_seqlen):
        raise UserError("--eval-windows and --eval-seqlen need a text; add --eval TEXT, e.g. --eval wikitext2")
    from .formats.dense import check_output, model_bytes, save_pruned, verify_finished
    from .measure.statistics import Statistics
    from .report import record as report
    from .run import pipeline
    from .run.state import RunState

    if args.resume and args.output and Path(args.output, report.FILE_NAME).is_file() and not args.overwrite:
        verify_finished(args.output, config.resolved(), model=args.model, statistics=args.statistics)
        RunState(args.output).remove()
        return print(f"finished    {args.output} holds the result of this command, with the zeros of its report")
    if not args.dry_run:
        inputs = (args.model, args.statistics, config.calibration, config.eval)
        check_output(args.output, overwrite=args.overwrite, inputs=inputs)
    statistics = Statistics.load(args.statistics) if args.statistics else None
    resolved = config.resolved()
    reads_calibration = resolved.runs_blocks or (resolved.reads_statistics and statistics is None)
    _check_text(calibration=config.calibration if reads_calibration else None, eval=config.eval)
    with RunState(None if args.dry_run else args.output, resume=args.resume) as state:
        start = time.perf_counter()
        model, tokenizer = _load(args, config)
        seconds = time.perf_counter() - start
        if args.dry_run:
            return _print_plan(model, resolved)
        copies = 2 if resolved.runs_blocks else 1  # the pruned blocks are kept for --resume
        check_output(args.output, overwrite=args.overwrite, needed_bytes=copies * model_bytes(model))
        result = pipeline.prune(model, tokenizer, config=config, statistics=statistics, state=state)
        result.config = {**result.config, "model": args.model, "statistics": args.statistics}
        result.seconds = {"load": round(seconds, 3), **result.seconds}
        save_pruned(model, tokenizer, result, args.output, overwrite=args.overwrite)
        state.remove()
    print(report.summary(result))
    print(f"saved       {args.output}")


def _check_text(*, calibration: str | None = None, eval: str | None = None) -> None:
    """Local text files are looked at before the model is loaded."""
    from .text.sources import load_documents

    for purpose, source in (("calibration", calibration), ("eval", eval)):
        if source and Path(source).suffix.lower() in (".txt", ".jsonl", ".parquet"):
            load_documents(source, purpose=purpose)


def _print_plan(model, config: PruneConfig) -> None:
    from .allocate import budgets
    from .methods import prune as methods
    from .model.targets import find_blocks
    from .run import pipeline

    targets, skipped = pipeline.plan(model, config)
    fixed = config.allocation in ("layer", "uniform", "row") or config.nm
    size = removed = 0
    for target in targets:
        rows, cols = target.weight.shape
        goes = rows * cols - methods.asked(config, target)
        place = "" if target.slice_of is None else f"  = {target.parameter}[{target.slice_of.index}]"
        print(f"{target.name}  [{rows}, {cols}]  removes {goes if fixed else 'by its Fisher information'}{place}")
        size, removed = size + rows * cols, removed + goes
    for item in skipped:
        print(f"{item.name}  {list(item.shape)}  skipped: {item.reason}")
    if not fixed:
        removed = size - budgets.keep_total(size, config.removed)
    total, inside = (sum(p.numel() for p in m.parameters()) for m in (model, find_blocks(model)[1]))
    print(f"these matrices hold {size / inside:.2%} of the parameters of the blocks, {size / total:.2%} of the model's")
    print(f"{len(targets)} matrices of {size} weights, {removed} removed ({removed / size:.4f}); nothing was written")


def _calibrate(args: argparse.Namespace) -> None:
    config = _config(args)
    output = Path(args.output)
    if output.suffix != ".safetensors" or not os.access(output.parent, os.W_OK) or output.is_dir():
        raise UserError(f"--output must be a .safetensors file in an existing, writable folder, got {args.output}")
    from .measure.statistics import Statistics
    from .run import pipeline

    if output.exists():
        Statistics.load(output)  # never replace another kind of file
    _check_text(calibration=config.calibration)
    model, tokenizer = _load(args, config)
    statistics = pipeline.collect(model, tokenizer, config=config)
    statistics.save(output)
    print(f"statistics of {len(statistics.x2)} matrices saved in {args.output}")
    print(f"next: fwanda prune {args.model} --statistics {args.output} --sparsity 0.5 --output DIR")


def _eval(args: argparse.Namespace) -> None:
    config, names = _config(args), [name.strip() for name in args.tasks.split(",")]
    tasks, settings = [name for name in names if name != "ppl"], _task_settings(args)
    if tasks:
        from .evaluate.tasks import check_tasks, evaluate_tasks

        check_tasks(tasks, **settings)
    elif settings:
        raise UserError("--eval-data, --limit and --batch-size are for the tasks of lm-eval; name some by --tasks")
    if "ppl" in names:
        config = replace(config, eval=config.eval or "wikitext2")
    elif config.eval is not None:
        raise UserError(f"--eval is the text of ppl, got --tasks {args.tasks}; add ppl or leave --eval out")
    _check_text(eval=config.eval)
    from .report.record import FILE_NAME, Report
    from .run import pipeline

    if config.bos == "auto" and Path(args.model, FILE_NAME).is_file():
        bos = Report.load(args.model).bos  # decided on the dense model, when this one was pruned
        config = replace(config, bos={None: "auto", True: "window", False: "none"}[bos])
    model, tokenizer = _load(args, config)
    result = pipeline.evaluate_model(model, tokenizer, config=config)
    if tasks:
        result["lm_eval"] = evaluate_tasks(model, tokenizer, tasks, **settings)
    print(json.dumps({"model": args.model, **result}, indent=1))


def _task_settings(args: argparse.Namespace) -> dict:
    """Arguments of evaluate_tasks(), those that were given."""
    given = {"data_dir": args.eval_data, "limit": args.limit, "batch_size": args.batch_size}
    return {name: value for name, value in given.items() if value is not None}


def _sweep(args: argparse.Namespace) -> None:
    from .evaluate.tasks import check_tasks
    from .sweep import run as sweep
    from .sweep import tables as sweep_report

    sweep_report.check_installed()
    given = {f.name: getattr(args, f.name) for f in fields(PruneConfig) if hasattr(args, f.name)}
    recipe = sweep.Recipe.load(args.recipe, given)
    for config in recipe.cells:
        _check_text(calibration=config.calibration, eval=config.eval)
    if recipe.tasks:
        check_tasks(recipe.tasks, **_task_settings(args))
    model, tokenizer = _load(args, recipe.cells[0])
    options = {"eval_data": args.eval_data, "batch_size": args.batch_size, "limit": args.limit}
    try:
        cells = sweep.run(model, tokenizer, recipe, args.output, source=args.model, **options)
    except KeyboardInterrupt as interrupt:
        interrupt.args = ("the same command goes on",)
        raise
    found = sweep_report.lines(recipe.cells, cells)
    paths = sweep_report.write(found, args.output)
    print(sweep_report.markdown(found))
    print("\n".join(map(str, paths)))


def _report(args: argparse.Namespace) -> None:
    from .report.record import Report, table

    reports = {path: Report.load(path) for path in args.reports}
    print(table([(f"{path} ({report.config.get('model')})", report) for path, report in reports.items()]))


def _demo(args: argparse.Namespace) -> None:
    from .demo import run

    run(Path(args.output), quick=args.quick)


def _doctor(_args: argparse.Namespace) -> None:
    from .doctor import describe

    print(describe())
