"""Recognize the plain tensors of a canonical graph, and their further properties."""

from __future__ import annotations

from ..pickles.nodes import Call, Dict, Global, Node, Tuple
from ..pickles.opcodes.plain_tensors import PlainTensor, compact_form

#: The functions in torch._utils that rebuild them; the second if the dtype has no storage class.
V2, V3 = "_rebuild_tensor_v2", "_rebuild_tensor_v3"
FLAGS = ("conj", "neg")
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
