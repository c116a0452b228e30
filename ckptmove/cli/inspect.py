"""ckptmove inspect"""

from __future__ import annotations

import click

from ..device import parse
from ..errors import UsageError
from ..render import inspect as render
from ..verbs.inspect import inspect as inspect_checkpoint
from .options import (
    emit,
    emit_json,
    follow_links_option,
    needs_source,
    output_options,
    source_argument,
    warn,
)


@click.command()
@source_argument
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--tree", is_flag=True, help="Show the saved object as a tree.")
@click.option("--select", multiple=True, metavar="GLOB", help="Only names that match; repeatable.")
@click.option(
    "--require",
    metavar="DEVICE",
    help="Exit 1 unless everything is on DEVICE, or where torch keeps it for DEVICE.",
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
    """Show what is in a checkpoint, and on which device.

    Nothing in the file is executed and no tensor is read.

    \b
    ckptmove inspect run.pt
    ckptmove inspect run.pt --select 'optimizer.*' --tensors
    ckptmove inspect run.pt --require cuda:0 --quiet && deploy run.pt
    """
    path = needs_source(src)
    if sum((tensors, tree, as_json)) > 1:
        raise UsageError("--tensors, --tree and --json exclude each other")
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
            warn(path, ["no tensor's name matches the selection"])
    if device is not None:
        manifest.require(device)
