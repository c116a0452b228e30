"""Recognize the plain tensors of a canonical graph, and their further properties."""

from __future__ import annotations

from ..pickles.nodes import Call, Dict, Global, List, Node, Text, Tuple
from ..pickles.opcodes.mixed_rows import parts_of
from ..pickles.opcodes.plain_tensors import PlainTensor, compact_form, is_compact
from .traversal import COMPOSITE, held_by

#: The functions in torch._utils that rebuild them; the second if the dtype has no storage class.
V2, V3 = "_rebuild_tensor_v2", "_rebuild_tensor_v3"
FLAGS = ("conj", "neg")
_KEYS = frozenset((str, Text, int))
_PARAMETERS = {f"torch._utils._rebuild_parameter{end}" for end in ("", "_with_state")}


def is_plain(node: Node) -> bool:
    """Whether a node of a canonical graph is a plain tensor."""
    if type(node) is PlainTensor and compact_form(node) is not None:
        return True
    return (
        isinstance(node, Call)
        and isinstance(node.function, Global)
        and node.function.module == "torch._utils"
        and node.function.name in (V2, V3)
        and not (node.built or node.pairs or node.items or node.kwargs)
    )


def count_tensors(root: Node) -> int | None:
    """Return how many tensors a tree lists; None unless each is plain, and in plain containers.

    Nothing occurs in two places of such a tree, except values that hold no tensor.
    """
    count, met, todo = 0, set[int](), [root]
    while todo:
        node = todo.pop()
        known = id(node)
        if known in met and not (type(node) is Tuple and not node.items):
            return None
        met.add(known)
        if type(node) is PlainTensor:
            if compact_form(node) is None or not is_compact(node.storage):
                return None
            count += 1
            continue
        if type(node) is Dict:
            keys = [key for key, _ in node.pairs]
            if not _KEYS.issuperset(map(type, keys)) or len(set(keys)) < len(keys):
                return None
        elif type(node) is not List and type(node) is not Tuple:
            return None
        held = parts_of(held_by(node))
        todo += [each for each in held if type(each) in COMPOSITE]
    return count


def data_of(node: Node) -> Node:
    """Return the data of a parameter; for other nodes, the node itself."""
    while isinstance(node, Call) and node.qualname in _PARAMETERS:
        node = node.args.items[0] if isinstance(node.args, Tuple) and node.args.items else None
    return node


def flags_of(node: Call) -> dict[str, bool] | None:
    """Return the set flags of `conj` and `neg`, or None if a tensor has other attributes."""
    if compact_form(node) is not None:
        return {}
    items = node.args.items if isinstance(node.args, Tuple) else []
    rest = items[7 if node.qualname == f"torch._utils.{V3}" else 6 :]
    if not rest or rest == [None]:
        return {}
    if len(rest) > 1 or not isinstance(rest[0], Dict):
        return None
    found = {str(key): bool(value) for key, value in rest[0].pairs if isinstance(key, str)}
    return found if found.keys() <= set(FLAGS) and len(found) == len(rest[0].pairs) else None


def is_untouched(node: Call) -> bool:
    """Whether a plain tensor has no hooks."""
    if compact_form(node) is not None:
        return True
    items = node.args.items if isinstance(node.args, Tuple) else []
    hooks = items[5] if len(items) > 5 else None
    return hooks is None or (
        isinstance(hooks, Call)
        and hooks.qualname == "collections.OrderedDict"
        and not (hooks.pairs or hooks.built or hooks.items)
        and isinstance(hooks.args, Tuple)
        and not hooks.args.items
    )


def is_bare_tensor(node: Call) -> bool:
    """Whether this is a plain tensor without further properties."""
    if compact_form(node) is not None:
        return True
    return is_plain(node) and flags_of(node) is not None and is_untouched(node)
