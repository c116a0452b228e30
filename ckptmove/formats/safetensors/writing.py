"""Write a checkpoint graph as safetensors: one file, or a folder of several with an index.

A folder has the layout of Hugging Face's libraries (`split_state_dict_into_shards` of
huggingface_hub): tensors in the order of the checkpoint, each file filled up to the limit, a larger
tensor alone in its own file. The tree is in the metadata of a single file, or of the index.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...display.phrases import few
from ...errors import UnsupportedError, WriteError
from ...graph.draft import CheckpointGraph, Pieces
from ...graph.edit.numpy_arrays import bytes_of_arrays
from ...graph.fill import stored_blob
from ...graph.fingerprint import Content
from ...graph.names import names_of
from ...graph.parts import Part, Parts, parts_of
from ...graph.tensor_terms import MissingTensor
from ...graph.tree_text import TREE, fingerprint_of, tree_text
from ...plans.plan import Plan
from ...sources.source import Readable
from ..writing import WriteOptions, WritePlan, assemble
from .header import HeaderEntry, TensorToWrite, lay_out, read_header
from .metadata import still_true

#: The metadata that every tool expects that reads safetensors for PyTorch.
_FOR_TORCH = {"format": "pt"}


def plan_write(draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
    """Plan to write a draft, if its names and its tree can be stored in safetensors."""
    contents = draft.list_contents()
    said = still_true(draft.metadata, {each.name for each in contents.tensors})
    arrays = bytes_of_arrays(draft, contents)
    names_and_nodes = iter(names_of(contents, draft, arrays))
    del contents
    parts = parts_of(
        draft,
        names_and_nodes,
        shared=options.shared,
        bare=options.bare,
        blob=lambda blob: stored_blob(draft, blob),
        arrays=arrays.values(),
    )
    told = expected_tree = None
    if not options.bare:
        told, expected_tree = tree_text(draft.graph, parts, options.most_nbytes)
    metadata = {**_FOR_TORCH, **said, **options.metadata}
    shards = [parts.parts]
    if options.max_shard_nbytes is not None:
        shards = _shards(parts.parts, options.max_shard_nbytes)
    files: dict[str, Plan] = {}
    expected: dict[str, Mapping[str, HeaderEntry]] = {}
    if not options.in_folder:
        names = [""]
    elif len(shards) == 1:
        names = [f"{options.stem}.safetensors"]
    else:
        names = [
            f"{options.stem}-{n:05}-of-{len(shards):05}.safetensors"
            for n in range(1, len(shards) + 1)
        ]
    if len(shards) == 1 and told is not None:
        metadata[TREE] = told
    for name, shard in zip(names, shards, strict=True):
        files[name], expected[name] = _file(shard, metadata)
    if len(shards) > 1:
        index = _index(names, shards, told)
        files[f"{options.stem}.safetensors.index.json"] = assemble(len(index), _only(index))

    # The text of the tree may be as long as the checkpoint, and the planned bytes already include
    # it.
    in_index = None if TREE in metadata else told
    expected_text = hash(metadata.pop(TREE, None))
    del told

    def check(written: Mapping[str, Readable]) -> None:
        """Read the headers and the tree back."""
        entries: dict[str, HeaderEntry] = {}
        text = in_index
        for name, laid in expected.items():
            header = read_header(written[name])
            said = dict(header.metadata)
            within = said.pop(TREE, None)
            if header.entries != laid or said != metadata or hash(within) != expected_text:
                raise WriteError("the written file has another header than planned")
            entries.update(header.entries)
            text = text if within is None else within
            del header, within
        if text is not None and not _is_as_planned(entries, text, expected_tree):
            raise WriteError("the written file has another tree than the source")

    return WritePlan(
        files,
        len(parts.parts),
        parts.shared,
        tuple(parts.duplicates),
        check,
        warnings=tuple(_lost_layouts(parts)),
    )


def _lost_layouts(parts: Parts) -> Iterator[str]:
    """The tensors that come back with the same values, laid out in another way."""
    restored = {parts.blobs[known] for known in parts.orders}
    names = [each.name for each in parts.parts if each.view and each.name not in restored]
    if names:
        yield f"written contiguous, without strides, conj and neg bits of their own: {few(names)}"


def _is_as_planned(entries: Mapping[str, HeaderEntry], text: str, expected: Content | None) -> bool:
    """Whether the text of a tree, when it is read, gives the planned tree."""
    try:
        return fingerprint_of(entries, text) == expected
    except MissingTensor:
        return False


def _file(
    parts: Sequence[Part], metadata: Mapping[str, str]
) -> tuple[Plan, Mapping[str, HeaderEntry]]:
    """The plan of one file, and the entries of its header."""
    laid = lay_out([tuple.__new__(TensorToWrite, part[:4]) for part in parts], metadata)
    pieces = _only(laid.head)
    for part in parts:
        at = laid.entries[part.name].start
        if part.view is not None:
            pieces.gather(part.stored, part.view, part.nbytes, at)
        else:
            pieces.put(part.stored, part.start, part.nbytes, at, part.stored.dtype or part.dtype)
    return assemble(laid.nbytes, pieces), laid.entries


def _only(content: bytes) -> Pieces:
    pieces = Pieces()
    pieces.write(0, content)
    return pieces


def _shards(parts: Sequence[Part], limit: int) -> list[list[Part]]:
    """Group tensors into files of at most `limit` bytes; a larger tensor has its own file."""
    shards: list[list[Part]] = []
    current: list[Part] = []
    filled = 0
    for part in parts:
        if part.nbytes > limit:
            shards.append([part])
            continue
        if filled + part.nbytes > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(part)
        filled += part.nbytes
    if current or not shards:
        shards.append(current)
    return shards


def _index(names: Sequence[str], shards: Sequence[Sequence[Part]], told: str | None) -> bytes:
    """The index with the file of each tensor, in the form of Hugging Face's libraries."""
    metadata: dict[str, Any] = {"total_size": sum(p.nbytes for shard in shards for p in shard)}
    if told is not None:
        metadata[TREE] = told
    where = {part.name: name for name, shard in zip(names, shards, strict=True) for part in shard}
    index = {"metadata": metadata, "weight_map": where}
    try:
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("utf-8")
    except UnicodeEncodeError as error:  # `lay_out` checked names; metadata are ours
        raise UnsupportedError("a name cannot be written as JSON") from error
