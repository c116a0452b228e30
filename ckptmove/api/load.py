"""load: the object that a checkpoint holds, in the process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import formats
from ..errors import StrPath
from ..formats.loading import object_in
from .strict import refuse_unknown

_WITHOUT_STRICT = "without strict what they would make stays an Opaque, and load() runs nothing"


def load(
    path: StrPath,
    map_location: Any = None,
    *,
    select: str | Iterable[str] = (),
    weights: str | None = None,
    strict: bool = False,
    follow_links: bool = False,
) -> Any:
    """The object that a checkpoint of any format holds, of which nothing is ever executed.

    Dicts, lists, numbers and tensors come back as they were, tensors of shared storages sharing
    them; what else is known to be plain data too. All other objects stay inert: an `Opaque` each,
    which tells what would have been called. Of a program (TorchScript, `torch.export`) this is a
    dict of its tensors. Tensors are mapped where the file allows: they cost no memory until they
    are used, and writing to them never changes the file.

    Args:
        path: the checkpoint.
        map_location: as `torch.load` takes it.
        select: patterns on names, as `convert` takes them; only what they speak of is loaded.
        weights: `model` for the state dict of one model alone, `ema` for its averages (EMA, SWA)
            under the names that the model has for them.
        strict: raise where something would stay an `Opaque`; and refuse a checkpoint that names
            callables that are not known to be harmless, be it outside of what is loaded, so that
            what passes here passes `strict` anywhere.
        follow_links: follow links also where they lead out of a folder of a model.

    Raises:
        UsageError: `map_location` or `weights` makes no sense.
        UntrustedError: it names unknown callables, and `strict` was asked for.
        DeviceError: it is tagged with, or mapped to, a device that is not there.
        InputError: it can't be read, or is refused.
        RefusedError: a pattern speaks of nothing; there are no such weights, or of several models.
    """
    from ..runtime.restoring import Restoring

    patterns = (select,) if isinstance(select, str) else tuple(select)
    restoring = Restoring(map_location)
    with formats.uncollected(), formats.opened(path, follow_links=follow_links) as found:
        if strict:
            refuse_unknown(found.manifest, otherwise=_WITHOUT_STRICT)
        return object_in(found, restoring, select=patterns, weights=weights, strict=strict)
