"""save: write an object of this process as a checkpoint of any format."""

from __future__ import annotations

from collections.abc import Mapping

from ..contents.pids import storage_ids, storages_of
from ..drafts.canonical import canonical
from ..drafts.draft import Draft, Stored
from ..errors import RefusedError, StrPath
from ..in_place import settle
from ..pickles.walk import walk
from ..verifier import Progress
from .target import Target, nbytes_of_text, target_of


def save(
    obj: object,
    path: StrPath,
    *,
    format: str | None = None,
    shared: str = "keep",
    bare: bool = False,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write an object as a checkpoint that appears whole and verified, or not at all.

    It is pickled as torch.save does it, but for its tensors, whose bytes go from where they are to
    the file; nothing else must write to them meanwhile.

    Args:
        obj: what to save; anything that torch.save takes.
        path: the file or folder, as `convert` takes it.
        format, shared, bare, metadata, max_shard_size, force, progress: as `convert` has them.

    Raises:
        UsageError: the options make no sense.
        UnsupportedError: the object can't be pickled, or has no form in that format.
        RefusedError: the destination exists, something would be lost, or bytes are shared and
            must not be.
        WriteError: writing or verifying failed.
    """
    limit = None if max_shard_size is None else nbytes_of_text(max_shard_size)
    target = target_of(path, format, sharded=limit is not None)
    manner = target.manner(shared, metadata, bare=bare, max_shard_nbytes=limit)
    if not target.is_folder:
        settle(target.path)
    draft = _drafted(obj, target)
    for loss in target.format.losses(draft, manner):
        raise RefusedError(f"would lose {loss.name}, which {loss.why}", path=target.path)
    target.write(target.format.plan_write(draft, manner), [], force=force, progress=progress)


def _drafted(obj: object, target: Target) -> Draft:
    """What an object holds, with its storages in memory."""
    from ..runtime.pickling import pickled

    made = pickled(obj)
    found = walk(made.data)
    ids = storage_ids(found.persistents, "")
    storages = storages_of(ids.values(), lambda storage: None)
    graph = canonical(found.root, ids, {}, storages)
    return Draft(
        path=target.path,
        format="object",
        graph=graph,
        stored={
            key: Stored(
                key,
                storages[key].location,
                storages[key].dtype,
                storages[key].nbytes,
                content=made.storages[key],
            )
            for key in graph.storages
        },
        sources=[],
    )
