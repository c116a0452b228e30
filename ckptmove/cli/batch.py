"""The commands `ckptmove batch inspect`, `relocate`, `convert` and `validate`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..api.options import options_of
from ..batches.batch import batch as run_batch
from ..batches.executors.process_pool import forking
from ..batches.options import VerbName, item_options
from ..batches.running import Batch
from ..display.blocks import text_of
from ..display.phrases import plural
from ..display.text import printable
from ..errors import CheckFailed, CkptmoveError, RefusedError, UsageError
from ..reports.batch.items import DONE, SKIPPED, Result
from ..reports.batch.report import RetryCommand, batch_line, only_left_out
from ..system.signals import SignalReceived
from .declare import Command, Decorator, option, verb_options, with_options, with_values
from .display.batch_files import ChecksumFile, Log
from .display.batch_metrics import MetricsFile
from .display.batch_progress import FORMS, BatchProgress
from .display.output import (
    OutputOptions,
    destination_argument,
    emit,
    emit_json,
    html_option,
    needs_source,
    output_options,
    source_argument,
)
from .display.terminal import terminal_of
from .help_text import HelpContext

_WORDS = "ckptmove.display.phrases"


class _Verbs(click.Group):
    """The verbs of a batch; the help shows the whole first sentence of each."""

    context_class = HelpContext

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, (each.help or "").partition("\n\n")[0])
                    for name, each in self.commands.items()
                ]
            )


class _BatchCommand(Command):
    """A command that remembers the words of its command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember the words, then parse them."""
        ctx.meta[_WORDS] = tuple(args)
        return super().parse_args(ctx, args)


def _retry_command(log: str | None) -> RetryCommand:
    """Return this command line, for a message that says how to run it again."""
    context = click.get_current_context()
    words: tuple[str, ...] = context.meta[_WORDS]
    valued = {
        name
        for each in context.command.params
        if isinstance(each, click.Option) and not each.is_flag
        for name in each.opts
    }
    narrowed, rest = list[str](), iter(words)
    for word in rest:
        if word == "--":
            narrowed += [word, *rest]
        elif word in valued:
            value = next(rest)
            narrowed += [word, value] if word != "--include" else []
        elif not word.startswith("--include="):
            narrowed.append(word)
    verb = ("batch", context.command.name or "")
    is_file = log is not None and Path(log).is_file()  # a pipe can't be read again
    return RetryCommand(verb, words, narrowed, log if is_file else None)


def _options(verb: str) -> Decorator:
    """Add the options of a batch, and those of its verb."""
    batch_options = dict(options_of(run_batch))
    if verb != "convert":
        del batch_options["keep_suffix"]
    if verb in ("inspect", "validate"):
        del batch_options["copy_rest"], batch_options["delete_source"]
    if verb == "inspect":
        del batch_options["digests"], batch_options["dry_run"], batch_options["verify"]
    writes = verb != "inspect"
    arguments = (source_argument, destination_argument) if writes else (source_argument,)
    log = option(
        "--log",
        group="How to run",
        metavar="FILE",
        help="Append one line of JSON for each item to FILE"
        + (", with digests as of --digests." if writes else "."),
    )
    manifest = option(
        "--manifest",
        group="How to run",
        metavar="FILE",
        help="Write the SHA-256 of each file in DST to FILE, for sha256sum -c in DST.",
    )
    progress = option(
        "--progress",
        group="How to run",
        type=click.Choice(FORMS),
        default="auto",
        show_default=True,
        help="Show progress on stderr: auto is a bar on a terminal, and elsewhere a line every 30 "
        "seconds; json is a line of JSON each second.",
    )
    metrics = option(
        "--metrics",
        group="How to run",
        metavar="FILE",
        help="Keep FILE up to date for Prometheus: a text file that node_exporter reads (.prom).",
    )
    both = verb_options({**batch_options, **item_options(verb)})
    added = (both, log, *((manifest,) if writes else ()), progress, metrics)
    return lambda command: with_options(command, *arguments, *added, html_option, output_options)


@click.group(cls=_Verbs)
@with_values(options_of(run_batch))
def batch() -> None:
    """Inspect, relocate, convert or validate all checkpoints of a folder tree.

    ckptmove finds checkpoints by their content, not by their names. The folder of a model or a
    trainer is one item, also in place. It plans everything first. If an item fails, the
    others still run, and the summary lists the failures. After kill -9 or Ctrl-C, run the same
    command again to resume. Two runs at the same time share the work. Links to files are followed;
    links to folders are not.

    \b
    ckptmove batch inspect runs/
    ckptmove batch convert runs/ out/ --format safetensors
    ckptmove batch relocate runs/ out/ --to cpu --include '*/last.ckpt'
    ckptmove batch relocate runs/ --to cpu --in-place
    ckptmove batch validate out/ --against runs/
    ckptmove batch convert runs/ out/ --ray auto
    """


@batch.command(cls=_BatchCommand)
@_options("inspect")
def inspect(src: str | None, output: OutputOptions, **options: Any) -> None:
    """Show one table of SRC: each checkpoint with its format, devices, dtypes and bytes.

    The options are those of ckptmove inspect. A file that can't be read also has a row, with the
    reason; the exit code is then 1. "not stored" counts the bytes of formats that store no devices,
    such as safetensors.

    \b
    ckptmove batch inspect runs/
    ckptmove batch inspect s3://bucket/runs --newer 7d --json
    ckptmove batch inspect runs/ --require cpu --html runs.html
    """
    _run("inspect", needs_source(src), None, output, options)


@batch.command(cls=_BatchCommand)
@_options("relocate")
def relocate(src: str | None, dst: str | None, output: OutputOptions, **options: Any) -> None:
    """Relocate every checkpoint in SRC to the same name in DST, or in place.

    The options are those of ckptmove relocate. Checkpoints that store no devices, such as
    safetensors and folders of DCP, are copied unchanged. In place, a folder changes as a whole or
    not at all.

    \b
    ckptmove batch relocate runs/ out/ --to cpu
    """
    _run("relocate", needs_source(src), dst, output, options)


@batch.command(cls=_BatchCommand)
@_options("convert")
def convert(src: str | None, dst: str | None, output: OutputOptions, **options: Any) -> None:
    """Convert every checkpoint in SRC to the same name in DST, with another suffix.

    The options are those of ckptmove convert; see ckptmove convert -h for names, GLOB and the
    presets. Without --format, the outputs are safetensors. With --weights or a preset that takes
    weights, what is known to hold none (optimizers, RNG states, data loaders) is left out, and
    counted; the exit code stays 0 unless nothing else was found.

    \b
    ckptmove batch convert runs/ out/ --format safetensors
    """
    _run("convert", needs_source(src), dst, output, options)


@batch.command(cls=_BatchCommand)
@_options("validate")
def validate(src: str | None, dst: str | None, output: OutputOptions, **options: Any) -> None:
    """Validate every checkpoint in SRC; with DST, write a JSON report of each there.

    The options are those of ckptmove validate; see ckptmove validate -h for FACTORY and SPEC. OTHER
    is a folder tree too: each item is compared with the checkpoint of the same name in it, or with
    the only one that differs just in the suffix.

    \b
    ckptmove batch validate out/ --against runs/
    """
    _run("validate", needs_source(src), dst, output, options)


def _run(
    verb: VerbName, src: str, dst: str | None, output: OutputOptions, options: dict[str, Any]
) -> None:
    """Plan, run and sum up."""
    gc.enable()  # imported only here: it is slow
    as_json, quiet, verbose, no_progress, _ = output
    log, sums, form = (options.pop(each, None) for each in ("log", "manifest", "progress"))
    dry_run = options.get("dry_run")
    options["contents"] = output.html is not None and verb != "inspect"
    if sums is not None and dst is None:
        raise UsageError("--manifest needs a destination")
    manifest = None if sums is None or dst is None else ChecksumFile(sums, dst)
    options["digests"] = (
        options.get("digests", False) or sums is not None or (log is not None and dst is not None)
    )
    metrics = MetricsFile(
        options.pop("metrics", None), verb=verb, source=src, shard=options.get("shard_of")
    )
    form = "errors" if quiet else "none" if no_progress or form is None else form
    bar = BatchProgress(form, metrics)
    work = run_batch(verb, src, dst, progress=bar.advance, **options)
    if dry_run:
        _foretell(work, src, output, bar)
        return
    output.warn(src, work.plan.notes)
    warned, kept_sources, broken, digests, unknown = 0, 0, None, dict[str, str](), 0
    removes = bool(options.get("delete_source"))
    with work, Log(log, verb, options.get("shard_of")) as lines:
        try:
            with forking(), bar.over(work):
                for result in work:
                    warned += bool(result.warnings)
                    kept_sources += removes and result.ok and not result.source_removed
                    lines.add(result)
                    bar.add(result)
                    digests.update(result.digests)
                    unknown += result.outcome in (DONE, SKIPPED) and not result.digests
                    if verbose and not as_json:
                        bar.print(_item_lines(result))
        except (KeyboardInterrupt, SignalReceived) as error:
            broken = error
    errors = list[CkptmoveError]()  # raised after the summary
    if manifest is not None and broken is None:
        kept = work.plan.kept
        with _collecting(errors):
            manifest.write_digests({**{k: v for each in kept for k, v in each.items()}, **digests})
        apart = sum(not each for each in kept)  # of this run's items
        if unknown or apart:
            many = plural(unknown + apart, "item")
            how = "a run of all of them with --verify" if apart else "--verify"
            told = f"lacks {many} of an earlier run; {how} reads them again"
            output.warn(sums, [told])
    report = work.report()
    with _collecting(errors):
        output.write_page(report, src)
    output.warn(src, report.notes[len(work.plan.notes) :])
    if as_json:
        emit_json(report.to_json())
    elif not quiet:
        retry = _retry_command(log if lines.error is None else None)
        shown = report.blocks(full=verbose, warned=warned, kept=kept_sources, told=verbose)
        emit(text_of(shown, terminal_of(sys.stdout, full=verbose)))
        emit(retry.lines(report) if verb != "inspect" or report.remaining else ())
    if broken is not None:
        raise broken
    for each in (lines.error, metrics.error, *errors):
        if each is not None:
            raise each
    if report.failures:
        failed, items = len(report.failures), sum(report.outcomes.values())
        raise CheckFailed(f"{failed:,} of {items:,} items failed or were refused", path=src)
    if only_left_out(report.outcomes) and not work.plan.allows_empty:
        raise _nothing_left(src)


@contextmanager
def _collecting(errors: list[CkptmoveError]) -> Iterator[None]:
    """A context that keeps an error for later."""
    try:
        yield
    except CkptmoveError as error:
        errors.append(error)


def _foretell(work: Batch, src: str, output: OutputOptions, bar: BatchProgress) -> None:
    """Show what would happen to each item. Raises CheckFailed if some items would not be done."""
    with forking(), bar.over(work), work:
        for result in work:
            bar.add(result)
    plan = work.plan
    output.show(plan)
    if plan.failures:
        items = len(plan.forecasts or ())
        failed = len(plan.failures)
        raise CheckFailed(f"{failed:,} of {items:,} items would fail or be refused", path=src)
    if plan.is_empty:
        raise _nothing_left(src)


def _nothing_left(src: str) -> RefusedError:
    """Return the error for a batch that leaves out all its items."""
    why = "every item is left out: none holds weights of a model"
    return RefusedError(why, path=src, hint="--allow-empty accepts that")


def _item_lines(result: Result) -> Iterator[str]:
    yield batch_line(result)
    yield from (printable(f"        {each}") for each in result.warnings)
