"""Implements `ckptmove.inspect`: show what a checkpoint holds, and on which devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

from .. import formats
from ..errors import StrPath
from ..reports.inspect import FileManifest
from .options import FollowLinks, Option, declare_options


@declare_options
@formats.uncollected()
def inspect(
    path: StrPath,
    *,
    select: Annotated[
        str | Iterable[str] | None,
        Option("Show only tensors whose name matches GLOB, or of the section GLOB.", "GLOB"),
    ] = None,
    require: Annotated[
        str | None,
        Option(
            "Fail with exit code 1 if a tensor is not on DEVICE; tensors that torch keeps on the "
            "CPU may stay there.",
            "DEVICE",
        ),
    ] = None,
    follow_links: FollowLinks = False,
) -> FileManifest:
    """List every tensor of a checkpoint; nothing is executed, and no tensor is read.

    An interrupted change in place is undone first; the manifest then has a warning.

    Args:
        path: the checkpoint: a file, an index of several files, or a model folder.

    Returns:
        The manifest of the checkpoint, which `print` and notebooks show. Sizes are in bytes.

    Raises:
        InputError: the file cannot be read, is not a checkpoint, or is damaged; or an interrupted
            change in place cannot be undone.
        CheckFailed: a tensor is not on the required device.
    """
    with formats.opened(path, follow_links=follow_links) as found:
        manifest = found.manifest
        found.check_unchanged()
        manifest = replace(manifest, fetched=found.fetched)
    if select is not None:
        manifest = manifest.select(select)
    if require is not None:
        manifest.require(require)
    return FileManifest.of(manifest)
