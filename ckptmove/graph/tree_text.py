"""The tree of a checkpoint as text, in the metadata of safetensors under the key `ckptmove`.

    {"version": 1, "root": TERM, "duplicates": [NAME, …]}

`pickles.terms` and `tensor_terms` define terms. Duplicates are tensors that repeat others, for
tools that look for them by name. If a file's tensors do not match its tree, another program edited
the file and kept the text: then the tensors are read and the tree is ignored.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

from ..errors import CorruptError, UnsupportedError
from ..pickles.flag_row import FlagRow
from ..pickles.nodes import Call, Dict, Node
from ..pickles.opcodes.pairs import Pairs
from ..pickles.terms import MAX_BITS, Term, check_texts, from_terms, parse_term, term_json, to_terms
from .canonical import Graph
from .fingerprint import Content, Fingerprint
from .tensor_terms import (
    TYPED,
    FileTensor,
    MissingTensor,
    Speller,
    TermReader,
    has_whole_elements,
    is_location,
    is_whole,
)

if TYPE_CHECKING:
    from .parts import Parts

#: The key of the metadata.
TREE = "ckptmove"
_VERSION = 1
_NOTHING = object()
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SCALARS = frozenset((Pairs, str, float, bool, NoneType, array, FlagRow))  # and rows of numbers
_COUNTED = Call(None, None, "", 0)  # stands for a tensor that a fingerprint has


def tree_text(
    graph: Graph, parts: Parts, most_characters: int | None = None
) -> tuple[str, Content]:
    """Return the tree of a graph whose tensors are written as these parts, and its fingerprint.

    TooLong if it has too many characters.
    """
    speller = Speller(graph, parts)
    root = to_terms(graph.root, speller.leaf, most_characters, check_texts, records=True)
    said = {"version": _VERSION, "root": root}
    if parts.duplicates:
        said["duplicates"] = sorted(parts.duplicates)
    return term_json(said), speller.fingerprint.content()


def fingerprint_of(entries: Mapping[str, FileTensor], text: str) -> Content:
    """Return the fingerprint of a tree from its text; raises as `read_tree`, or MissingTensor."""
    root, duplicates = _root_term(text)
    reader = _FingerprintReader(entries)
    if not _ESCAPED_SURROGATE.search(text) and reader.take_tensors(root):
        _check_names(reader, duplicates)
    else:
        reader = _FingerprintReader(entries)
        _read_nodes(reader, root, duplicates)
    return reader.fingerprint.content()


class _FingerprintReader(TermReader):
    """Reads only what a fingerprint needs: it makes no nodes for whole tensors of the file."""

    def __init__(self, entries: Mapping[str, FileTensor]) -> None:
        super().__init__(entries)
        self.fingerprint = Fingerprint(self.graph)

    def take_tensors(self, root: Term) -> bool:
        """Count all tensors of a tree; False unless it has only whole tensors and plain values."""
        todo, used, entries = [root], self.used, self.entries
        while todo:
            term = todo.pop()
            kind = term.get("$", _NOTHING) if type(term) is dict else _NOTHING
            if kind == "tensor":
                name = term.get("of")
                entry = entries.get(name) if type(name) is str and name not in used else None
                if entry is None or not is_whole(term, entry):
                    return False
                device = term.get("device", "cpu")
                if not is_location(device) or not has_whole_elements(entry):
                    return False
                used.add(name)
                self.fingerprint.add_tensor(entry.dtype, tuple(entry.shape), device)
                continue
            if type(term) is int:
                if term.bit_length() > MAX_BITS:
                    return False
                continue
            if kind in ("dict", "tuple") and len(term) == 2 and type(term.get("of")) is list:
                term = term["of"]
                if kind == "dict" and any(type(p) is not list or len(p) != 2 for p in term):
                    return False
            elif kind is not _NOTHING or type(term) not in (dict, list):
                return False
            inside = reversed(term.values() if type(term) is dict else term)
            todo += [each for each in inside if type(each) not in _SCALARS]
        return True

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
    entries: Mapping[str, FileTensor],
    text: str | None,
    warnings: list[str],
    others: Mapping[str, str] | None = None,
    folder: str = "",
) -> tuple[TermReader, Node]:
    """Return the reader of a file's tree, and the root; without a tree, a dict of the tensors.

    `text` is the tree in the metadata. `others`: further names of tensors → their main name, for
    files without a tree. `folder`: the prefix of storage ids. Warnings are added. UnsupportedError
    if the tree was written by a newer version.
    """
    if text is not None:
        try:
            reader = TermReader(entries, folder)
            return reader, _read_tree(reader, text)
        except MissingTensor as error:
            warnings.append(f"{error}: its tree is ignored")
    reader, root = TermReader(entries, folder), Dict()
    names = {**{name: name for name in entries}, **(others or {})}
    root.pairs = [(name, reader.whole(of)) for name, of in names.items()]
    reader.graph.root = root
    return reader, root


def _read_tree(reader: TermReader, text: str) -> Node:
    return _read_nodes(reader, *_root_term(text))


def _root_term(text: str) -> tuple[Term, Sequence[str]]:
    """Return the term of the root of a tree, and the names of its duplicates."""
    said = parse_term(text)
    if not isinstance(said, dict) or not {"version", "root"} <= said.keys():
        raise CorruptError("its tree is malformed")
    if said["version"] != _VERSION:
        raise UnsupportedError("its tree was written by a newer version of ckptmove")
    duplicates = said.get("duplicates", [])
    if not _are_names(duplicates) or not said.keys() <= {"version", "root", "duplicates"}:
        raise CorruptError("its tree is malformed")
    return said["root"], duplicates


def _check_names(reader: TermReader, duplicates: Sequence[str]) -> None:
    """Raises MissingTensor unless the tree has all tensors of the file except the duplicates."""
    entries = reader.entries
    strays = entries.keys() - reader.used - set(duplicates)
    if strays or not set(duplicates) <= entries.keys():
        stray = sorted(strays or set(duplicates) - entries.keys())[0]
        raise MissingTensor(f"its tree does not match its tensors, for example {stray!r}")


def _read_nodes(reader: TermReader, term: Term, duplicates: Sequence[str]) -> Node:
    """Return the graph of the root's term."""
    kinds = set[str]()
    root = from_terms(term, reader.leaf, kinds=kinds)
    _check_names(reader, duplicates)
    reader.check_arrays(root)
    reader.graph.root = root
    reader.terms = True
    reader.composed |= not kinds.isdisjoint(("bytes", "call", "persistent"))
    return root


def _are_names(said: object) -> bool:
    return isinstance(said, Sequence) and all(isinstance(name, str) for name in said)
