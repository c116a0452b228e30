"""Make a checkpoint from remains: a dict of tensors by name, with the storages they share."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from ...graph.canonical import Graph
from ...graph.draft import CheckpointGraph, StorageBytes
from ...manifest.manifest import Section
from ...pickles.nodes import Dict
from ...sources.source import Source
from ...zips.found_records import ProofLevel
from .remains import NamedTensor, Remains, StorageRemains, written_dtype
from .zero_fill import ZeroFilledSource


def room_for(tensor: NamedTensor, names: Container[str]) -> str:
    """Why a tensor can't be written beside tensors of these names; empty if it can."""
    if tensor.name in names:
        return "another tensor has the same name"
    try:
        tensor.name.encode("utf-8")
    except UnicodeEncodeError:
        return "its name is not valid text"
    return ""


def draft_of(
    remains: Remains, tensors: Sequence[NamedTensor], path: str, metadata: Mapping[str, str]
) -> CheckpointGraph:
    """The draft with these tensors; a storage that is cut short is filled with zeros.

    It is filled only as far as its tensors extend.
    """
    graph, root = Graph(None), Dict()
    sources: list[Source] = list(remains.files)
    reach: dict[str, int] = {}
    for each in tensors:
        assert each.storage is not None
        reach[each.storage] = max(reach.get(each.storage, 0), each.span()[1])
    stored = dict[str, StorageBytes]()
    for key, nbytes in reach.items():
        held = remains.storage_remains(key)
        assert held is not None
        stored[key] = _stored(key, held, nbytes, sources)
    for each in tensors:
        assert each.storage is not None
        made = stored[each.storage]
        node = graph.storage(made.id, made.dtype, made.nbytes, made.location)
        shown = each.written_dtype, each.shape, each.stride, each.offset
        tensor = graph.tensor(node, *shown, flags=each.flags)
        root.pairs.append((graph.text(each.name), tensor))
    graph.root = root
    return CheckpointGraph(
        path=path,
        format=remains.format,
        graph=graph,
        stored=stored,
        sources=sources,
        section=Section.MODEL,
        metadata=metadata,
        runs=frozenset(),
    )


def _stored(key: str, held: StorageRemains, reach: int, sources: list[Source]) -> StorageBytes:
    """The needed bytes of a storage; a filled source may be added to `sources`."""
    is_all = held.present >= held.nbytes
    nbytes = held.nbytes if is_all else min(held.nbytes, -(-reach // 16) * 16)
    stored = StorageBytes(
        id=key,
        location=held.location,
        dtype=None if held.dtype is None else written_dtype(held.dtype),
        nbytes=nbytes,
        source=held.source,
        start=held.start,
        crc32=held.crc32 if is_all and held.proof is ProofLevel.RIGHT else 0,
        content=held.content,
        big_endian=held.big_endian,
    )
    if held.content is None and nbytes > held.present and not held.is_filled:
        filled = ZeroFilledSource(sources[held.source], held.start, held.present, nbytes)
        sources.append(filled)
        return stored._replace(source=len(sources) - 1, start=0)
    return stored
