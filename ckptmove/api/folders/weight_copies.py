"""Compare weights that a folder holds in several forms; only one form is converted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ... import formats
from ...display.phrases import join_names
from ...errors import CkptmoveError
from ...formats.checkpoint import Checkpoint
from ...formats.folders.sharded import unnamed_shards
from ...formats.folders.training_folder import FolderCheckpoint
from ...formats.folders.weight_names import INDEX, NOT_COMPARED, shard_name
from ...formats.safetensors.header import LONGEST
from ...manifest.manifest import Manifest, TensorEntry
from ...reports.convert import Loss
from ...reports.difference import Kind
from ...sources import place_of
from ..diff import diff

#: The most differing tensors that a message names.
MOST_NAMED = 5
#: Kinds of differences between tensors; differences of dicts and other values are ignored.
_OF_TENSORS = (Kind.CHANGED, Kind.RESHAPED, Kind.RETYPED, Kind.NOT_COMPARED, Kind.RENAMED)
_OF_ONE = (Kind.ADDED, Kind.REMOVED)

#: The name of the file or index that is used, and the names of files that should hold the same.
Copies = tuple[str, Sequence[str]]


def differing_tensors(
    folder: str, first: str, second: str, *, follow_links: bool
) -> tuple[list[str], int]:
    """Return the tensors that differ between two files, and how many were compared byte for byte.

    A tensor with a second name in the same file (tied weights) may be missing in the other file,
    because safetensors stores only one of the names. Raises as `diff`.
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
    """Return the notes that are still true after the comparison."""
    return tuple(each for each in notes if not each.endswith(NOT_COMPARED))


def copies_in(found: Checkpoint) -> list[Copies]:
    """Return the weights that the checkpoint's folder holds in several forms."""
    if isinstance(found, FolderCheckpoint):
        return [(each.copy_of, [each.name]) for each in found.parts if each.copy_of is not None]
    if found.folder is None or not found.folder.copies:
        return []
    return [(used_name(found, found.folder.path), found.folder.copies)]


def used_name(weights: Checkpoint, folder: str) -> str:
    """Return the name of the file or index that the weights were read from."""
    start = f"{folder.rstrip('/')}/"
    names = sorted(each.path.removeprefix(start) for each in weights.sources)
    return next((each for each in names if each.endswith(INDEX)), names[0])


def losses_of_copies(
    folder: str, copies: Sequence[Copies], *, follow_links: bool
) -> Iterator[Loss]:
    """Yield a loss for each copy that differs from the weights that are used, or may differ."""
    for first, others in copies:
        stray = unnamed_shards((first, *others), lambda name: _content(folder, name))
        for other in others:
            shard = shard_name(other)
            if shard is not None:
                if other in stray or {first, *others}.isdisjoint(shard.indexes):
                    yield Loss(other, f"was not compared with {first}: no index names it")
                continue  # otherwise, the index that names it is compared
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
