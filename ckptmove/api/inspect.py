"""inspect: what is in a checkpoint, and where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .. import formats
from ..errors import StrPath
from ..reports.manifests import FileManifest


@formats.uncollected()
def inspect(
    path: StrPath,
    *,
    select: str | Iterable[str] | None = None,
    require: str | None = None,
    follow_links: bool = False,
) -> FileManifest:
    """List every tensor of a checkpoint without unpickling it or reading a tensor.

    A change in place that was interrupted is undone first; the manifest has a warning then.

    Args:
        path: the checkpoint: a file, an index of several, or a folder that holds it.
        select: globs on names; the manifest is cut down to what matches.
        require: a device on which everything must be, or where torch keeps it for that device.
        follow_links: follow links also where they lead out of a folder of a model.

    Returns:
        Its manifest, which `print` and notebooks show. Sizes are bytes.

    Raises:
        InputError: the file can't be read, is no checkpoint, or is damaged; or an interrupted
            change in place can't be undone.
        CheckFailed: something is not on the required device.
    """
    with formats.opened(path, follow_links=follow_links) as found:
        manifest = found.manifest
        for source in found.sources:
            source.check_unchanged()
        manifest = replace(manifest, fetched=found.fetched)
    if select is not None:
        manifest = manifest.select(select)
    if require is not None:
        manifest.require(require)
    return FileManifest.of(manifest)
