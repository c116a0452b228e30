"""The tree of a checkpoint as text, in the metadata of safetensors under the key `ckptmove`.

    {"version": 1, "root": TERM, "duplicates": [NAME, …]}

`pickles.terms` and `tensor_terms` define terms. Duplicates are tensors that repeat others, for
tools that look for them by name. If a file's tensors do not match its tree, another program edited
the file and kept the text: then the tensors are read and the tree is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CorruptError, UnsupportedError
from ..pickles.nodes import Call, Dict, Node
from ..pickles.terms import check_texts, from_terms, parse_term, term_json, to_terms
from .canonical import Graph
from .fingerprint import Content, Fingerprint
from .tensor_terms import TYPED, Held, MissingTensor, Reader, Speller

if TYPE_CHECKING:
    from .parts import Parts

#: The key of the metadata.
TREE = "ckptmove"
_VERSION = 1
_COUNTED = Call(None, None, "", 0)  # stands for a tensor that a fingerprint has


def tree_text(
    graph: Graph, parts: Parts, most_characters: int | None = None
) -> tuple[str, Content]:
    """Return the tree of a graph whose tensors are written as these parts, and its fingerprint.

    TooLong if it has too many characters.
    """
    speller = Speller(graph, parts)
    root = to_terms(graph.root, speller.leaf, most_characters, check_texts)
    said = {"version": _VERSION, "root": root}
    if parts.duplicates:
        said["duplicates"] = sorted(parts.duplicates)
    return term_json(said), speller.fingerprint.content()


def fingerprint_of(entries: Mapping[str, Held], text: str) -> Content:
    """Return the fingerprint of a tree from its text; raises as `read_tree`, or MissingTensor."""
    reader = _FingerprintReader(entries)
    _read_tree(reader, text)
    return reader.fingerprint.content()


class _FingerprintReader(Reader):
    """Reads only what a fingerprint needs: it makes no nodes for whole tensors of the file."""

    def __init__(self, entries: Mapping[str, Held]) -> None:
        super().__init__(entries)
        self.fingerprint = Fingerprint(self.graph)

    def leaf(self, term: dict[str, Any]) -> Node:
        node = super().leaf(term)
        if node is not _COUNTED:
            self.fingerprint.add(node)
        return node

    def whole(self, name: str, location: object = "cpu") -> Call:
        entry = self.entries[name]
        dtype = entry.dtype if entry.dtype in TYPED else None
        device = self.location_of(name, dtype, location)
        self.fingerprint.add_tensor(entry.dtype, tuple(entry.shape), device)
        return _COUNTED


def read_tree(
    entries: Mapping[str, Held],
    text: str | None,
    warnings: list[str],
    others: Mapping[str, str] | None = None,
    folder: str = "",
) -> tuple[Reader, Node]:
    """Return the reader of a file's tree, and the root; without a tree, a dict of the tensors.

    `text` is the tree in the metadata. `others`: further names of tensors → their main name, for
    files without a tree. `folder`: the prefix of storage ids. Warnings are added. UnsupportedError
    if the tree was written by a newer version.
    """
    if text is not None:
        try:
            reader = Reader(entries, folder)
            return reader, _read_tree(reader, text)
        except MissingTensor as error:
            warnings.append(f"{error}: its tree is ignored")
    reader, root = Reader(entries, folder), Dict()
    names = {**{name: name for name in entries}, **(others or {})}
    root.pairs = [(name, reader.whole(of)) for name, of in names.items()]
    reader.graph.root = root
    return reader, root


def _read_tree(reader: Reader, text: str) -> Node:
    said = parse_term(text)
    if not isinstance(said, dict) or not {"version", "root"} <= said.keys():
        raise CorruptError("its tree is malformed")
    if said["version"] != _VERSION:
        raise UnsupportedError("its tree was written by a newer version of ckptmove")
    duplicates = said.get("duplicates", [])
    if not _are_names(duplicates) or not said.keys() <= {"version", "root", "duplicates"}:
        raise CorruptError("its tree is malformed")
    entries, root = reader.entries, from_terms(said["root"], reader.leaf)
    strays = entries.keys() - reader.used - set(duplicates)
    if strays or not set(duplicates) <= entries.keys():
        stray = sorted(strays or set(duplicates) - entries.keys())[0]
        raise MissingTensor(f"its tree does not match its tensors, for example {stray!r}")
    reader.check_arrays(root)
    reader.graph.root = root
    reader.terms = True
    return root


def _are_names(said: object) -> bool:
    return isinstance(said, Sequence) and all(isinstance(name, str) for name in said)
