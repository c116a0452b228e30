"""The commands `ckptmove batch relocate`, `batch convert` and `batch validate`."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click

from ..api.options import options_of
from ..batches.batch import batch as run_batch
from ..batches.options import item_options
from ..batches.running import Batch
from ..errors import CheckFailed, WriteError
from ..reports.batch import RetryCommand, batch_line
from ..reports.batch_items import Result
from ..reports.blocks import text_of
from ..reports.text import cut, printable
from .declare import Command, Decorator, option, verb_options, with_options, with_values
from .output import (
    Output,
    destination_argument,
    emit,
    emit_json,
    html_option,
    needs_source,
    output_options,
    source_argument,
)
from .streams import Signalled

_WORDS = "ckptmove.phrases"
_OFTEN = 0.1  # seconds between two looks at what is being done
_LONGEST_NAME = 40


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
    is_file = log is not None and Path(log).is_file()  # what else there is can't be read again
    return RetryCommand(verb, words, narrowed, log if is_file else None)


def _options(verb: str) -> Decorator:
    """Add the options of a batch, and those of its verb."""
    batch_options = dict(options_of(run_batch))
    if verb != "convert":
        del batch_options["keep_suffix"]
    if verb == "validate":
        del batch_options["copy_rest"], batch_options["delete_source"]
    arguments = source_argument, destination_argument
    log = option(
        "--log",
        group="How to run",
        metavar="FILE",
        help="Append one line of JSON for each item to FILE.",
    )
    both = verb_options({**batch_options, **item_options(verb)})
    return lambda command: with_options(command, *arguments, both, log, html_option, output_options)


@click.group()
@with_values(options_of(run_batch))
def batch() -> None:
    """Relocate, convert or validate all checkpoints of a folder tree.

    ckptmove finds checkpoints by their content, not by their names. It converts and validates a
    model folder, or an index with its files, as one item. It plans everything first. If an item
    fails, the others still run, and the summary lists the failures. After kill -9 or Ctrl-C, run
    the same command again to resume. Two runs at the same time share the work. Links to files are
    followed, links to folders are not.

    \b
    ckptmove batch convert runs/ out/ --format safetensors
    ckptmove batch relocate runs/ out/ --to cpu --include '*/last.ckpt'
    ckptmove batch relocate runs/ --to cpu --in-place
    ckptmove batch validate out/ --against runs/
    ckptmove batch convert runs/ out/ --ray auto
    """


@batch.command(cls=_BatchCommand)
@_options("relocate")
def relocate(src: str | None, dst: str | None, output: Output, **options: Any) -> None:
    """Relocate every checkpoint in SRC to the same name in DST, or in place.

    The options are those of ckptmove relocate. Files without devices, such as safetensors, are
    refused; leave them out with --exclude.

    \b
    ckptmove batch relocate runs/ out/ --to cpu
    """
    _run("relocate", needs_source(src), dst, output, options)


@batch.command(cls=_BatchCommand)
@_options("convert")
def convert(src: str | None, dst: str | None, output: Output, **options: Any) -> None:
    """Convert every checkpoint in SRC to the same name in DST, with another suffix.

    The options are those of ckptmove convert; see ckptmove convert -h for names, GLOB and the
    presets. Without --format, the outputs are safetensors.

    \b
    ckptmove batch convert runs/ out/ --format safetensors
    """
    _run("convert", needs_source(src), dst, output, options)


@batch.command(cls=_BatchCommand)
@_options("validate")
def validate(src: str | None, dst: str | None, output: Output, **options: Any) -> None:
    """Validate every checkpoint in SRC; with DST, write a JSON report of each there.

    The options are those of ckptmove validate; see ckptmove validate -h for FACTORY and SPEC. OTHER
    is a folder tree too: each item is compared with the checkpoint of the same name in it, or with
    the only one that differs just in the suffix.

    \b
    ckptmove batch validate out/ --against runs/
    """
    _run("validate", needs_source(src), dst, output, options)


def _run(verb: str, src: str, dst: str | None, output: Output, options: dict[str, Any]) -> None:
    """Plan, run and sum up."""
    gc.enable()  # which the command line does without, but this may take long
    as_json, quiet, verbose, no_progress, _ = output
    log, dry_run = options.pop("log"), options["dry_run"]
    bar = _ProgressBar(not (quiet or verbose or no_progress) and sys.stderr.isatty())
    work = run_batch(verb, src, dst, progress=bar.advance, **options)
    if dry_run:
        _foretell(work, src, output, bar)
        return
    output.warn(src, work.plan.notes)
    warned, broken = 0, None
    with _Log(log) as lines:
        try:
            with bar.over(work):
                for result in work:
                    warned += bool(result.warnings)
                    lines.add(result)
                    if verbose and not as_json:
                        _print_item(result)
        except (KeyboardInterrupt, Signalled) as error:
            broken = error
        finally:
            work.close()
    report = work.report()
    output.write_page(report, src)
    output.warn(src, report.notes[len(work.plan.notes) :])
    if as_json:
        emit_json(report.to_json())
    elif not quiet:
        retry = _retry_command(log if lines.error is None else None)
        emit(text_of(report.blocks(full=verbose, warned=warned, told=verbose)))
        emit(retry.lines(report))
    if broken is not None:
        raise broken
    if lines.error is not None:
        raise lines.error
    if report.failures:
        failed, items = len(report.failures), sum(report.outcomes.values())
        raise CheckFailed(f"{failed:,} of {items:,} items failed or were refused", path=src)


def _foretell(work: Batch, src: str, output: Output, bar: _ProgressBar) -> None:
    """Show what would become of each item. Raises CheckFailed if some would not be done."""
    with bar.over(work), work:
        for _ in work:
            pass
    plan = work.plan
    output.show(plan)
    if plan.failures:
        items = len(plan.forecasts or ())
        failed = len(plan.failures)
        raise CheckFailed(f"{failed:,} of {items:,} items would fail or be refused", path=src)


def _print_item(result: Result) -> None:
    emit([batch_line(result), *(printable(f"        {each}") for each in result.warnings)])


class _Log:
    """A file with a line for each item, if one is wanted. If it fails, the batch goes on."""

    def __init__(self, path: str | None) -> None:
        """Raises WriteError if it can't be opened."""
        self.error: WriteError | None = None
        self._path = path
        self._file: IO[str] | None = None
        if path is not None:
            try:
                torn = _is_torn(Path(path))
                self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 until we end
                if torn:
                    self._file.write("\n")
            except OSError as error:
                raise self._failed(error) from error

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *raised: object) -> None:
        self._close()

    def add(self, result: Result) -> None:
        """What became of an item."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(result.to_json()) + "\n")
            self._file.flush()
        except OSError as error:
            self.error = self._failed(error)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # its error was reported
                file.close()

    def _failed(self, error: OSError) -> WriteError:
        return WriteError(f"the log can't be written: {error.strerror}", path=self._path)


def _is_torn(path: Path) -> bool:
    """Whether the last line of a log doesn't end; raises OSError if the file is no log."""
    if path.is_fifo():
        raise OSError(errno.EINVAL, "it is no file")
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        if file.read(1) != b"{":
            raise OSError(errno.EINVAL, "it is not a log of ckptmove batch")
        file.seek(-1, 2)
        return file.read(1) != b"\n"


class _ProgressBar:
    """One bar of bytes over all items, with the names of those that are being done."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None
        self._work: Batch | None = None
        self._next = 0.0

    @contextlib.contextmanager
    def over(self, work: Batch) -> Iterator[None]:
        """While it runs."""
        if not self._shown:
            yield
            return
        from tqdm import tqdm  # only here: it takes a while to import

        self._work = work
        with tqdm(
            total=work.plan.nbytes, unit="B", unit_scale=True, unit_divisor=1000, leave=False
        ) as self._bar:
            yield

    def advance(self, nbytes: int) -> None:
        """So many bytes are done."""
        if self._bar is None or self._work is None:
            return
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _OFTEN
            names = self._work.current
            more = f" +{len(names) - 1}" if len(names) > 1 else ""
            name = cut(printable(names[0]), _LONGEST_NAME) if names else ""
            self._bar.set_postfix_str(name + more, refresh=False)
        self._bar.update(nbytes)
