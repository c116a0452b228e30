"""Find dotted names that several tensors of a graph share, usually without listing all names.

In a tree of dicts, lists and tensors, as in nearly all checkpoints, names are made during one walk.
For other or very large trees, the listing of the whole content is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from functools import cached_property

from ...pickles.nodes import TEXTS, Blob, Call, Dict, Global, List, Node, Text, Tuple, are_plain
from ...pickles.opcodes.pairs import keys_of
from ...pickles.opcodes.plain_tensors import PlainTensor, compact_form
from ..canonical import Graph
from ..draft import CheckpointGraph

_LEAVES = frozenset((type(None), bool, int, float, str, Text, bytes, Blob, Global))
_KEYS = frozenset((*TEXTS, int))
_SAFE_BITS = 60  # largest number that is its own hash
_MOST_CHARACTERS = 1 << 26  # of all names
_MOST_AGAIN = 1000  # repeated tensors
_DEEPEST = 200


class NamesAlike:
    """The dotted names that several tensors of one draft have; found only if a name is shown."""

    def __init__(self, *drafts: CheckpointGraph) -> None:
        self._drafts = drafts

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @cached_property
    def _names(self) -> Set[str]:
        return frozenset().union(*map(names_alike, self._drafts))


def names_alike(draft: CheckpointGraph) -> Set[str]:
    """Return the dotted names that several tensors of a draft would have."""
    names = usual_names(draft.graph)
    if names is None:
        return draft.list_contents().alike
    if len(set(names)) == len(names):
        return frozenset()
    return {name for name, count in Counter(names).items() if count > 1}


def usual_names(graph: Graph) -> list[str] | None:
    """Return the dotted names of all tensors; None if the graph has unusual nodes."""
    names, met = list[str](), set[int]()
    room, again = _MOST_CHARACTERS, 0
    todo: list[tuple[Node, str, int]] = [(graph.root, "", 0)]  # each with the name of its container
    while todo:
        node, start, depth = todo.pop()
        room -= len(start)
        if _is_tensor(node, graph):
            again += id(node) in met
            names.append(start[:-1] if depth else "(root)")
        else:
            held = None if id(node) in met else _held(node)
            if held is None:
                return None
            todo += [(child, f"{start}{key}.", depth + 1) for key, child in reversed(held)]
        met.add(id(node))
        if room < 0 or again > _MOST_AGAIN or depth > _DEEPEST:
            return None
    return names


def _is_tensor(node: Node, graph: Graph) -> bool:
    """Whether a node is a tensor without inner tensors."""
    if type(node) is PlainTensor and compact_form(node) is not None:
        storage = graph.ids.get(id(node.storage))
        return storage is not None and storage.dtype is not None
    tensor = graph.recogniser.tensor(node) if isinstance(node, Call) else None
    return tensor is not None and not tensor.children


def _held(node: Node) -> Sequence[tuple[object, Node]] | None:
    """Return the children of a usual container by their keys; None for other nodes."""
    if isinstance(node, (List, Tuple)):
        if are_plain(node.items):
            return ()
        return [(n, each) for n, each in enumerate(node.items) if type(each) not in _LEAVES]
    pairs = node.pairs if isinstance(node, Dict) else []
    if isinstance(node, Call):
        plain = isinstance(node.args, Tuple) and not node.args.items and node.kwargs is None
        if node.qualname != "collections.OrderedDict" or not plain or node.items:
            return None
        if isinstance(node.state, Dict):
            pairs = [*node.state.pairs, *node.pairs]
        elif node.state is None:
            pairs = node.pairs
        else:
            return None
    elif not isinstance(node, Dict):
        return None
    keys = keys_of(pairs)
    kinds = set(map(type, keys))
    if not kinds <= _KEYS or len(set(keys)) < len(keys):
        return None
    if int in kinds and any(isinstance(k, int) and k.bit_length() > _SAFE_BITS for k in keys):
        return None
    return [(key, each) for key, each in pairs if type(each) not in _LEAVES]
