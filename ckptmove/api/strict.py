"""Refuse files that name callables not known to be harmless (option `strict`)."""

from __future__ import annotations

from .. import formats
from ..errors import StrPath, UntrustedError
from ..manifest.manifest import Manifest
from ..phrases import few
from ..sources import open_source


def refuse_unknown(manifest: Manifest, *, otherwise: str) -> None:
    """Do nothing if all the callables that a checkpoint names are known to be harmless.

    Args:
        manifest: of the checkpoint, in however many files it lies.
        otherwise: what happens to it without `strict`.

    Raises:
        UntrustedError: some are not.
    """
    if manifest.unknown_callables:
        inert = manifest.format.startswith("safetensors")
        raise UntrustedError(
            f"names unknown callables: {few(manifest.unknown_callables)}",
            path=manifest.path,
            hint=f"{'a pickle made of' if inert else 'loading'} it would run them; {otherwise}",
        )


def refuse_unknown_in(path: StrPath, *, otherwise: str) -> None:
    """The same of a file that is copied as it is, if it is a checkpoint, or any pickle.

    Raises:
        UntrustedError: it names unknown callables.
        InputError: it looks like a checkpoint, but can't be read, so nobody knows.
    """
    with open_source(path) as source:
        if formats.looks_like(source) is not None:
            refuse_unknown(formats.read(source).manifest, otherwise=otherwise)
