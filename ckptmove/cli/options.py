"""What the commands share: options, output, progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import click

from ..errors import StrPath
from ..render.text import printable
from ..stores import masked, nbytes_of
from ..verifier import Progress

Function = TypeVar("Function", bound=Callable[..., Any])

source_argument = click.argument("src", type=click.Path(), required=False)
strict_option = click.option(
    "--strict", is_flag=True, help="Refuse files that name unknown callables."
)


follow_links_option = click.option(
    "--follow-links",
    is_flag=True,
    help="Follow links that lead out of a folder of a model, or of an index.",
)


def with_options(command: Function, *options: Callable[[Function], Function]) -> Function:
    """The command with these options, in this order in its help."""
    for option in reversed(options):
        command = option(command)
    return command


def output_options(command: Function) -> Function:
    """`--json`, `-q`, `-v`, `--no-progress`: the same for every command."""
    return with_options(
        command,
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
        click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
        click.option("-v", "--verbose", is_flag=True, help="Shorten nothing; trace bugs."),
        click.option("--no-progress", is_flag=True, help="Show no progress bar."),
    )


def needs_source(src: str | None) -> str:
    """The source, or the command's help and a usage error where it is missing."""
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
    """Say on stderr what the user should know about a file."""
    for message in messages:
        click.echo(masked(printable(f"ckptmove: {os.fspath(path)}: {message}")), err=True)


@contextlib.contextmanager
def progress_bar(label: str, src: str, *, shown: bool) -> Iterator[Progress | None]:
    """A bar of bytes on stderr, if that is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm  # only here: it takes a while to import

    total = nbytes_of(src)
    with tqdm(
        total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1000, leave=False
    ) as bar:
        yield bar.update
