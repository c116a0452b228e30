"""Refuse files that name callables not known to be harmless (option `strict`)."""

from __future__ import annotations

from .. import formats
from ..display.phrases import few
from ..errors import StrPath, UntrustedError
from ..formats.checkpoint import Checkpoint
from ..manifest.manifest import Manifest
from ..sources import open_source


def refuse_unknown(manifest: Manifest, *, otherwise: str) -> None:
    """Raises UntrustedError for unknown callables; `otherwise` says what happens without strict."""
    if manifest.unknown_callables:
        inert = manifest.format.startswith("safetensors")
        raise UntrustedError(
            f"names unknown callables: {few(manifest.unknown_callables)}",
            path=manifest.path,
            hint=f"{'a pickle made of' if inert else 'loading'} it would run them; {otherwise}",
        )


def refuse_unknown_around(
    path: StrPath, found: Checkpoint, *, otherwise: str, follow_links: bool
) -> None:
    """Check the other files of a folder too, if only the weights in it were opened."""
    refuse_unknown(found.manifest, otherwise=otherwise)
    if found.folder is not None and not found.spans_folder:
        with formats.open_whole_folder(path, follow_links=follow_links) as folder:
            refuse_unknown(folder.manifest, otherwise=otherwise)


def refuse_unknown_in(path: StrPath, *, otherwise: str) -> None:
    """Check a copied file; raises InputError if it looks like a checkpoint but is damaged."""
    with open_source(path) as source:
        if formats.looks_like(source) is not None:
            refuse_unknown(formats.read(source).manifest, otherwise=otherwise)
