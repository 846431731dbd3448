"""The commands of `fwanda`: each takes the parsed arguments, calls the package and returns what is to be printed.

Packages are imported inside the commands, because importing torch takes seconds and `fwanda --help` does not need it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from .config import PruneConfig
from .errors import UserError, did_you_mean, show
from .launch import device_of, is_first
from .progress import begin_stage, planned
from .source_shares import parse_sources
from .stage_names import StageName
from .terminal import say, styled

T = TypeVar("T")


class Result(NamedTuple):
    """What a command prints on standard output.

    Attributes:
        text: lines.
        saved: the file or folder that holds the result; None: the text is the result.
    """

    text: str
    saved: str | None = None


def _given(args: argparse.Namespace) -> dict:
    """The settings whose flags were given."""
    return {f.name: getattr(args, f.name) for f in fields(PruneConfig) if hasattr(args, f.name)}


def _config(args: argparse.Namespace) -> PruneConfig:
    """The settings of --config, overridden by the flags that were given."""
    base = PruneConfig.load(args.config).to_dict() if getattr(args, "config", None) else {}
    return PruneConfig.from_dict({**base, **_given(args)})


def _load(args: argparse.Namespace, config: PruneConfig, *, streams: bool = True, packed: bool = False):
    """The model and tokenizer of a command.

    Args:
        streams: whether to follow --engine; if not, all weights go to the device.
        packed: whether a packed folder stays packed; it does not with --engine streamed or sharded.
    """
    begin_stage(StageName.LOAD.title)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    from .model.load import is_packed, load_model, load_packed

    trust = {"allow_pickle": args.allow_pickle, "trust_remote_code": args.trust_remote_code}
    engine = config.engine if streams else "resident"
    if packed and engine in ("auto", "resident") and is_packed(args.model):
        trust = {"trust_remote_code": args.trust_remote_code}
        return load_packed(args.model, device=device_of(config.device), dtype=config.dtype, **trust)
    place = {"device": device_of(config.device), "engine": engine, "max_bytes": config.memory_limit}
    place["offload"] = config.offload
    return load_model(args.model, dtype=config.dtype, **place, **trust)


def _check_tasks(tasks: Sequence[str], engines: Iterable[str], settings: dict) -> None:
    """Refuses tasks that lm-eval does not know, and engines with which it cannot run them."""
    from .evaluate.lm_eval_tasks import check_tasks

    if other := next((engine for engine in engines if engine in ("streamed", "sharded")), None):
        raise UserError(
            f"the tasks of lm-eval ({', '.join(tasks)}) need all weights on the device, got --engine {other}; leave "
            f"one of both out"
        )
    check_tasks(tasks, **settings)


def _check_texts(
    model: str,
    *,
    calibration: Sequence[str] = (),
    guards: Sequence[str] = (),
    eval: Sequence[str] = (),
    local: bool = False,
) -> None:
    """Read texts before the model is loaded, so that a mistake shows at once; with `local`, no data sets.

    Raises:
        UserError: a text cannot be read; or the model has a wrong name, which is then said first.
    """
    from .model.load import check_name, lacks_tokenizer
    from .text.sources import check_source

    if (calibration or eval) and not local and lacks_tokenizer(model):
        raise UserError(
            f"model {model!r}: the folder has no tokenizer files; copy tokenizer.json and tokenizer_config.json from "
            f"the original model into it"
        )
    calibration = [source.name for source in parse_sources(tuple(calibration))]
    flags = {"--calibration": calibration, "--guard": guards, "--eval": eval}
    try:
        for flag, source in ((flag, name) for flag, names in flags.items() for name in names):
            check_source(source, flag, purpose="eval" if flag == "--eval" else "calibration", local=local)
    except UserError:
        check_name(model)
        raise


def _texts_of(config: PruneConfig) -> list[str]:
    return [*(source.name for source in config.sources), *config.guards, *config.eval]


def _inputs(args: argparse.Namespace, config: PruneConfig) -> list[str]:
    """Names or paths of what a command that prunes reads, beside its settings."""
    return [args.model, *filter(None, [args.statistics]), *_texts_of(config)]


def _check_outside(output: str, config: PruneConfig) -> None:
    """Refuses an output inside a folder that is a text: what is written there would change the text."""
    place = Path(output).resolve()
    for name in _texts_of(config):
        if Path(name).is_dir() and Path(name).resolve() in place.parents:
            raise UserError(f"output {output} lies in {name}, a text of this run; choose a folder outside it")


def _warn_of_newer(output: str, inputs: Iterable[str]) -> None:
    """Warns of a file that a finished command read, and that has been written since."""
    from .notes import warn
    from .report.record import FILE_NAME
    from .source_shares import OWN_TEXT
    from .text.sources import NAMED

    written = Path(output, FILE_NAME).stat().st_mtime
    for path in (Path(name) for name in dict.fromkeys(inputs) if name not in (*NAMED, OWN_TEXT, "smollm2")):
        is_model = (path / "config.json").is_file()
        files = [*path.glob("*.safetensors"), *path.glob("*.json")] if is_model else [path, *path.rglob("[!.]*")]
        ages = [(file.stat().st_mtime, str(file)) for file in files if file.is_file()]
        if ages and max(ages)[0] > written:
            warn(f"{max(ages)[1]} was written after {output}; pass --overwrite to run the command again with it")


def prune(args: argparse.Namespace) -> Result:
    """Prunes a model and writes it, or lists what would be pruned."""
    config = _config(args)
    _check_prune_flags(args, config)
    from .formats.files import check_output
    from .measure.statistics import Statistics, check_uses_statistics

    resolved = config.resolved()
    if args.statistics:
        check_uses_statistics(resolved)
    if (checked := _on_first(lambda: _finished(args, config))) is not None:
        _on_first(lambda: _warn_of_newer(args.output, _inputs(args, config)))
        finished = (
            f"finished    {args.output} holds the result of this command: {checked}; model and texts were not read"
        )
        return _result_of(args, "\n".join([finished, *_upload(args)]))
    if not args.dry_run:
        inputs = (args.config, *_inputs(args, config))
        _on_first(lambda: check_output(args.output, overwrite=args.overwrite, inputs=inputs))
        _check_outside(args.output, config)
    statistics = Statistics.load(args.statistics) if args.statistics else None
    reads_calibration = resolved.runs_blocks or (resolved.reads_statistics and statistics is None)
    _check_texts(
        args.model,
        calibration=config.calibration if reads_calibration else (),
        guards=config.guards if resolved.responds or not config.no_check else (),
        eval=config.eval,
        local=args.dry_run,
    )
    if args.dry_run:
        return Result(_plan(_load(args, config)[0], resolved))
    return _prune_and_save(args, config, statistics)


def _on_first(compute: Callable[[], T]) -> T:
    """What the first rank of a run computes, on all of them."""
    from .engine.ranks import Ranks

    return Ranks.current().share(compute)


def _check_prune_flags(args: argparse.Namespace, config: PruneConfig) -> None:
    if not args.output and not args.dry_run:
        raise UserError("--output DIR is required (or --dry-run)")
    if args.dry_run and (args.json or args.push_to_hub):
        raise UserError("--dry-run makes no record and no model; leave --json and --push-to-hub out")
    if not config.eval and (config.eval_windows or config.eval_seqlen):
        raise UserError("--eval-windows and --eval-seqlen need a text; add --eval TEXT, e.g. --eval wikitext2")


def _finished(args: argparse.Namespace, config: PruneConfig) -> str | None:
    """What was checked, if --resume meets a complete output, whose files are then compared with its report; else None.

    Raises:
        UserError: the output is of other settings, or differs from its report.
    """
    from .report.record import FILE_NAME
    from .run.save import verify_finished
    from .run.state import RunState

    if not (args.resume and args.output and Path(args.output, FILE_NAME).is_file() and not args.overwrite):
        return None
    checked = verify_finished(args.output, config.resolved(), model=args.model, statistics=args.statistics)
    RunState(args.output, overwrite=True).remove()
    return checked


def _prune_and_save(args: argparse.Namespace, config: PruneConfig, statistics) -> Result:
    from .formats.dense import model_bytes
    from .formats.files import check_output
    from .model.file_stamps import FileStamps
    from .report.summary import next_commands, summary
    from .run import pipeline
    from .run.save import save_pruned
    from .run.stage import timed
    from .run.state import RunState
    from .run.titles import stage_titles

    titles = stage_titles(config, statistics, saves=True) + ["upload"] * bool(args.push_to_hub)
    with RunState(args.output, resume=args.resume, overwrite=args.overwrite) as state, planned(titles):
        _tell_of_state(args, state)
        if args.push_to_hub:
            from .run.hub import open_repository

            args.push_to_hub = _on_first(lambda: open_repository(args.push_to_hub))
        files = FileStamps(args.model)
        with timed(seconds := {}, StageName.LOAD):
            model, tokenizer = _load(args, config)
        copies = 2 if config.resolved().runs_blocks else 1  # --resume keeps the pruned blocks too
        needed = copies * model_bytes(model)
        _on_first(lambda: check_output(args.output, overwrite=args.overwrite, needed_bytes=needed))
        report = pipeline.prune(model, tokenizer, config=config, statistics=statistics, state=state)
        report.config = {**report.config, "model": args.model, "statistics": args.statistics}
        report.seconds = seconds | report.seconds
        _on_first(lambda: files.check(model))
        begin_stage(StageName.SAVE.title)
        save_pruned(model, tokenizer, report, args.output, overwrite=args.overwrite)
        state.remove()
        uploaded = _upload(args)
    lines = [summary(report), f"saved       {args.output}", *uploaded, "", "next:"]
    return _result_of(args, "\n".join([*lines, *(f"  {line}" for line in next_commands(report, args.output))]))


def _result_of(args: argparse.Namespace, text: str) -> Result:
    """The record for --json, else the text with bold labels."""
    from .report.record import FILE_NAME

    if args.json and is_first():
        return Result(Path(args.output, FILE_NAME).read_text(encoding="utf-8").rstrip("\n"), saved=args.output)
    bold = re.sub(r"^\w+(?=  |:$)", lambda label: styled(label[0], "bold", sys.stdout), text, flags=re.MULTILINE)
    return Result(bold, saved=args.output)


def _upload(args: argparse.Namespace) -> list[str]:
    """Uploads the result where --push-to-hub asks for it. Returns a line about it."""
    if not (args.push_to_hub and is_first()):
        return []
    from .run.hub import upload

    return [f"uploaded    {upload(args.output, args.push_to_hub)}"]


def _tell_of_state(args: argparse.Namespace, state) -> None:
    if args.resume and not state.resumed:
        say("no interrupted run was found: starting from the beginning")
    if state.removed:
        say(f"starting over: the finished work of an interrupted run was removed from {state.folder}")


def _plan(model, config: PruneConfig) -> str:
    """What a run with these settings would remove, without a pass of text."""
    from .allocate.budgets import keep_total
    from .engine.all_weights import count_weights
    from .engine.engine import make_engine
    from .methods.block_loop import asked
    from .model.plain import check_plain
    from .model.targets import find_blocks
    from .run.outcome import FEW_ZEROS
    from .run.pipeline import plan

    check_plain(model)
    targets, skipped = plan(model, config)
    zeros = count_weights(make_engine(model, targets, config)).target_zeros
    size = removed = 0
    lines = []
    for target in targets:
        rows, cols = target.shape
        goes = rows * cols - asked(config, target)
        place = "" if target.slice_of is None else f"  = {target.parameter}[{target.slice_of.index}]"
        removes = f"  removes {goes}" if config.fixes_matrix_totals else ""
        lines.append(f"{target.name}  [{rows}, {cols}]{removes}{place}")
        size, removed = size + rows * cols, removed + goes
    lines += [f"{item.name}  {list(item.shape)}  skipped: {item.reason}" for item in skipped]
    if not config.fixes_matrix_totals:
        removed = size - keep_total(size, config.removed)
        lines.append(
            f"--allocation {config.allocation} divides the removed weights among these matrices by measurements on the "
            f"text, which --dry-run does not make"
        )
    if zeros >= FEW_ZEROS * size:
        lines.append(f"{zeros} of these weights ({zeros / size:.2%}) are 0 already: they stay 0 and are removed first")
    total, inside = (sum(p.numel() for p in m.parameters()) for m in (model, find_blocks(model)[1]))
    shares = f"{size / inside:.2%} of the parameters of the blocks, {size / total:.2%} of the model's"
    return "\n".join([
        *lines,
        f"these matrices hold {shares}",
        f"{len(targets)} matrices of {size} weights, {removed} removed ({removed / size:.4f}); nothing was written",
    ])  # fmt: skip


def calibrate(args: argparse.Namespace) -> Result:
    """Measures statistics and writes them."""
    config = _config(args)
    from .formats.files import check_file
    from .formats.source import warn_of_ignored
    from .measure.statistics import Statistics
    from .model.file_stamps import FileStamps
    from .run.pipeline import collect
    from .run.titles import calibration_titles

    output = _on_first(lambda: check_file(args.output, ".safetensors"))
    _check_outside(args.output, config)
    if output.exists():
        Statistics.load(output)  # refuses to replace another kind of file
    _check_texts(args.model, calibration=config.calibration)
    with planned(calibration_titles(config, loads=True)):
        files = FileStamps(args.model)
        model, tokenizer = _load(args, config)
        warn_of_ignored(model)
        statistics = collect(model, tokenizer, config=config)
        _on_first(lambda: files.check(model))
    _on_first(lambda: statistics.save(output))
    model_name, file = shlex.quote(args.model), shlex.quote(args.output)
    lines = [
        f"statistics of {len(statistics.x2)} matrices saved in {args.output}",
        f"next: fwanda prune {model_name} --statistics {file} --sparsity 0.5 --output DIR",
    ]
    return Result("\n".join(lines), saved=args.output)


def sample(args: argparse.Namespace) -> Result:
    """Lets a model write text and saves it."""
    config = _config(args)
    if config.engine == "sharded":
        raise UserError("fwanda sample does not work with --engine sharded; use another engine")
    from .formats.source import warn_of_ignored
    from .run.sample import check_sample_file, write_sample
    from .run.state import RunState
    from .text.domains import calibration_part

    _on_first(lambda: check_sample_file(args.output))
    titles = [StageName.LOAD.title, StageName.SAMPLE.title]
    with RunState(args.output, resume=args.resume, overwrite=args.overwrite) as state, planned(titles):
        if _on_first(lambda: _sample_is_finished(args, config, state)):
            text = f"finished    {args.output} holds {config.nsamples} windows of this model with these settings"
            return Result(text, saved=args.output)
        _tell_of_state(args, state)
        model, tokenizer = _load(args, config)
        warn_of_ignored(model)
        seconds, energy = write_sample(model, tokenizer, args.output, config=config, state=state)
        state.remove()
    read = calibration_part(config.nsamples)
    text = f"--calibration {shlex.quote(args.output)} --nsamples {read} --seqlen {config.seqlen}"
    lines = [
        f"seconds     {seconds:.1f} for {config.nsamples} windows of {config.seqlen} tokens",
        f"energy      {energy if isinstance(energy, str) else f'{energy:.0f} J gross'}",
        f"saved       {args.output}",
        f"next: fwanda prune {shlex.quote(args.model)} {text} --sparsity 0.5 --output DIR",
    ]
    return Result("\n".join(lines), saved=args.output)


def _sample_is_finished(args: argparse.Namespace, config: PruneConfig, state) -> bool:
    """Whether --resume meets a complete file; it is then compared with the settings."""
    from .run.sample import verify_finished

    if not args.resume or args.overwrite or state.resumed or not Path(args.output).exists():
        return False
    verify_finished(args.output, config, model=args.model)
    return True


def evaluate(args: argparse.Namespace) -> Result:
    """Measures a model. The result is JSON."""
    config, names = _config(args), [name.strip() for name in args.tasks.split(",")]
    tasks, settings = [name for name in names if name != "ppl"], _task_settings(args)
    if tasks:
        from .evaluate.lm_eval_tasks import evaluate_tasks

        _check_tasks(tasks, [config.engine], settings)
    elif settings:
        raise UserError("--eval-data, --limit and --batch-size are for the tasks of lm-eval; name some by --tasks")
    if "ppl" in names:
        config = _with_texts(args.model, config)
    elif config.eval:
        raise UserError(f"--eval is the text of ppl, got --tasks {args.tasks}; add ppl or leave --eval out")
    _check_texts(args.model, eval=config.eval)
    from .formats.source import warn_of_ignored
    from .model.file_stamps import FileStamps
    from .run.pipeline import evaluate_model

    config, files = _as_recorded(args.model, config), FileStamps(args.model)
    with planned([StageName.LOAD.title, "perplexity and zeros", *(["tasks"] if tasks else [])]):
        model, tokenizer = _load(args, config, streams=not tasks, packed=True)
        warn_of_ignored(model)
        begin_stage("perplexity and zeros")
        result = evaluate_model(model, tokenizer, config=config)
        _tell_of_bos(config, tokenizer, result["perplexity"])
        if tasks:
            begin_stage("tasks")
            result["lm_eval"] = _on_first(lambda: evaluate_tasks(model, tokenizer, tasks, **settings))
    _on_first(lambda: files.check(model))
    for text in result["perplexity"]:  # JSON has no infinity; the record writes it like this, too
        if not math.isfinite(text["perplexity"]):
            text["perplexity"] = str(text["perplexity"])
    return Result(json.dumps({"model": args.model, **result}, indent=1))


def _with_texts(model: str, config: PruneConfig) -> PruneConfig:
    """The settings; texts, if not given, are those of the report beside the model, else "sample"."""
    from .report.record import FILE_NAME, Report
    from .run.texts import TOKENS

    if config.eval:
        return config
    report = Report.load(model) if Path(model, FILE_NAME).is_file() else None
    sources = [text["source"] for text in report.perplexity] if report else []
    texts = tuple(source for source in sources if source.partition(" ")[0] != TOKENS)
    for text in texts:
        if Path(text).suffix in (".txt", ".jsonl", ".json", ".parquet", ".gz") and not Path(text).exists():
            raise UserError(f"{model} was measured on {text}, which is not here; name a text by --eval")
    if not texts:
        return replace(config, eval=("sample",))
    return replace(config, eval=texts, eval_windows=config.eval_windows or report.config.get("eval_windows"))


def _as_recorded(model: str, config: PruneConfig) -> PruneConfig:
    """The settings; BOS and window length, if not given, are those of the report beside the model."""
    from .report.record import FILE_NAME, Report

    if not Path(model, FILE_NAME).is_file():
        return config
    report = Report.load(model)
    if config.bos == "auto":
        config = replace(config, bos={None: "auto", True: "window", False: "none"}[report.bos])
    lengths = {text["seqlen"] for text in report.perplexity}
    return replace(config, eval_seqlen=lengths.pop()) if config.eval_seqlen is None and len(lengths) == 1 else config


def _tell_of_bos(config: PruneConfig, tokenizer, perplexity: list[dict]) -> None:
    """Says what --bos auto chose: another text could choose otherwise, and the perplexities would differ."""
    if not perplexity or config.bos != "auto" or tokenizer.bos_token_id is None:
        return
    first = perplexity[0]
    if first["bos"]:
        say(f"BOS before each window: it lowers the loss on {first['source']}; --bos none leaves it out")
    else:
        say(f"no BOS: it does not lower the loss on {first['source']}; --bos window puts it before each window")


def _task_settings(args: argparse.Namespace) -> dict:
    """The arguments of evaluate_tasks() whose flags were given."""
    given = {"data_dir": args.eval_data, "limit": args.limit, "batch_size": args.batch_size}
    return {name: value for name, value in given.items() if value is not None}


def sweep(args: argparse.Namespace) -> Result:
    """Runs a recipe, and writes its tables and pictures."""
    from .sweep.figures import check_installed, draw
    from .sweep.recipe import Recipe
    from .sweep.run import TaskSettings, check_folder, check_windows, run
    from .sweep.tables import lines_of, markdown, write_tables

    check_installed()
    _on_first(lambda: check_folder(args.output, args.model))
    recipe = Recipe.load(args.recipe, _given(args))
    for config in recipe.cells:
        _check_texts(args.model, calibration=config.calibration, guards=config.guards, eval=config.eval)
        _check_outside(args.output, config)
    settings = _task_settings(args)
    if recipe.tasks:
        _check_tasks(recipe.tasks, [config.engine for config in recipe.cells], settings)
    elif settings:
        raise UserError(f"--eval-data, --limit and --batch-size are for tasks, and {args.recipe} names none")
    model, tokenizer = _load(args, recipe.cells[0], streams=not recipe.tasks)
    check_windows(recipe, tokenizer)
    try:
        cells = run(model, tokenizer, recipe, args.output, source=args.model, tasks=TaskSettings(**settings))
    except KeyboardInterrupt as interrupt:
        interrupt.args = ("continue with the same command",)
        raise
    lines = lines_of(recipe.cells, cells)
    paths = _on_first(lambda: write_tables(lines, args.output) + draw(lines, args.output))
    return Result("\n".join([markdown(lines), *map(str, paths)]), saved=args.output)


def report(args: argparse.Namespace) -> Result:
    """Compares reports in tables, as CSV or JSON, or on a page."""
    from .report.export import as_csv, as_json
    from .report.record import Report
    from .report.summary import table

    def as_table(reports):
        return table([(f"{path} ({report.config.get('model')})", report) for path, report in reports.items()])

    forms = {"table": as_table, "csv": as_csv, "json": as_json}
    if args.format not in (None, *forms):
        hint = "; for a page: --html FILE.html" if args.format == "html" else did_you_mean(args.format, forms)
        raise UserError(f"--format must be one of {', '.join(forms)}, got {show(args.format)}{hint}")
    if args.format and args.html:
        raise UserError("--format prints and --html writes a page; give only one of them")
    reports = {path: Report.load(path) for path in args.reports}
    if not args.html:
        return Result(forms[args.format or "table"](reports))
    from .report.html import write_html

    write_html(reports, args.html)
    return Result(f"saved       {args.html}", saved=args.html)


def demo(args: argparse.Namespace) -> Result:
    """Prunes a small model in several ways and prints a table."""
    from .demo import run

    run(Path(args.output) if args.output else None, quick=args.quick)
    return Result("")


def pack(args: argparse.Namespace) -> Result:
    """Writes a packed copy of a folder."""
    from .run.convert import pack_folder

    return Result(pack_folder(args.folder, args.output, force=args.force, overwrite=args.overwrite), saved=args.output)


def unpack(args: argparse.Namespace) -> Result:
    """Writes a dense copy of a packed folder."""
    from .run.convert import unpack_folder

    return Result(unpack_folder(args.folder, args.output, overwrite=args.overwrite), saved=args.output)


def bench(args: argparse.Namespace) -> Result:
    """Compares the speed of the dense and the packed form of a pruned model."""
    from .run.bench import as_dicts, table
    from .run.bench import bench as measure

    config = _config(args)
    numbers = {name: _numbers(f"--{name}", getattr(args, name)) for name in ("batches", "prompts")}
    rows = measure(args.folder, device=config.device, dtype=config.dtype, tokens=args.tokens, **numbers)
    return Result(json.dumps(as_dicts(rows), indent=1) if args.json else table(rows))


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", text):
        raise UserError(f"{flag} must be numbers in [1, 999999], separated by commas, got {show(text)}")
    return tuple(int(number) for number in text.split(","))


def doctor(_args: argparse.Namespace) -> Result:
    """Lists what is installed and what is missing."""
    from .doctor import describe

    return Result(describe())
