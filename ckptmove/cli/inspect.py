"""The command `ckptmove inspect`."""

from __future__ import annotations

from ..api.inspect import inspect as inspect_checkpoint
from ..api.inspect import with_whole_folder
from ..errors import UsageError
from ..manifest.device import parse
from ..manifest.manifest import Manifest
from ..reports.folder_files import chunks as chunks_of
from ..reports.inspect import tensors as tensors_of
from ..reports.tree import tree as tree_of
from .declare import option
from .display.output import OutputOptions, html_option, needs_source, source_argument, verb_command


@verb_command(
    inspect_checkpoint,
    source_argument,
    option("--tensors", group="What to show", is_flag=True, help="List every tensor."),
    option("--tree", group="What to show", is_flag=True, help="Show the saved object as a tree."),
    html_option,
)
def inspect(
    src: str | None,
    tensors: bool,
    tree: bool,
    select: tuple[str, ...],
    require: str | None,
    chunks: bool,
    follow_links: bool,
    strict: bool,
    output: OutputOptions,
) -> None:
    """Show what a checkpoint holds, and on which devices.

    Nothing in the file is executed, and no tensor is read.

    \b
    ckptmove inspect run.pt
    ckptmove inspect run.pt --select 'optimizer.*' --tensors
    ckptmove inspect run.pt --require cuda:0 --quiet && deploy run.pt
    """
    path = needs_source(src)
    if sum((tensors, tree, output.as_json)) > 1:
        raise UsageError("--tensors, --tree and --json cannot be used together")
    if chunks and (tensors or tree):
        raise UsageError("--chunks cannot be used with --tensors or --tree")
    device = None if require is None else parse(require)
    whole = inspect_checkpoint(path, chunks=chunks, follow_links=follow_links, strict=strict)
    manifest = whole.select(select) if select else whole
    if (tree or tensors) and not output.quiet:
        output.emit(tree_of(whole, select) if tree else tensors_of(manifest))
        output.write_page(manifest, path)
        output.warn(path, manifest.remarks())
    elif chunks and not (output.quiet or output.as_json):
        output.emit(chunks_of(manifest))
        output.write_page(manifest, path)
        output.warn(path, manifest.remarks())
    else:
        output.show(manifest, path)
    if select and not manifest.tensors:
        output.warn(path, ["no tensor has a name or a section that matches --select"])
    if device is not None:
        required: Manifest = manifest
        if not select:
            required = with_whole_folder(path, manifest, follow_links=follow_links)
        required.require(device)
