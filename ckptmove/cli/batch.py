"""ckptmove batch"""

from __future__ import annotations

import contextlib
import errno
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
from ..render.batch import Again, batch_line, batch_plan, batch_summary
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
        ctx.meta[_WORDS] = tuple(args)
        return super().parse_args(ctx, args)


def _again(log: str | None) -> Again:
    """How this command was asked for."""
    context = click.get_current_context()
    words: tuple[str, ...] = context.meta[_WORDS]
    valued = {
        name
        for option in context.command.params
        if isinstance(option, click.Option) and not option.is_flag
        for name in option.opts
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
    return Again(verb, words, narrowed, log if is_file else None)


def _batch_options(command: Function) -> Function:
    """What is the same for every verb."""
    return with_options(
        command,
        click.argument("src", type=click.Path(), required=False),
        click.argument("dst", type=click.Path(), required=False),
        click.option(
            "--include",
            multiple=True,
            metavar="GLOB",
            help="Only items so called; with a leading /, by the whole name. Repeatable.",
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
            "--ray",
            metavar="ADDRESS",
            help="Have a Ray cluster do it; auto is the one that this machine belongs to.",
        ),
        click.option(
            "--shard-of", metavar="I/N", help="Only the I-th of N shares of the tree, from 1."
        ),
        click.option(
            "--verify",
            is_flag=True,
            help="Read again the outputs that are done, to see they hold.",
        ),
        click.option("--log", metavar="FILE", help="Add a line of JSON for each item to FILE."),
        click.option("--retry", metavar="FILE", help="Only what was not done, by such a log."),
        click.option(
            "--dry-run",
            is_flag=True,
            help="Print the plan, do nothing; each item is checked when it is done.",
        ),
    )


_copy_others = click.option("--copy-others", is_flag=True, help="Copy also what is no checkpoint.")


@click.group()
def batch() -> None:
    """Relocate, convert or validate all checkpoints of a tree.

    They are found by content, whatever they are called. A folder of a model, or an index with its
    files, is converted and validated as one. All is planned first; what fails stops no other, and
    is told at the end. What was killed, or broken off by Ctrl-C, goes on where it was if the same
    command is run again; two at once share the work. Links to files are followed, links to folders
    are not.

    A GLOB is matched with names in the tree, such as runs/1/last.ckpt: * also stands for slashes,
    and a GLOB without any may match the last part alone. /last.ckpt is only the one at the top.

    \b
    ckptmove batch convert runs/ out/ --format safetensors
    ckptmove batch relocate runs/ out/ --to cpu --include '*/last.ckpt'
    ckptmove batch relocate runs/ --to cpu --in-place
    ckptmove batch validate out/ --against runs/
    ckptmove batch convert runs/ out/ --ray auto
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
@click.option("--force", is_flag=True, help="Replace reports that others wrote.")
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
        for name in (
            *("include", "exclude", "jobs", "ray", "shard_of", "retry", "verify"),
            "copy_others",
        )
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
    with _Log(log) as lines:
        try:
            with shown.over(work):
                for result in work:
                    warned += bool(result.warnings)
                    lines.add(result)
                    if verbose and not as_json:
                        _tell(result)
        except (KeyboardInterrupt, Signalled) as error:
            broken = error
        finally:
            work.close()
    report = work.report()
    if not quiet:
        warn(src, report.notes[len(work.plan.notes) :])
    if as_json:
        emit_json(report.to_json())
    elif not quiet:
        again = _again(log if lines.error is None else None)
        emit(batch_summary(report, again, warned, told=verbose))
    if broken is not None:
        raise broken
    if lines.error is not None:
        raise lines.error
    if report.failures:
        raise CheckFailed(_negative(len(report.failures), sum(report.outcomes.values())), path=src)


def _negative(failed: int, items: int) -> str:
    return f"{failed:,} of {items:,} items failed or were refused"


def _tell(result: Result) -> None:
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
            with contextlib.suppress(OSError):  # what is left in it was told
                file.close()

    def _failed(self, error: OSError) -> WriteError:
        return WriteError(f"the log can't be written: {error.strerror}", path=self._path)


def _is_torn(path: Path) -> bool:
    """Whether the last line of a log doesn't end.

    Raises:
        OSError: it is no log, and nothing is to be added to it.
    """
    if path.is_fifo():
        raise OSError(errno.EINVAL, "it is no file")
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        if file.read(1) != b"{":
            raise OSError(errno.EINVAL, "it is no log of a batch")
        file.seek(-1, 2)
        return file.read(1) != b"\n"


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
