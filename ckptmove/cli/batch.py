"""ckptmove batch"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import click

from ..batches.batch import batch as run_batch
from ..batches.items import Result
from ..batches.running import Batch
from ..errors import CheckFailed, WriteError
from ..render.batch import batch_line, batch_plan, batch_summary
from ..render.text import cut, printable
from .convert import convert_asked, convert_options
from .options import Function, emit, emit_json, needs_source, output_options, warn, with_options
from .relocate import relocate_asked, relocate_options
from .streams import Signalled
from .validate import validate_options

_WORDS = "ckptmove.words"
_OFTEN = 0.1  # seconds between two looks at what is being done
_LONGEST_NAME = 40


class _Remembering(click.Command):
    """A command that knows how it was asked for."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click has it."""
        ctx.meta[_WORDS] = ["batch", self.name or "", *args]
        return super().parse_args(ctx, args)


def _batch_options(command: Function) -> Function:
    """What is the same for every verb."""
    return with_options(
        command,
        click.argument("src", type=click.Path(), required=False),
        click.argument("dst", type=click.Path(), required=False),
        click.option(
            "--include", multiple=True, metavar="GLOB", help="Only items so called. Repeatable."
        ),
        click.option(
            "--exclude",
            multiple=True,
            metavar="GLOB",
            help="No items so called, and nothing in folders so called. Repeatable.",
        ),
        click.option(
            "-j", "--jobs", type=click.IntRange(1), help="Processes; by default one a core."
        ),
        click.option(
            "--shard-of", metavar="I/N", help="Only the I-th of N shares of the tree, from 1."
        ),
        click.option(
            "--verify", is_flag=True, help="Read again what is done, to see that it holds."
        ),
        click.option("--log", metavar="FILE", help="Add a line of JSON for each item to FILE."),
        click.option("--dry-run", is_flag=True, help="Plan everything, do nothing."),
    )


_copy_others = click.option("--copy-others", is_flag=True, help="Copy also what is no checkpoint.")


@click.group()
def batch() -> None:
    """Relocate, convert or validate all checkpoints of a tree.

    They are found by content, whatever they are called. A folder of a model, or an index with its
    files, is converted and validated as one. All is planned first; what fails stops no other, and
    is told at the end. What was killed, or broken off by Ctrl-C, goes on where it was if the same
    command is run again; two at once share the work.

    \b
    ckptmove batch convert runs/ out/ --format safetensors
    ckptmove batch relocate runs/ out/ --to cpu --include '*/last.ckpt'
    ckptmove batch relocate runs/ --to cpu --in-place
    ckptmove batch validate out/ --against runs/
    """


@batch.command(cls=_Remembering)
@_batch_options
@_copy_others
@relocate_options
@output_options
def relocate(src: str | None, dst: str | None, **given: Any) -> None:
    """Relocate every checkpoint in SRC to the same name in DST, or in place.

    The options are those of ckptmove relocate. What has no devices, such as safetensors, is
    refused: --exclude it.

    \b
    ckptmove batch relocate runs/ out/ --to cpu
    """
    _run("relocate", needs_source(src), dst, given, relocate_asked)


@batch.command(cls=_Remembering)
@_batch_options
@_copy_others
@convert_options("--exclude-tensors")
@output_options
def convert(src: str | None, dst: str | None, **given: Any) -> None:
    """Convert every checkpoint in SRC, to a file of the same name in DST with another suffix.

    The options are those of ckptmove convert; its --exclude is --exclude-tensors here. Without
    --format it is safetensors.

    \b
    ckptmove batch convert runs/ out/ --format safetensors
    """
    _run("convert", needs_source(src), dst, given, convert_asked)


@batch.command(cls=_Remembering)
@_batch_options
@validate_options
@output_options
def validate(src: str | None, dst: str | None, **given: Any) -> None:
    """Validate every checkpoint in SRC; with DST, a report of each goes there as JSON.

    The options are those of ckptmove validate. OTHER is a tree, too: of each item, what has the
    same name there, or that with another suffix.

    \b
    ckptmove batch validate out/ --against runs/
    """
    _run("validate", needs_source(src), dst, given, dict)


class _Asked(Protocol):
    """Makes options of a verb of those of its command."""

    def __call__(self, given: dict[str, Any], /) -> dict[str, Any]: ...


def _run(verb: str, src: str, dst: str | None, given: dict[str, Any], asked: _Asked) -> None:
    """Plan, run and sum up."""
    gc.enable()  # which the command line does without, but this may take long
    as_json, quiet, verbose = given.pop("as_json"), given.pop("quiet"), given.pop("verbose")
    bar, log, dry_run = not given.pop("no_progress"), given.pop("log"), given.pop("dry_run")
    ours = {
        name: given.pop(name)
        for name in ("include", "exclude", "jobs", "shard_of", "verify", "copy_others")
        if name in given
    }
    if verb == "convert":
        given["exclude_tensors"] = given.get("exclude_tensors", ())
    shown = _Shown(bar and not quiet and not verbose and sys.stderr.isatty())
    options = asked(given)
    work = run_batch(verb, src, dst, **ours, dry_run=dry_run, progress=shown.advance, **options)
    if dry_run:
        if as_json:
            emit_json(work.plan.to_json())
        elif not quiet:
            emit(batch_plan(work.plan, full=verbose))
        return
    if not quiet:
        warn(src, work.plan.notes)
    warned, broken = 0, None
    with _opened(log) as lines:
        try:
            with shown.over(work):
                for result in work:
                    warned += bool(result.warnings)
                    _note(lines, result)
                    if verbose and not as_json:
                        _tell(result)
        except (KeyboardInterrupt, Signalled) as error:
            broken = error
        finally:
            work.close()
    report = work.report()
    words = click.get_current_context().meta[_WORDS]
    if as_json:
        emit_json(report.to_json())
    elif not quiet:
        emit(batch_summary(report, words, warned, told=verbose))
    if broken is not None:
        raise broken
    if report.failures:
        raise CheckFailed(_negative(len(report.failures), sum(report.outcomes.values())), path=src)


def _negative(failed: int, items: int) -> str:
    return f"{failed:,} of {items:,} items failed or were refused"


def _tell(result: Result) -> None:
    emit([batch_line(result), *(printable(f"        {each}") for each in result.warnings)])


@contextlib.contextmanager
def _opened(log: str | None) -> Iterator[IO[str] | None]:
    if log is None:
        yield None
        return
    try:
        with Path(log).open("a", encoding="utf-8", errors="surrogateescape") as file:
            yield file
    except OSError as error:
        raise WriteError(f"the log can't be written: {error.strerror}", path=log) from error


def _note(lines: IO[str] | None, result: Result) -> None:
    if lines is not None:
        lines.write(json.dumps(result.to_json()) + "\n")
        lines.flush()


class _Shown:
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
