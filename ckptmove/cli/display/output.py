"""Show results, warnings and progress in the same way for all commands."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ...api.options import options_of
from ...display.blocks import Block, text_of
from ...display.report import Report
from ...display.text import cut_words, printable
from ...sources import mask_secrets, place_of
from ..declare import Command, Decorator, Function, option, verb_options, with_options, with_values
from .terminal import byte_bar, terminal_of

if TYPE_CHECKING:
    from ...writing.verify import Progress

_LONGEST_WORD = 200  # bytes of a path or name in a warning


class OutputOptions(NamedTuple):
    """The output options that all commands have."""

    as_json: bool
    quiet: bool
    verbose: bool
    no_progress: bool
    html: str | None = None

    def show(self, report: Report, path: str | None = None) -> None:
        """Print a report to stdout and its remarks to stderr; these name the file, if given."""
        self.write_page(report, path)
        if self.as_json:
            emit_json(report.to_json())
        elif not self.quiet:
            self.emit(report.blocks(full=self.verbose))
        self.warn(path, report.remarks())

    def emit(self, blocks: Iterable[Block]) -> None:
        """Print lines and tables, fitted to the width of the terminal."""
        emit(text_of(blocks, terminal_of(sys.stdout, full=self.verbose)))

    def write_page(self, report: Report, path: str | None = None) -> None:
        """Write a report as an HTML file, if the user asked for one."""
        if self.html is not None:
            from .pages import write_page

            write_page(self.html, report.to_html(None if path is None else mask_secrets(path)))

    def warn(self, path: str | None, messages: Iterable[str]) -> None:
        """Print warnings to stderr, with the name of a file if given; long words are cut."""
        about = "" if path is None else f"{path}: "
        for message in () if self.quiet else messages:
            line = mask_secrets(printable(f"ckptmove: {about}{message}"))
            click.echo(line if self.verbose else cut_words(line, _LONGEST_WORD), err=True)

    @contextlib.contextmanager
    def progress_bar(
        self, label: str, src: str, *, shown: bool = True
    ) -> Iterator[Progress | None]:
        """Show a progress bar of bytes on stderr, if that is a terminal."""
        if not shown or self.quiet or self.no_progress or not sys.stderr.isatty():
            yield None
            return
        with byte_bar(place_of(src).nbytes(), label) as bar:
            yield bar.update


def output_options(command: Function) -> Function:
    """Add `--json`, `-q`, `-v` and `--no-progress`, which the command gets as `output`."""

    @functools.wraps(command)
    def called(
        *,
        as_json: bool,
        quiet: bool,
        verbose: bool,
        no_progress: bool,
        html: str | None = None,
        **values: Any,
    ) -> Any:
        if html is not None:
            from .pages import check_page  # here and above: few calls write a page

            check_page(html)
        return command(output=OutputOptions(as_json, quiet, verbose, no_progress, html), **values)

    return with_options(
        called,
        option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
        option("-q", "--quiet", is_flag=True, help="Print errors only."),
        option(
            "-v",
            "--verbose",
            is_flag=True,
            help="Shorten nothing; print a traceback for bugs in ckptmove.",
        ),
        option("--no-progress", is_flag=True, help="Do not show a progress bar."),
    )


def verb_command(verb: Function, *arguments: Decorator) -> Callable[[Function], click.Command]:
    """Make a command with these arguments, the options of a verb, and the output options."""
    options = options_of(verb)
    added = *arguments, verb_options(options), with_values(options), output_options
    return lambda command: click.command(cls=Command)(with_options(command, *added))


#: For commands that can write their report as a page; `output_options` takes its value.
html_option = option(
    "--html",
    metavar="FILE",
    help="Also write the result as one HTML file that needs no network. It replaces an "
    "older report, but no other file.",
)
source_argument = click.argument("src", type=click.Path(), required=False)
destination_argument = click.argument("dst", type=click.Path(), required=False)


def needs_source(src: str | None) -> str:
    """Return the source. Without one, print the help and exit with code 2."""
    if src is None:
        context = click.get_current_context()
        click.echo(context.get_help())
        context.exit(2)
    return src


def emit(lines: Iterable[str]) -> None:
    """Print a result."""
    for line in lines:
        click.echo(mask_secrets(line), color=True)  # use colors only where the terminal shows them


def emit_json(value: object) -> None:
    """Print a result for programs."""
    from ...display.json_text import json_text

    emit([json_text(value)])
