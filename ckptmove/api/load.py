"""Implements `ckptmove.load`: build the object that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from .. import formats
from ..errors import StrPath
from ..formats.loading import object_in
from ..runtime.torch_import import why_no_torch
from .options import OF_WHICH_WEIGHTS, OF_ZERO, FollowLinks, Option, Weights, declare_options
from .strict import refuse_unknown_around

_WITHOUT_STRICT = "without strict what they would make stays an Opaque, and load() runs nothing"


@declare_options
def load(
    path: StrPath,
    map_location: Any = None,
    *,
    select: Annotated[
        str | Iterable[str],
        Option("Load only entries whose name matches GLOB, and everything below them.", "GLOB"),
    ] = (),
    weights: Annotated[
        Weights | None,
        Option(f"Load {OF_WHICH_WEIGHTS}"),
    ] = None,
    strict: Annotated[
        bool,
        Option(
            "Raise if an object would become an `Opaque`, or if the file names callables not known "
            "to be harmless anywhere, even outside of what is loaded."
        ),
    ] = False,
    follow_links: FollowLinks = False,
) -> Any:
    """Build the object that a checkpoint of any format holds; nothing in it is executed.

    Dicts, lists, numbers and tensors come back as they were saved, and so do other objects known to
    be plain data. Tensors that shared a storage share it again. Any other object becomes an inert
    `Opaque`, which records what would have been called. For a program (TorchScript,
    `torch.export`), the result is a dict of its tensors. Tensors are memory-mapped where the file
    allows it: they use no memory until they are read, and writing to them never changes the file.
    So their checksums are not checked; `validate` does that. Tensors that consist of several parts
    are read; if each part has a checksum (DCP, files of ranks), it must be right.

    Args:
        path: the checkpoint.
        map_location: as for `torch.load`.

    Returns:
        The object.

    Raises:
        ImportError: torch is not installed, or can't be imported.
        UsageError: `map_location` or `weights` makes no sense.
        UntrustedError: the file names unknown callables, and `strict` is set.
        DeviceError: a tensor is tagged with, or mapped to, a device that this machine does not
            have.
        InputError: the file cannot be read, or is refused; a checksum is wrong.
        RefusedError: a glob matches nothing; or `weights` is given, and the file holds no such
            weights, or those of several models.
    """
    no_torch = why_no_torch()
    if no_torch is not None:
        raise ImportError(no_torch, name="torch")
    from ..runtime.storages import Restoring

    patterns = (select,) if isinstance(select, str) else tuple(select)
    restoring = Restoring(map_location)
    of_zero = weights if weights in OF_ZERO else None
    asked = weights if of_zero is None else "model"
    opened = formats.open_checkpoint(path, follow_links=follow_links, weights=of_zero)
    with formats.pause_collection(), opened as found:
        if strict:
            refuse_unknown_around(path, found, otherwise=_WITHOUT_STRICT, follow_links=follow_links)
        return object_in(found, restoring, select=patterns, weights=asked, strict=strict)
