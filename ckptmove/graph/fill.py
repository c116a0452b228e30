"""Load the bytes that a graph refers to into memory."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..pickles.nodes import Blob, are_plain
from ..pickles.opcodes.mixed_rows import parts_of
from ..pickles.opcodes.plain_tensors import compact_form
from ..sources.source import MAX_NBYTES
from .draft import CheckpointGraph, StorageBytes
from .traversal import held_by, nodes_of


def fill(draft: CheckpointGraph) -> None:
    """Read the bytes in the tree of a draft that were skipped; UnsupportedError if too many."""
    if not draft.blobs:
        return
    room = MAX_NBYTES
    for held in blobs_of(draft):
        if held.content is None:
            window = draft.blobs[id(held)]
            room -= window.nbytes
            if room < 0:
                raise UnsupportedError(
                    f"it holds more than {MAX_NBYTES:,} bytes apart from its tensors"
                )
            held.content = window.read(0, window.nbytes)


def stored_blob(draft: CheckpointGraph, blob: Blob) -> StorageBytes:
    """Return the origin of a blob's bytes, as a storage."""
    if blob.content is not None:
        return StorageBytes("bytes", "cpu", "uint8", blob.nbytes, content=blob.content)
    window = draft.blobs[id(blob)]
    if window.start is None:
        return StorageBytes(
            "bytes", "cpu", "uint8", blob.nbytes, content=window.read(0, blob.nbytes)
        )
    source = draft.number_of(window)
    return StorageBytes("bytes", "cpu", "uint8", blob.nbytes, source, window.start)


def blobs_of(draft: CheckpointGraph) -> list[Blob]:
    """Return the long bytes in the tree of a draft, each once."""
    root = draft.graph.root
    found = {id(root): root} if isinstance(root, Blob) else {}
    for node in nodes_of(root, compact=False):
        if compact_form(node) is not None:
            continue
        inside = parts_of(held_by(node))
        blobs = [] if are_plain(inside) else [each for each in inside if isinstance(each, Blob)]
        found.update((id(each), each) for each in blobs)
    return list(found.values())
