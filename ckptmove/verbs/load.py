"""load: the object that a checkpoint holds, in the process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import formats
from ..contents.tensors import Recogniser
from ..drafts.filling import fill
from ..drafts.shaping import prune
from ..errors import CorruptError, StrPath
from ..pickles.nodes import Persistent

if TYPE_CHECKING:
    import torch


def load(
    path: StrPath,
    map_location: Any = None,
    *,
    select: str | Iterable[str] = (),
    strict: bool = False,
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
        strict: raise where something would stay an `Opaque`.

    Raises:
        UsageError: `map_location` makes no sense.
        InputError: it can't be read, is refused, or is tagged with a device that is not there.
        RefusedError: a pattern speaks of nothing.
    """
    from ..runtime.build import built
    from ..runtime.restoring import Restoring
    from ..runtime.storages import Storages

    patterns = (select,) if isinstance(select, str) else tuple(select)
    restoring = Restoring(map_location)
    with formats.uncollected(), formats.opened(path) as found:
        draft = found.draft()
        if patterns:
            recogniser = Recogniser(draft.graph.ids)
            prune(draft.graph.root, recogniser, patterns, (), draft.sections)
        fill(draft)
        storages = Storages(draft.sources, restoring)

        def storage_of(node: Persistent) -> torch.UntypedStorage:
            said = draft.graph.ids.get(id(node))
            if said is None:
                raise CorruptError("it refers to something outside that is no storage")
            return storages.storage(draft.stored[said.id])

        with restoring.rebuilding():
            loaded = built(draft.graph.root, storage_of, strict=strict)
        for source in found.sources:
            source.check_unchanged()
        return loaded
