"""The command `ckptmove diff`."""

from __future__ import annotations

import click

from ..api.diff import diff as diff_checkpoints
from ..errors import UsageError
from ..reports.diff import differences
from ..reports.text import printable
from ..sources import masked
from .options import (
    Command,
    emit,
    emit_json,
    follow_links_option,
    needs_source,
    option,
    output_options,
    progress_bar,
    strict_option,
)


@click.command(cls=Command)
@click.argument("a", type=click.Path(), required=False)
@click.argument("b", type=click.Path(), required=False)
@option(
    "--select",
    group="Comparison",
    multiple=True,
    metavar="GLOB",
    help="Compare only entries whose name matches GLOB, and everything below them. Repeatable.",
)
@option(
    "--atol",
    group="Comparison",
    type=float,
    default=0.0,
    show_default=True,
    metavar="X",
    help="Accept floating-point values that differ by at most X.",
)
@option(
    "--rtol",
    group="Comparison",
    type=float,
    default=0.0,
    show_default=True,
    metavar="X",
    help="Accept floating-point values that differ by at most X times the value in A.",
)
@option("--ignore-devices", group="Comparison", is_flag=True, help="Accept other devices.")
@option(
    "--ignore-code",
    group="Comparison",
    is_flag=True,
    help="Accept other code and classes of programs, and what cannot be compared.",
)
@option(
    "--cast",
    group="Comparison",
    is_flag=True,
    help="Cast floating-point tensors of A to the dtype of B, then compare.",
)
@strict_option
@follow_links_option
@output_options
def diff(
    a: str | None,
    b: str | None,
    select: tuple[str, ...],
    atol: float,
    rtol: float,
    ignore_devices: bool,
    ignore_code: bool,
    cast: bool,
    strict: bool,
    follow_links: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    no_progress: bool,
) -> None:
    """Show what differs between two checkpoints of any formats; exit 1 if they differ.

    Nothing in the files is executed. Numbers are compared bit by bit. Tensors are compared by their
    elements, everything else by its content. A tensor with the same bytes under another name counts
    as renamed. Code and other files inside a checkpoint count too. If only one of the two formats
    can hold something, the result lists it as not compared, and the exit code is 1.

    \b
    ckptmove diff before.pt after.pt
    ckptmove diff run.pt run.safetensors
    ckptmove diff run.pt on-cpu.pt --ignore-devices
    ckptmove diff run.pt half.safetensors --select model --cast
    """
    first = needs_source(a)
    if b is None:
        raise UsageError("the second checkpoint is missing", hint="ckptmove diff A B")
    with progress_bar("diff", first, shown=not (quiet or no_progress)) as progress:
        found = diff_checkpoints(
            first,
            b,
            select=select,
            atol=atol,
            rtol=rtol,
            ignore_devices=ignore_devices,
            ignore_code=ignore_code,
            cast=cast,
            strict=strict,
            follow_links=follow_links,
            progress=progress,
        )
    if as_json:
        emit_json(found.to_json())
    elif not quiet:
        emit(differences(found, full=verbose))
    if not quiet:
        for message in found.warnings:
            click.echo(masked(printable(f"ckptmove: {message}")), err=True)
    found.raise_if_different()
