"""The command `ckptmove inspect`."""

from __future__ import annotations

import click

from ..api.inspect import inspect as inspect_checkpoint
from ..device import parse
from ..errors import UsageError
from ..reports import inspect as render
from .options import (
    Command,
    emit,
    emit_json,
    follow_links_option,
    needs_source,
    option,
    output_options,
    source_argument,
    warn,
)


@click.command(cls=Command)
@source_argument
@option("--tensors", is_flag=True, help="List every tensor.")
@option("--tree", is_flag=True, help="Show the saved object as a tree.")
@option(
    "--select",
    multiple=True,
    metavar="GLOB",
    help="Show only tensors whose name matches GLOB. Repeatable.",
)
@option(
    "--require",
    metavar="DEVICE",
    help="Exit 1 if a tensor is not on DEVICE; tensors that torch keeps on the CPU may stay there.",
)
@follow_links_option
@output_options
def inspect(
    src: str | None,
    tensors: bool,
    tree: bool,
    select: tuple[str, ...],
    require: str | None,
    follow_links: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    no_progress: bool,
) -> None:
    """Show what a checkpoint holds, and on which devices.

    Nothing in the file is executed, and no tensor is read.

    \b
    ckptmove inspect run.pt
    ckptmove inspect run.pt --select 'optimizer.*' --tensors
    ckptmove inspect run.pt --require cuda:0 --quiet && deploy run.pt
    """
    path = needs_source(src)
    if sum((tensors, tree, as_json)) > 1:
        raise UsageError("--tensors, --tree and --json cannot be used together")
    device = None if require is None else parse(require)
    whole = inspect_checkpoint(path, follow_links=follow_links)
    manifest = whole.select(select) if select else whole
    if as_json:
        emit_json(manifest.to_json())
    elif not quiet:
        if tree:
            emit(render.tree(whole, select))
        elif tensors:
            emit(render.tensors(manifest))
        else:
            emit(render.summary(manifest, full=verbose))
    if not quiet:
        warn(path, manifest.warnings)
        if select and not manifest.tensors:
            warn(path, ["no tensor has a name that matches --select"])
    if device is not None:
        manifest.require(device)
