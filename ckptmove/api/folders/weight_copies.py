"""Compare weights that a folder has in several forms, of which only one is converted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ... import formats
from ...errors import CkptmoveError
from ...formats.checkpoint import Checkpoint
from ...formats.folders.sharded import unnamed_shards
from ...formats.folders.training_folder import FolderCheckpoint
from ...formats.folders.weight_names import INDEX, NOT_COMPARED, shard_name
from ...formats.safetensors.header import LONGEST
from ...manifest.manifest import Manifest, TensorEntry
from ...reports.convert import Loss
from ...reports.difference import Kind
from ...reports.display.phrases import join_names
from ...sources import place_of
from ..diff import diff

#: How many tensors that differ a sentence names.
MOST_NAMED = 5
#: In what the tensors of two files differ; how their dicts and other values do, counts as nothing.
_OF_TENSORS = (Kind.CHANGED, Kind.RESHAPED, Kind.RETYPED, Kind.NOT_COMPARED, Kind.RENAMED)
_OF_ONE = (Kind.ADDED, Kind.REMOVED)

#: A file or an index that is used, and files that should hold the same, by names in the folder.
Copies = tuple[str, Sequence[str]]


def differing_tensors(
    folder: str, first: str, second: str, *, follow_links: bool
) -> tuple[list[str], int]:
    """The tensors in which two files of a folder differ, and how many were compared byte for byte.

    Tensors that another name in the same file has as well, as of tied weights, may be in one file
    alone: safetensors holds but one of them. Raises as `diff`.
    """
    paths = [place_of(folder).child(each).path for each in (first, second)]
    result = diff(*paths, ignore_devices=True, follow_links=follow_links)
    differing = list[str]()
    aliases = dict[str, set[str]]()
    for each in result.differences:
        if each.kind in _OF_ONE:
            path = paths[each.kind is Kind.ADDED]
            if path not in aliases:
                with formats.open_checkpoint(path, follow_links=follow_links) as found:
                    aliases[path] = _aliases(found.manifest)
            if each.name in aliases[path]:
                continue
        elif each.kind not in _OF_TENSORS:
            continue
        differing.append(f"{each.name} ({each.kind})")
    return differing, result.tensors


def _aliases(manifest: Manifest) -> set[str]:
    named: dict[object, list[TensorEntry]] = {}
    for each in manifest.tensors:
        key = (each.storage, each.offset, each.shape, each.stride, each.dtype)
        named.setdefault(key, []).append(each)
    return {each.name for same in named.values() if len(same) > 1 for each in same}


def true_notes(notes: Sequence[str]) -> tuple[str, ...]:
    """Notes of a folder, without those that a comparison makes untrue."""
    return tuple(each for each in notes if not each.endswith(NOT_COMPARED))


def copies_in(found: Checkpoint) -> list[Copies]:
    """The weights that a checkpoint has in several forms, if it is in a folder."""
    if isinstance(found, FolderCheckpoint):
        return [(each.copy_of, [each.name]) for each in found.parts if each.copy_of is not None]
    if found.folder is None or not found.folder.copies:
        return []
    return [(used_name(found, found.folder.path), found.folder.copies)]


def used_name(weights: Checkpoint, folder: str) -> str:
    """What the file or the index is called in a folder that weights were read from."""
    start = f"{folder.rstrip('/')}/"
    names = sorted(each.path.removeprefix(start) for each in weights.sources)
    return next((each for each in names if each.endswith(INDEX)), names[0])


def losses_of_copies(
    folder: str, copies: Sequence[Copies], *, follow_links: bool
) -> Iterator[Loss]:
    """The files that do not hold the same as those that are used, or may not."""
    for first, others in copies:
        stray = unnamed_shards((first, *others), lambda name: _content(folder, name))
        for other in others:
            shard = shard_name(other)
            if shard is not None:
                if other in stray or {first, *others}.isdisjoint(shard.indexes):
                    yield Loss(other, f"was not compared with {first}: no index names it")
                continue  # else the index that names it is compared
            try:
                found, _ = differing_tensors(folder, first, other, follow_links=follow_links)
            except CkptmoveError as error:
                yield Loss(other, f"can't be compared with {first}: {error}")
                continue
            if found:
                names = join_names(found, MOST_NAMED)
                yield Loss(other, f"holds other tensors than {first}: {names}")


def _content(folder: str, name: str) -> bytes:
    with place_of(folder).child(name).open() as source:
        return source.read(0, min(source.nbytes, LONGEST + 1))
