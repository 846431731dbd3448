"""The commands of `fwanda`: each takes the parsed arguments, calls the package and prints.

Packages are imported inside the commands, because importing torch takes seconds and `fwanda --help` does not need it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from .config import PruneConfig
from .errors import UserError
from .source_shares import parse_sources


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


def prune(args: argparse.Namespace) -> None:
    """Prunes a model and writes it, or lists what would be pruned."""
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
    from .run import pipeline
    from .run.save import save_pruned
    from .run.stage import StageName, timed
    from .run.state import RunState

    with RunState(args.output, resume=args.resume) as state:
        _warn_of_fresh_start(args, state)
        with timed(seconds := {}, StageName.LOAD):
            model, tokenizer = _load(args, config)
        copies = 2 if config.resolved().runs_blocks else 1  # --resume keeps the pruned blocks too
        check_output(args.output, overwrite=args.overwrite, needed_bytes=copies * model_bytes(model))
        report = pipeline.prune(model, tokenizer, config=config, statistics=statistics, state=state)
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


def calibrate(args: argparse.Namespace) -> None:
    """Measures statistics and writes them."""
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


def sample(args: argparse.Namespace) -> None:
    """Lets a model write text and saves it."""
    config = _config(args)
    from .run.sample import check_sample_file, write_sample
    from .run.state import RunState

    check_sample_file(args.output)
    with RunState(args.output, resume=args.resume) as state:
        _warn_of_fresh_start(args, state)
        model, tokenizer = _load(args, config)
        seconds, energy = write_sample(model, tokenizer, args.output, config=config, state=state)
        state.remove()
    print(f"seconds     {seconds:.1f} for {config.nsamples} windows of {config.seqlen} tokens")
    print(f"energy      {energy if isinstance(energy, str) else f'{energy:.0f} J gross'}")
    print(f"saved       {args.output}")
    text = f"--calibration {args.output} --seqlen {config.seqlen}"
    print(f"next: fwanda prune {args.model} {text} --sparsity 0.5 --output DIR")


def _warn_of_fresh_start(args: argparse.Namespace, state) -> None:
    if args.resume and not state.resumed:
        print("no interrupted run was found: starting from the beginning", file=sys.stderr)


def evaluate(args: argparse.Namespace) -> None:
    """Measures a model and prints JSON."""
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


def sweep(args: argparse.Namespace) -> None:
    """Runs a recipe, writes its tables and pictures, and prints them."""
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


def report(args: argparse.Namespace) -> None:
    """Prints a table of reports."""
    from .report.record import Report
    from .report.summary import table

    reports = {path: Report.load(path) for path in args.reports}
    print(table([(f"{path} ({report.config.get('model')})", report) for path, report in reports.items()]))


def demo(args: argparse.Namespace) -> None:
    """Prunes a small model by several methods and prints a table."""
    from .demo import run

    run(Path(args.output) if args.output else None, quick=args.quick)


def doctor(_args: argparse.Namespace) -> None:
    """Prints what is installed and what is missing."""
    from .doctor import describe

    print(describe())
