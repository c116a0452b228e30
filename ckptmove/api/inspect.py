"""Implements `ckptmove.inspect`: show what a checkpoint holds, and on which devices."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

from .. import formats
from ..errors import StrPath, UnsupportedError
from ..manifest.manifest import Manifest
from ..reports.inspect import FileManifest
from ..sources import place_of
from .options import FollowLinks, Option, Strict, declare_options
from .strict import refuse_unknown

#: The words of `refuse_unknown` for this verb.
WITHOUT_STRICT = "without --strict it is listed all the same"


@declare_options
@formats.pause_collection()
def inspect(
    path: StrPath,
    *,
    select: Annotated[
        str | Iterable[str] | None,
        Option(
            "Show only tensors whose name matches GLOB, or of the section GLOB.",
            "GLOB",
            "What to show",
        ),
    ] = None,
    require: Annotated[
        str | None,
        Option(
            "Fail with exit code 1 if a tensor is not on DEVICE. Tensors that torch keeps on the "
            "CPU may stay there; those of safetensors and DCP store no device, and never fail.",
            "DEVICE",
        ),
    ] = None,
    chunks: Annotated[
        bool, Option("List the chunks of a distributed checkpoint: where, and in which file.")
    ] = False,
    follow_links: FollowLinks = False,
    strict: Strict = False,
) -> FileManifest:
    """List every tensor of a checkpoint; nothing is executed, and no tensor is read.

    An interrupted change in place is undone first; the manifest then has a warning.

    Args:
        path: the checkpoint: a file, an index of several files, or a model folder.

    Returns:
        The manifest of the checkpoint, which `print` and notebooks show. Sizes are in bytes.

    Raises:
        InputError: the file cannot be read, is not a checkpoint, or is damaged; or an interrupted
            change in place cannot be undone. `UntrustedError`: it names unknown callables, and
            `strict` is set.
        CheckFailed: a tensor is not on the required device.
    """
    with formats.open_checkpoint(path, follow_links=follow_links) as found:
        manifest = found.manifest
        found.check_unchanged()
        parts = tuple(found.container.chunks(manifest.tensors)) if chunks else ()
        manifest = replace(manifest, fetched=found.fetch_stats, chunks=parts)
        folder = None
        if found.folder is not None and not found.folder.is_all:
            folder = place_of(found.files[0].path).parent
    whole = manifest
    if folder is not None:
        try:
            whole = with_whole_folder(folder.path, manifest, follow_links=follow_links)
        except UnsupportedError as error:
            if require is not None or strict:
                raise
            where = place_of(error.path or path).name
            why = f"the other files in it were not looked at: {where}: {error}"
            manifest = replace(manifest, warnings=(*manifest.warnings, why))
    if sum(bool(each.format or each.not_read) for each in whole.files) > 1:
        manifest = whole
    if strict:
        refuse_unknown(whole, otherwise=WITHOUT_STRICT)
    if select is not None:
        manifest = manifest.select(select)
    if require is not None:
        (manifest if select is not None else whole).require(require)
    return FileManifest.of(manifest)


def with_whole_folder(path: StrPath, manifest: Manifest, *, follow_links: bool) -> Manifest:
    """Return the manifest; for weights in a folder, the manifest of the whole folder."""
    place = place_of(path)
    if manifest.files or manifest.path == place.path or not place.is_folder():
        return manifest
    with formats.open_whole_folder(path, follow_links=follow_links) as found:
        return found.manifest
