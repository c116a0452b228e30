"""Options, help, output and progress bars that all commands share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import click

from ..errors import StrPath
from ..reports.text import printable
from ..sources import masked, place_of
from ..writing.verify import Progress

Function = TypeVar("Function", bound=Callable[..., Any])

GENERAL = "General"
_MOST_UNGROUPED = 10  # options that a help lists without groups


class Option(click.Option):
    """An option with a place in the help of its command.

    Attributes:
        group: the heading that it stands under where its command has many options.
        former: names that it had in earlier versions. They work, and the help does not show them.
    """

    def __init__(
        self, *args: Any, group: str = GENERAL, former: Sequence[str] = (), **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.group = group
        self.former = tuple(former)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Let the parser know the former names too."""
        shown = self.opts
        self.opts = [*shown, *self.former]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


class Command(click.Command):
    """A command whose help shows many options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of their groups."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if row is not None:
                groups.setdefault(getattr(param, "group", GENERAL), []).append(row)
        groups[GENERAL] = groups.pop(GENERAL)  # last
        if sum(map(len, groups.values())) <= _MOST_UNGROUPED:
            groups = {"Options": [row for rows in groups.values() for row in rows]}
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def option(*names: str, **settings: Any) -> Callable[[Function], Function]:
    """Like `click.option`, but makes an `Option`."""
    return click.option(*names, cls=Option, **settings)


source_argument = click.argument("src", type=click.Path(), required=False)
strict_option = option(
    "--strict",
    group="Safety",
    is_flag=True,
    help="Refuse files that name callables not known to be harmless.",
)
follow_links_option = option(
    "--follow-links",
    group="Safety",
    is_flag=True,
    help="Follow symbolic links that lead out of a model folder.",
)
dry_run_option = option(
    "--dry-run", group="Destination", is_flag=True, help="Show what would be done; write nothing."
)


def with_options(command: Function, *options: Callable[[Function], Function]) -> Function:
    """Add these options to a command, in this order in its help."""
    for each in reversed(options):
        command = each(command)
    return command


def output_options(command: Function) -> Function:
    """Add `--json`, `-q`, `-v` and `--no-progress`: the same for every command."""
    return with_options(
        command,
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
        click.echo(masked(line))


def emit_json(value: object) -> None:
    """Print a result for programs."""
    emit([json.dumps(value, indent=2)])


def warn(path: StrPath, messages: Iterable[str]) -> None:
    """Print warnings about a file to stderr."""
    for message in messages:
        click.echo(masked(printable(f"ckptmove: {os.fspath(path)}: {message}")), err=True)


@contextlib.contextmanager
def progress_bar(label: str, src: str, *, shown: bool) -> Iterator[Progress | None]:
    """Show a progress bar of bytes on stderr, if that is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm  # only here: it takes a while to import

    total = place_of(src).nbytes()
    with tqdm(
        total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1000, leave=False
    ) as bar:
        yield bar.update
