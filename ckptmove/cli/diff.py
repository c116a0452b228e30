"""ckptmove diff"""

from __future__ import annotations

import click

from ..errors import UsageError
from ..render.diff import differences
from ..render.text import printable
from ..stores import masked
from ..verbs.diff import diff as diff_checkpoints
from .options import (
    emit,
    emit_json,
    follow_links_option,
    needs_source,
    output_options,
    progress_bar,
    strict_option,
)


@click.command()
@click.argument("a", type=click.Path(), required=False)
@click.argument("b", type=click.Path(), required=False)
@click.option(
    "--select", multiple=True, metavar="GLOB", help="Only what is so called, and below. Repeatable."
)
@click.option("--atol", type=float, default=0.0, metavar="X", help="How far floats may be apart.")
@click.option("--rtol", type=float, default=0.0, metavar="X", help="The same, relative to A.")
@click.option("--ignore-devices", is_flag=True, help="Let pass that they name other devices.")
@click.option(
    "--ignore-code",
    is_flag=True,
    help="Ignore other code and classes of programs, and what cannot be compared.",
)
@click.option("--cast", is_flag=True, help="Compare floats of A as cast to the dtype of B.")
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
    """Say what is not the same in two checkpoints, of whatever formats; exit 1 if anything is.

    Nothing in the files is executed. Elements are compared by their bits, tensors by what they
    show, all else by what it is made of. A tensor with the same bytes and another name is renamed.
    Code and other files in a checkpoint count: what only one of two formats can hold is named as
    not compared, and the exit code is 1.

    \b
    ckptmove diff before.pt after.pt
    ckptmove diff run.pt run.safetensors
    ckptmove diff run.pt on-cpu.pt --ignore-devices
    ckptmove diff run.pt half.safetensors --select model --cast
    """
    first = needs_source(a)
    if b is None:
        raise UsageError("no second checkpoint is given", hint="ckptmove diff A B")
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
